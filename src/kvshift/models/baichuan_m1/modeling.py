"""Baichuan-M1: only the differences from Llama with KV shift.

Shapes: E model width, V vocabulary.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import initialization as init
from transformers.models.llama.modeling_llama import (
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
)

from kvshift.layers import KVShift
from kvshift.models.baichuan_m1.configuration import BaichuanM1Config
from kvshift.models.baichuan_m1.head import NormHead, require_norm_head
from kvshift.models.baichuan_m1.layout import load_released_names, released_name
from kvshift.models.decoder import ShiftedAttention, ShiftedPreTrainedModel
from kvshift.models.generation import ShiftedGeneration
from kvshift.models.llama.modeling import KVShiftLlamaDecoderLayer, KVShiftLlamaModel, refuse_partial_rotary


class BaichuanM1Attention(ShiftedAttention, nn.Module):
    """Attention whose number and size of heads depend on the layer, with one matrix for queries, keys and values."""

    eager_attention = staticmethod(eager_attention_forward)
    llama_norm = LlamaRMSNorm
    is_causal = True

    def __init__(self, config: BaichuanM1Config, layer_idx: int) -> None:
        super().__init__()
        self.config: Any = config
        self.layer_idx = layer_idx
        self.num_heads, self.num_key_value_heads = config.heads(layer_idx)
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.head_dim = config.hidden_size // self.num_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = float(config.attention_dropout or 0)
        if config.layer_types[layer_idx] == "sliding_attention":
            self.sliding_window = config.sliding_window
        rows = (self.num_heads + 2 * self.num_key_value_heads) * self.head_dim
        self.W_pack = nn.Linear(config.hidden_size, rows, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.shift = KVShift(self.num_key_value_heads)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        packed = self.W_pack(hidden_states).view(*hidden_states.shape[:2], -1, self.head_dim)
        sizes = (self.num_heads, self.num_key_value_heads, self.num_key_value_heads)
        query, key, value = packed.split(sizes, dim=2)
        return query, key, value


class BaichuanM1DecoderLayer(KVShiftLlamaDecoderLayer):
    """Llama's decoder layer with `BaichuanM1Attention`."""

    attention_class = BaichuanM1Attention


class BaichuanM1PreTrainedModel(ShiftedPreTrainedModel, LlamaPreTrainedModel):
    """Base class of the models: it keeps coefficients in float32 and refuses checkpoints that do not fit."""

    config: BaichuanM1Config
    config_class = BaichuanM1Config
    _no_split_modules: ClassVar = ["BaichuanM1DecoderLayer"]
    _can_record_outputs: ClassVar = {"hidden_states": BaichuanM1DecoderLayer, "attentions": BaichuanM1Attention}

    def post_init(self) -> None:
        super().post_init()
        self.register_load_state_dict_pre_hook(load_released_names)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, NormHead):
            init.normal_(module.raw, std=self.config.initializer_range)
        else:
            super()._init_weights(module)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *model_args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load a model as transformers does, but require exactly the weights of the model: none is left at random.

        Raises:
            ValueError: weights are missing, unknown or of another shape; the message names them.
            OSError: a file is missing or cut off.
        """
        kwargs["ignore_mismatched_sizes"] = True  # refused below, with their names
        kwargs.setdefault("use_safetensors", True)  # nothing is unpickled unless requested
        name = pretrained_model_name_or_path
        try:
            loaded: Any = super().from_pretrained(name, *model_args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise OSError(f"a safetensors file of {name} is cut off or damaged: {error}") from error
        model, report = loaded
        wrong = {
            "lacks": [released_name(key) for key in report["missing_keys"]],
            "has unknown": [released_name(key) for key in report["unexpected_keys"]],
            "has the wrong shape for": [
                f"{released_name(key)} {tuple(found)} where {tuple(expected)} was expected"
                for key, found, expected in report["mismatched_keys"]
            ],
        }
        faults = [f"{verb} {', '.join(sorted(keys))}" for verb, keys in wrong.items() if keys]
        if faults:
            raise ValueError(f"{name} does not hold the weights of its {cls.__name__}: it {'; '.join(faults)}")
        return (model, report) if output_loading_info else model

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        is_root = not kwargs.get("prefix")  # only there does transformers set what is looked for
        if is_root and len({parameter.is_meta for parameter in self.parameters()}) == 2:
            self._require_from_pretrained()
        return super().state_dict(*args, **kwargs)  # type: ignore[misc]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "hf_device_map":
            self._require_from_pretrained()
        super().__setattr__(name, value)

    def _require_from_pretrained(self) -> None:
        """Raise a ValueError if accelerate has loaded some weights, by their names, and skipped the others."""
        if not hasattr(self, "_weight_conversions"):  # set by transformers
            raise ValueError(
                "load_checkpoint_and_dispatch of accelerate, with a device_map, would not find conv_k, conv_v and "
                "lm_head.weight, which have other names in the model: use from_pretrained(folder, device_map=...)"
            )


class BaichuanM1Model(BaichuanM1PreTrainedModel, KVShiftLlamaModel):
    """The decoder without a head; see `transformers.LlamaModel`."""

    layer_class = BaichuanM1DecoderLayer
    _keys_to_ignore_on_load_unexpected: ClassVar = [r"^lm_head\.raw$"]  # in a checkpoint with a head

    def rotary_embedding(self, config: BaichuanM1Config) -> nn.Module:
        """Return a rotary embedding for each type of layer: their head sizes differ."""
        by_type = {}
        for layer, kind in enumerate(config.layer_types):
            of_layer = copy.copy(config)
            of_layer.head_dim = config.hidden_size // config.heads(layer)[0]
            refuse_partial_rotary(of_layer)
            by_type[kind] = LlamaRotaryEmbedding(of_layer)
        return nn.ModuleDict(by_type)

    def rotary_tables(self, hidden_states: Tensor, position_ids: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        embeddings: Any = self.rotary_emb
        return {kind: rotary(hidden_states, position_ids=position_ids) for kind, rotary in embeddings.items()}


class BaichuanM1ForCausalLM(ShiftedGeneration, BaichuanM1PreTrainedModel, LlamaForCausalLM):
    """Baichuan-M1 with its language-modelling head; see `transformers.LlamaForCausalLM`."""

    _tp_plan: ClassVar = {}
    _tied_weights_keys: ClassVar = {"lm_head.raw": "model.embed_tokens.weight"}

    def __init__(self, config: BaichuanM1Config) -> None:
        self._check_config(config)
        super(LlamaForCausalLM, self).__init__(config)  # skips LlamaForCausalLM.__init__ and its LlamaModel
        self.model = BaichuanM1Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = NormHead(config.hidden_size, config.vocab_size)
        self.post_init()

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "lm_head":
            require_norm_head(value)
        super().__setattr__(name, value)

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Module:
        with torch.enable_grad():  # transformers reads weight.requires_grad
            return super().resize_token_embeddings(*args, **kwargs)

    def _get_resized_lm_head(self, old_lm_head: Any, *args: Any, **kwargs: Any) -> nn.Linear:
        linear = nn.Linear(1, 1, bias=False, device="meta")  # transformers resizes no other class
        linear.weight = old_lm_head.raw
        return super()._get_resized_lm_head(linear, *args, **kwargs)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the head, or its parameter by the weight of an nn.Linear."""
        if type(new_embeddings) is nn.Linear and new_embeddings.bias is None:
            self.lm_head.raw = new_embeddings.weight
        else:
            self.lm_head = new_embeddings

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as transformers does; the lengths of the head's rows are computed once for all tokens."""
        with self.lm_head.keeping_lengths() if isinstance(self.lm_head, NormHead) else nullcontext():
            return super().generate(*args, **kwargs)
