"""The checkpoint that the authors published with the paper, as weights of `KVShiftLlamaForCausalLM`.

Shapes: H query heads, G KV heads, D head size, E model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvshift.models.llama import KVShiftLlamaConfig

_COEFFICIENTS = {"K": "shift.alpha", "V": "shift.beta"}


def from_paper(weights: Mapping[str, Tensor], config: KVShiftLlamaConfig, *, norm_head: bool) -> dict[str, Tensor]:
    """Convert the weights of `KV_shifting_2.9B` to a state dict of `KVShiftLlamaForCausalLM`.

        self_attn.K, V (G, 2), previous token first     self_attn.shift.alpha, beta (G, 2), current token first
        self_attn.W_pack.weight ((H + 2 G) D, E)        self_attn.{q,k,v}_proj.weight, the rows in this order
        lm_head.weight (V, E)                           with `norm_head`, rows / (their L2 norm + 1e-7)

    All other names are those of Llama. The names, shape and order of `K` and `V` are the paper's (appendix M). The
    other names are Baichuan's and not confirmed; `load_state_dict` refuses weights with any other name.

    Args:
        weights: tensors by name; they are not modified.
        config: configuration of the model, `size_config("2.9B")`.
        norm_head: whether the model normalises the rows of its head, as Baichuan-M1 does; the paper does not say.

    Source:
        Table 16 (sizes), appendix M (coefficients).
    """
    head_size = config.head_dim or config.hidden_size // config.num_attention_heads
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        start, _, last = name.rpartition(".")
        if start.endswith(".self_attn") and last in _COEFFICIENTS:
            found[f"{start}.{_COEFFICIENTS[last]}"] = tensor.reshape(-1, tensor.shape[-1]).flip(-1).float()
        elif start.endswith(".self_attn.W_pack") and len(tensor) == (heads + 2 * kv_heads) * head_size:
            rows = tensor.split([heads * head_size, kv_heads * head_size, kv_heads * head_size])
            for letter, part in zip("qkv", rows, strict=True):
                found[name.replace("W_pack", f"{letter}_proj")] = part
        elif name == "lm_head.weight" and norm_head:
            wide = tensor.float()
            found[name] = (wide / (torch.linalg.vector_norm(wide, dim=1, keepdim=True) + 1e-7)).to(tensor.dtype)
        else:
            found[name] = tensor
    return found
