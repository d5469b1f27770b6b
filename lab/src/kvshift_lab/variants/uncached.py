"""Mixins for models that cannot decode with a cache: they generate without one, and raise an error if given one."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from kvshift.models.extending import CACHE, resolve_cache_argument
from kvshift_lab.variants.model_classes import NamedConfig


class UncachedConfig(NamedConfig):
    """A mixin for the configuration of a model that decodes without a cache."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]
        self.use_cache = False


class UncachedDecoder:
    """A mixin for the decoder of a family, such as `KVShiftLlamaModel`; it raises a ValueError if a cache is used."""

    config: UncachedConfig

    def forward(
        self, *args: Any, past_key_values: Any = None, cache: Any = None, use_cache: Any = None, **kwargs: Any
    ) -> Any:
        if use_cache or resolve_cache_argument(past_key_values, cache) is not None:
            raise ValueError(f"use_cache must be False and {CACHE} None: {_no_cache(self)}")
        return super().forward(*args, use_cache=False, **kwargs)  # type: ignore[misc]


class UncachedGeneration:
    """A mixin for a model with `generate`, which then recomputes all previous tokens for each new one."""

    decodes_with_cache = False
    config: UncachedConfig

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if model_kwargs.get(CACHE) is not None or generation_config.use_cache is True:
            raise ValueError(f"use_cache must be False and {CACHE} None: {_no_cache(self)}")
        generation_config.use_cache = model_kwargs["use_cache"] = False


class TaskModel:
    """A mixin for a model that scores the tokens of a task at every position, without a cache and without `generate`.

    Shapes: B sequences, T positions, E width, C output classes.
    """

    base_model: Any
    loss_function: Any

    def logits(self, hidden_states: Tensor) -> Tensor:
        """Return the logits (B, T, C), given the output of the decoder (B, T, E)."""
        raise NotImplementedError

    def forward(
        self, input_ids: Tensor | None = None, *, labels: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutput:
        """Return the logits and their mean cross-entropy with the labels.

        Args:
            input_ids: (B, T).
            labels: (B, T). The output at t - 1 is compared with labels[t]; positions with -100 are ignored.
            kwargs: further arguments of the decoder, such as attention_mask; use_cache is always False.

        Returns:
            `loss`, None without labels, and `logits` (B, T, C).
        """
        in_batch = kwargs.pop("num_items_in_batch", None)  # from Trainer: number of labels in all batches of a step
        output = self.base_model(input_ids, **{**kwargs, "use_cache": False})
        logits, loss = self.logits(output.last_hidden_state), None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], num_items_in_batch=in_batch)
        return CausalLMOutput(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )


def decodes_with_cache(model: Any) -> bool:
    """Return the attribute `decodes_with_cache` of a model or model class; True where it is not defined."""
    return getattr(model, "decodes_with_cache", True)


def _no_cache(model: Any) -> str:
    return f"{model.config.model_type} does not decode with a cache"
