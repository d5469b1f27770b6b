"""Conversion of torchtitan checkpoints to the Hugging Face layout of this package, and back.

Shapes: N heads, H head size, W window.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common import ComplexRoPE
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from kvshift.integrations.titan.hf_config import check_folder, hf_config

_IN_MODEL = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}
_IN_LAYER = {
    "attention.qkv_linear.wq": "self_attn.q_proj",
    "attention.qkv_linear.wk": "self_attn.k_proj",
    "attention.qkv_linear.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.shift": "self_attn.shift",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_ROTATED = tuple(f"attention.{name}." for name in ("qkv_linear.wq", "qkv_linear.wk", "q_norm", "k_norm"))


class ShiftStateDictAdapter(StateDictAdapter):
    """The layout of `kvshift.models` for Llama 3 and dense Qwen 3 with shift, in place of torchtitan's own adapters.

    Coefficients are transposed: (W, N) in torchtitan, (N, W) in transformers. transformers rotates dimensions i and
    i + H/2 of a head together, as torchtitan's CosSinRoPE does; its ComplexRoPE rotates 2i and 2i + 1. With the latter,
    rows of the projections of queries and keys are reordered, and biases and QK-norms with them.
    """

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert a state dict of torchtitan's model to one of `kvshift.models`.

        Raises:
            ValueError: the model has no equal in transformers, or a tensor has none; the message names what differs.
        """
        hf_config(self.model_config)
        tied = self.model_config.enable_weight_tying  # type: ignore[attr-defined]
        converted = {
            _renamed(name, "layers.", _IN_LAYER, "model.layers.", _IN_MODEL): self._reordered(name, x, to_hf=True)
            for name, x in state_dict.items()
            if not (tied and name == "lm_head.weight")
        }
        files = self.fqn_to_index_mapping  # of the original model: it may have a tied head, and has no coefficients
        if files:
            self.fqn_to_index_mapping = {name: files.get(name, max(files.values())) for name in converted}
        return converted

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Convert a state dict of `kvshift.models` to one of torchtitan's model, with the same errors."""
        in_layer, in_model = ({new: old for old, new in names.items()} for names in (_IN_LAYER, _IN_MODEL))
        converted = {}
        for hf_name, x in hf_state_dict.items():
            name = _renamed(hf_name, "model.layers.", in_layer, "layers.", in_model)
            converted[name] = self._reordered(name, x, to_hf=False)
        if self.model_config.enable_weight_tying and "tok_embeddings.weight" in converted:  # type: ignore[attr-defined]
            converted.setdefault("lm_head.weight", converted["tok_embeddings.weight"])
        return converted

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        """Return a reader of a folder of transformers, after a check that it holds the same model.

        Raises:
            ValueError: it does not; the message names the fields or tensors that differ.
        """
        check_folder(self.model_config, path)
        return super().get_hf_storage_reader(path, from_quantized)

    def _reordered(self, name: str, x: Tensor, *, to_hf: bool) -> Tensor:
        """Convert the tensor with this name in torchtitan."""
        if ".attention.shift." in name:
            return x.transpose(0, 1).contiguous()
        in_layer = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        if in_layer is None or not in_layer[2].startswith(_ROTATED):
            return x
        attention = self.model_config.layers[int(in_layer[1])].attention  # type: ignore[attr-defined]
        if not isinstance(attention.rope, ComplexRoPE.Config):
            return x
        if isinstance(x, DTensor):  # the dimensions of a head may lie on several ranks
            x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
        half = attention.rope.dim // 2
        pairs = (half, 2) if to_hf else (2, half)
        return x.unflatten(0, (-1, *pairs)).transpose(1, 2).flatten(0, 2).contiguous()


def _renamed(name: str, before: str, in_layer: Mapping[str, str], after: str, in_model: Mapping[str, str]) -> str:
    module, _, parameter = name.rpartition(".")
    number, _, rest = module.removeprefix(before).partition(".")
    is_layer = module.startswith(before)
    names, part = (in_layer, rest) if is_layer else (in_model, module)
    if part not in names:
        raise ValueError(
            f"the tensor {name!r} has no counterpart; known in {before or 'the model'}: {', '.join(names)}"
        )
    return f"{f'{after}{number}.' if is_layer else ''}{names[part]}.{parameter}"
