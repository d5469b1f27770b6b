"""What all models with KV shift have in common, whichever family of transformers they come from.

The classes stand before transformers' own. The cache keeps the last raw keys and values beside the shifted ones
(`cache.py`); padding and documents are read from the arguments that transformers' users pass (`boundaries.py`).

Shapes: B batch, T positions of this call, S sequences.
"""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from kvshift.layers import KVShift
from kvshift.models.boundaries import (
    check_flash_documents,
    document_index,
    document_start,
    padding_mask,
    same_document,
)
from kvshift.models.cache import adopt_cache, check_recording, keep_document_start, kept_document_start
from kvshift.models.configuration import ShiftConfig

_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention")  # what a name may begin with, kernels' included


class ShiftedPreTrainedModel:
    """Coefficients are initialised as the configuration says and stay in float32."""

    config_class: type[Any]
    _keep_in_fp32_modules_strict: ClassVar = ["shift"]

    def _check_config(self, config: Any) -> None:
        if not isinstance(config, self.config_class):
            raise TypeError(
                f"config must be a {self.config_class.__name__}, which says what to shift, got {type(config).__name__}"
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, KVShift):
            # Coefficients that were loaded are marked; where all are, nothing is drawn from the caller's generator.
            if not all(getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()):
                for name, start in module.start_values().items():
                    init.copy_(getattr(module, name), start)
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Also modules without parameters of their own, which transformers leaves out in classes that are not its own.

        Some scale those of a child: GPT-2's blocks the last matrix of each residual branch.
        """
        super()._initialize_weights(module)  # type: ignore[misc]


class ShiftedDecoder:
    """A stack of layers with shift, without a head."""

    config: ShiftConfig

    def begin(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | dict[str, Tensor | None] | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        *,
        seq_idx: Tensor | None,
        cu_seq_lens: Tensor | None,
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """Make a call ready: the cache can carry the shift's state, and every layer's masks are there.

        Args:
            inputs_embeds: (B, T, E); its shape, dtype and device count.
            attention_mask: (B, length so far), or what `create_masks` returned.
            position_ids: (B, T); None: they count on from the cache, and from the start of each document.
            past_key_values: of the call.
            seq_idx, cu_seq_lens: as in `document_index`.

        Returns:
            What `create_masks` does, and the position ids.
        """
        self._refuse_unknown_attention()
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
                cu_seq_lens=cu_seq_lens,
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
        return masks, position_ids

    def _refuse_unknown_attention(self) -> None:
        """Servers with attention and caches of their own would drop the state of the shift without a word."""
        name = str(self.config._attn_implementation)
        from_hub = "/" in name and not name.startswith("paged|")
        if not name.startswith(_ATTENTION) and not from_hub:
            raise ValueError(
                f"attn_implementation must be one of {', '.join(_ATTENTION)}, or a kernel from the hub, got {name!r}: "
                "its cache does not carry the raw keys and values"
            )


class ShiftedGeneration:
    """`generate` with caches that carry the state of the shift."""

    config: ShiftConfig

    @staticmethod
    def create_masks_for_generate(
        config: ShiftConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor | None]:
        """Called by `generate` for static caches. (Its default leaves out the window of "hybrid_sliding" layers.)"""
        return create_masks(config, inputs_embeds, attention_mask, past_key_values, position_ids)

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """An assistant is not told of a mask that is all ones; a pad token in its text is then no padding."""
        if generation_config.is_assistant:
            return torch.ones(inputs_tensor.shape[:2], dtype=torch.long, device=inputs_tensor.device)
        return super()._prepare_attention_mask_for_generation(  # type: ignore[misc]
            inputs_tensor, generation_config, model_kwargs
        )

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        """If a draft by early exit fails, transformers leaves its number of layers in the configuration."""
        layers = self.config.num_hidden_layers
        try:
            return super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.config.num_hidden_layers = layers

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any) -> None:
        _refuse_documents(generation_config, model_kwargs)
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args)  # type: ignore[misc]
        if model_kwargs.get("past_key_values") is not None:
            adopt_cache(model_kwargs["past_key_values"], self.config)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "continuous batching (generate_batch) is not supported: its paged cache does not carry the raw keys and "
            "values of the shift. Use generate, or a server with a kvshift plugin"
        )

    generate_batch = continuous_batching_context_manager = init_continuous_batching


def _refuse_documents(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Refuse names of documents that `generate` would not carry from one forward pass to the next."""
    for name in ("cu_seq_lens_q", "seq_idx"):
        if model_kwargs.get(name) is not None:
            raise ValueError(
                f"{name} is an argument of forward, not of generate, which would pass it on unchanged as the sequences "
                "grow: give position_ids that begin again at 0 with each document"
            )
    positions = model_kwargs.get("position_ids")
    if generation_config.prefill_chunk_size is None or positions is None:
        return
    mask = model_kwargs.get("attention_mask")
    real = torch.ones_like(positions) if mask is None else mask[:, -positions.shape[1] :]
    if document_index(len(real), real.shape[1], real != 0, position_ids=positions) is not None:
        raise ValueError(
            "prefill_chunk_size cannot be used with position_ids that begin again within a sequence: a document that "
            "begins with a chunk would continue the one before"
        )


def create_masks(
    config: ShiftConfig,
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
    sliding = getattr(config, "sliding_window", None) is not None
    create = create_sliding_window_causal_mask if sliding else create_causal_mask
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
