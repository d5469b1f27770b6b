"""Llama with KV shift: what differs from transformers' Llama, and nothing else.

Every layer shifts the projected keys and values before QK-norm and rotary embedding. The cache keeps the last raw
ones beside the shifted (`cache.py`); padding and documents reach the shift through `boundaries.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, cast

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    eager_attention_forward,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from kvshift.layers import KVShift
from kvshift.layers.positions import half_tables, rotate_half
from kvshift.models.llama.boundaries import (
    check_flash_documents,
    document_index,
    document_start,
    padding_mask,
    same_document,
)
from kvshift.models.llama.cache import (
    ShiftCacheLayer,
    adopt_cache,
    check_recording,
    keep_document_start,
    kept_document_start,
)
from kvshift.models.llama.configuration import KVShiftLlamaConfig

_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention")  # what a name may begin with, kernels' included


class KVShiftLlamaAttention(LlamaAttention):
    """Llama's attention over shifted keys and values."""

    def __init__(self, config: KVShiftLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.sliding_window = config.sliding_window
        self.qk_norm = config.qk_norm  # read at every token: an attribute of the module costs less than the config's
        self.shift = KVShift(
            config.num_key_value_heads,
            num_heads=config.num_attention_heads,
            targets=config.shift_targets,
            window=config.shift_window,
            constraint=config.shift_constraint,
            init=config.shift_init,
        )
        if config.qk_norm:
            self.q_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)
            self.k_norm = LlamaRMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        shift_mask: Tensor | None = None,
        shift_seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        batch, positions = hidden_states.shape[:2]
        heads = (batch, positions, -1, self.head_dim)  # the layout of the operator
        query = self.q_proj(hidden_states).view(heads)
        key = self.k_proj(hidden_states).view(heads)
        value = self.v_proj(hidden_states).view(heads)

        rotary = None if self.qk_norm else position_embeddings  # the norm stands between shift and rotation
        query, key, value = self._shift(query, key, value, rotary, past_key_values, shift_mask, shift_seq_idx)
        if self.qk_norm:
            query = rotate_half(self.q_norm(query), position_embeddings)
            key = rotate_half(self.k_norm(key), position_embeddings)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)

        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.reshape(batch, positions, -1).contiguous()), weights

    def _shift(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotary: tuple[Tensor, Tensor] | None,
        cache: Cache | None,
        mask: Tensor | None,
        seq_idx: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Shift, on from the state in the cache, and rotate."""
        if cache is None or not self.shift.targets:
            q, k, v, _ = self.shift(q, k, v, seq_idx=seq_idx, mask=mask, rotary=rotary)
            return q, k, v
        layer = cast(ShiftCacheLayer, cache.layers[self.layer_idx])
        if layer.record_past and mask is not None:
            # Padding on the left can as well be zeros: then one raw row is kept for every position, as `crop` counts.
            padding = ~mask[:, :, None, None]
            q, k, v = q.masked_fill(padding, 0), k.masked_fill(padding, 0), v.masked_fill(padding, 0)
            mask = None
        state = layer.read_shift(q, k, v, with_queries="q" in self.shift.targets)
        q, k, v, state = self.shift(q, k, v, state=state, seq_idx=seq_idx, mask=mask, rotary=rotary)
        layer.write_shift(state)
        return q, k, v


class KVShiftLlamaDecoderLayer(LlamaDecoderLayer):
    """Llama's layer around `KVShiftLlamaAttention`."""

    def __init__(self, config: KVShiftLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.self_attn = KVShiftLlamaAttention(config, layer_idx)


class KVShiftLlamaPreTrainedModel(LlamaPreTrainedModel):
    """What the models of the family share; coefficients are initialised here and stay in float32."""

    config: KVShiftLlamaConfig
    config_class = KVShiftLlamaConfig
    _no_split_modules: ClassVar = ["KVShiftLlamaDecoderLayer"]
    _keep_in_fp32_modules_strict: ClassVar = ["shift"]
    _can_record_outputs: ClassVar = {"hidden_states": KVShiftLlamaDecoderLayer, "attentions": KVShiftLlamaAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, KVShift):
            for name, start in module.start_values().items():
                init.copy_(getattr(module, name), start)
        else:
            super()._init_weights(module)


class KVShiftLlamaModel(KVShiftLlamaPreTrainedModel, LlamaModel):
    """The decoder without a head; see `transformers.LlamaModel`."""

    def __init__(self, config: KVShiftLlamaConfig) -> None:
        super(LlamaModel, self).__init__(config)  # not Llama's own: its layers would take memory and be thrown away
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(KVShiftLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """As `transformers.LlamaModel.forward`, and documents packed into one row do not see each other.

        Neither shift nor attention crosses a boundary, with a cache or without. The first document of a call goes on
        with the last one in the cache.

        Args:
            seq_idx: (B, T) number of the document at each position; one begins where it changes.
            cu_seq_lens_q: (S + 1,) boundaries of the documents in the one row of a pack.
            position_ids: (B, T); where neither of the above is given, a document begins wherever they do not go on
                by one. Where they are not given, they count from the start of each document.
        """
        self._refuse_unknown_attention()
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)

        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if past_key_values is not None:
            adopt_cache(past_key_values, self.config)

        masks = attention_mask
        if not isinstance(masks, dict):
            masks = create_masks(
                self.config,
                inputs_embeds,
                attention_mask,
                past_key_values,
                position_ids,
                seq_idx=seq_idx,
                cu_seq_lens=cu_seq_lens_q,
            )
        if past_key_values is not None:
            check_recording(past_key_values, masks["padding"], attention_mask, masks["documents"])
        starts = masks["starts"]
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + seen).unsqueeze(0)
            if starts is not None:
                position_ids = position_ids - starts
        if past_key_values is not None and starts is not None:
            keep_document_start(past_key_values, starts[:, -1])
        if cu_seq_lens_q is not None:
            kwargs["cu_seq_lens_q"] = cu_seq_lens_q

        hidden_states = inputs_embeds
        position_embeddings = half_tables(*self.rotary_emb(hidden_states, position_ids=position_ids))
        for decoder_layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=masks["attention"],
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                past_key_values=past_key_values,
                use_cache=use_cache,
                shift_mask=masks["padding"],
                shift_seq_idx=masks["documents"],
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values)

    def _refuse_unknown_attention(self) -> None:
        """Servers with attention and caches of their own would drop the state of the shift without a word."""
        name = str(self.config._attn_implementation)
        from_hub = "/" in name and not name.startswith("paged|")
        if not name.startswith(_ATTENTION) and not from_hub:
            raise ValueError(
                f"attn_implementation must be one of {', '.join(_ATTENTION)}, or a kernel from the hub, got {name!r}: "
                "its cache does not carry the raw keys and values"
            )


class KVShiftLlamaForCausalLM(KVShiftLlamaPreTrainedModel, LlamaForCausalLM):
    """Llama with KV shift and a language-modelling head; see `transformers.LlamaForCausalLM`."""

    def __init__(self, config: KVShiftLlamaConfig) -> None:
        super(LlamaForCausalLM, self).__init__(config)  # not Llama's own, as above
        self.model = KVShiftLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(
        config: KVShiftLlamaConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor | None]:
        """Called by `generate` for static caches. (Its default leaves out the window of "hybrid_sliding" layers.)"""
        return create_masks(config, inputs_embeds, attention_mask, past_key_values, position_ids)

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any) -> None:
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)
        if model_kwargs.get("past_key_values") is not None:
            adopt_cache(model_kwargs["past_key_values"], self.config)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "continuous batching (generate_batch) is not supported: its paged cache does not carry the raw keys and "
            "values of the shift. Use generate, or a server with a kvshift plugin"
        )

    generate_batch = continuous_batching_context_manager = init_continuous_batching


def create_masks(
    config: KVShiftLlamaConfig,
    inputs_embeds: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Cache | None,
    position_ids: Tensor | None,
    *,
    seq_idx: Tensor | None = None,
    cu_seq_lens: Tensor | None = None,
) -> dict[str, Tensor | None]:
    """What every layer needs to know of padding and documents.

    Returns:
        "attention": the mask of its scores; "padding": (B, T), False on padding, and "documents": (B, T), their
        numbers, for the shift; "starts": (B, T), where each position's document begins. None where there is none.
    """
    batch, positions = inputs_embeds.shape[:2]
    padding = padding_mask(attention_mask, positions)
    documents = document_index(
        batch, positions, padding, seq_idx=seq_idx, cu_seq_lens=cu_seq_lens, position_ids=position_ids
    )
    begun = None if past_key_values is None else kept_document_start(past_key_values)
    starts, of_own_document = None, None
    if documents is not None or begun is not None:
        seen = past_key_values.get_seq_length() if past_key_values is not None else 0
        numbers = inputs_embeds.new_zeros(batch, positions, dtype=torch.long) if documents is None else documents
        starts = document_start(numbers, seen, begun)
        of_own_document = same_document(starts, seen)
        if str(config._attn_implementation).startswith("flash_attention"):
            check_flash_documents(
                documents,
                goes_on=begun is not None,
                real_BT=padding,
                position_ids=position_ids,
                cu_seq_lens=cu_seq_lens,
            )
    create = create_causal_mask if config.sliding_window is None else create_sliding_window_causal_mask
    return {
        "attention": create(
            config=config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=None,  # from which transformers would take documents, but not beside a cache or a mask
            and_mask_function=of_own_document,
        ),
        "padding": padding,
        "documents": documents,
        "starts": starts,
    }
