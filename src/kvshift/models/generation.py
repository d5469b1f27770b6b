"""`generate` for models with KV shift."""

from __future__ import annotations

from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.cache_utils import Cache

from kvshift.models.cache import empty_shift_cache, ensure_shift_cache, stored_document_offset
from kvshift.models.configuration import ShiftConfig
from kvshift.models.documents import create_masks, document_index
from kvshift.models.versions import CACHE, refuse_unaware_peft, resolve_cache_argument


class ShiftedGeneration:
    """A mixin for `generate` with caches that carry the state of the shift."""

    config: ShiftConfig

    @staticmethod
    def create_masks_for_generate(
        config: ShiftConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> dict[str, Tensor | None]:
        """Create masks for static caches in `generate`. (Its default ignores the window of "hybrid_sliding" layers.)"""
        return create_masks(
            config, inputs_embeds, attention_mask, resolve_cache_argument(past_key_values, cache), position_ids
        )

    def _prepare_attention_mask_for_generation(
        self, inputs_tensor: Tensor, generation_config: Any, model_kwargs: dict[str, Any]
    ) -> Tensor:
        """Return ones for an assistant, which gets no mask of ones: pad tokens in its text would count as padding."""
        if generation_config.is_assistant:
            return torch.ones(inputs_tensor.shape[:2], dtype=torch.long, device=inputs_tensor.device)
        return super()._prepare_attention_mask_for_generation(  # type: ignore[misc]
            inputs_tensor, generation_config, model_kwargs
        )

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
        """Count from the start of each row's last document if the cache holds several, as `forward` does."""
        position_ids = super()._prepare_position_ids_for_generation(inputs_tensor, model_kwargs)  # type: ignore[misc]
        cache = model_kwargs.get(CACHE)
        begun = None if cache is None else stored_document_offset(cache)
        if begun is None or position_ids.shape[1] <= cache.get_seq_length():
            return position_ids
        rows = len(inputs_tensor)
        begun = begun[:: max(len(begun) // rows, 1)]  # beams share their beginning
        position_ids = position_ids.expand(rows, -1)
        return position_ids - position_ids.gather(1, begun.to(position_ids.device).unsqueeze(1))

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """Take `use_cache` from the configuration: config.json has a mark in its place, see `ShiftConfig.to_diff_dict`.

        Transformers reads that file where there is no generation_config.json.
        """
        super().adjust_generation_fn(*args, **kwargs)  # type: ignore[misc]
        settings: Any = self.generation_config  # type: ignore[attr-defined]
        if isinstance(settings.use_cache, dict):
            settings.use_cache = self.config.use_cache  # type: ignore[attr-defined]

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        """Restore the configured number of layers, which transformers does not do if a draft by early exit fails."""
        cache = kwargs.get(CACHE)
        if cache is not None and stored_document_offset(cache) is not None:
            raise ValueError(
                f"assisted decoding cannot continue a {CACHE} that holds several documents in a row: give the last "
                "document alone"
            )
        layers = self.config.num_hidden_layers
        try:
            return super()._assisted_decoding(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.config.num_hidden_layers = layers

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        _refuse_documents(generation_config, model_kwargs)
        kind = generation_config.cache_implementation
        if self.config.shift_targets and kind is not None and kind.startswith(("quantized", "offloaded")):
            raise ValueError(
                f"cache_implementation cannot be {kind!r}: such a cache has no place for the raw keys and values of "
                "the shift; leave it out, or set it to 'static'"
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]
        if model_kwargs.get(CACHE) is not None:
            refuse_unaware_peft(self)
            ensure_shift_cache(model_kwargs[CACHE], self.config)
            if generation_config.is_assistant:  # transformers did so on the replaced layers only
                model_kwargs[CACHE].activate_past_recording()

    @wraps(GenerationMixin.prepare_inputs_for_generation, assigned=(), updated=())  # `generate` reads its signature
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Prepare inputs as transformers does. A cache that the family drops is emptied instead, and stays in use.

        Phi-3 drops it where longer texts need other rotary frequencies. `forward` would make one that does not record
        what `crop` needs after rejected drafts, and that is never static.
        """
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        cache = kwargs.get(CACHE)
        if cache is not None and inputs.get(CACHE) is None and empty_shift_cache(cache):
            if "next_sequence_length" in kwargs:  # all tokens, of which transformers 5.16 takes only the last
                inputs = super().prepare_inputs_for_generation(*args, **kwargs | {"next_sequence_length": None})  # type: ignore[misc]
            inputs[CACHE] = cache
        return inputs

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "continuous batching (generate_batch) is not supported: its paged cache does not carry the raw keys and "
            "values of the shift. Use generate, or a server with a kvshift plugin"
        )

    generate_batch = continuous_batching_context_manager = init_continuous_batching


def _refuse_documents(generation_config: Any, model_kwargs: dict[str, Any]) -> None:
    """Raise a ValueError for document boundaries that `generate` would not carry from one forward pass to the next."""
    for name in ("cu_seq_lens_q", "seq_idx"):
        if model_kwargs.get(name) is not None:
            raise ValueError(
                f"{name} is an argument of forward, not of generate, which would pass it on unchanged as the sequences "
                "grow: give position_ids that restart at 0 for each document"
            )
    positions = model_kwargs.get("position_ids")
    if generation_config.prefill_chunk_size is None or positions is None:
        return
    mask = model_kwargs.get("attention_mask")
    real = torch.ones_like(positions) if mask is None else mask[:, -positions.shape[1] :]
    if document_index(len(real), real.shape[1], real != 0, position_ids=positions) is not None:
        raise ValueError(
            "prefill_chunk_size cannot be used with position_ids that restart within a sequence: a document that "
            "begins with a chunk would continue the one before"
        )
