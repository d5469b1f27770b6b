"""Mixins for models that cannot decode with a cache: they generate without one, and raise an error if given one."""

from __future__ import annotations

from typing import Any

from kvshift.lab.variants.model_classes import NamedConfig
from kvshift.models.versions import CACHE, resolve_cache_argument


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

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict, *args: Any) -> None:
        if model_kwargs.get(CACHE) is not None or generation_config.use_cache is True:
            raise ValueError(f"use_cache must be False and {CACHE} None: {_no_cache(self)}")
        generation_config.use_cache = model_kwargs["use_cache"] = False


def decodes_with_cache(model: Any) -> bool:
    """Return the attribute `decodes_with_cache` of a model or model class; True where it is not defined."""
    return getattr(model, "decodes_with_cache", True)


def _no_cache(model: Any) -> str:
    return f"{model.config.model_type} does not decode with a cache"
