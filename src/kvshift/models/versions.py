"""Differences between the supported versions of transformers, and which versions are tested."""

from __future__ import annotations

import inspect
import sys
import warnings
from difflib import get_close_matches
from functools import cache as once
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache
from transformers.masking_utils import create_causal_mask
from transformers.utils.generic import TransformersKwargs

OLDEST, NEWEST = "5.16.1", "5.24.0"
"""Oldest and newest version that `pyproject.toml` allows; CI tests both."""

CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""Name of the cache argument of `forward` in the installed version of transformers: "cache" from 5.24 on."""

_PASSED_ON = {*TransformersKwargs.__optional_keys__, "ignore_index", "return_dict", "shift_labels"} - {
    "output_router_logits"  # only for mixtures of experts, and no model here is one
}


@once
def warn_if_untested() -> None:
    """Warn, once per process, if the installed version of transformers is outside the tested range."""
    if not Version(OLDEST) <= Version(transformers.__version__) <= Version(NEWEST):
        warnings.warn(
            f"transformers {transformers.__version__} has not been tested with KV shift; versions {OLDEST} to {NEWEST} "
            "have. Before you rely on this model, run `kvshift check` on it, or install a tested version",
            stacklevel=3,
        )


def resolve_cache_argument(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """Return the cache of a call, from either name of the argument; before transformers 5.24 only the first exists.

    From 5.24 on the first is deprecated, with the warning that transformers' own classes give.

    Raises:
        TypeError: both are given, or `cache` is given with an older version.
    """
    if cache is not None and CACHE != "cache":
        raise TypeError(f"unknown argument cache: transformers {transformers.__version__} calls it past_key_values")
    if cache is not None and past_key_values is not None:
        raise TypeError("cache and past_key_values are the same argument: give only cache")
    if past_key_values is not None and CACHE == "cache" and not torch.compiler.is_compiling():
        warnings.warn("`past_key_values` is deprecated: use `cache` instead", FutureWarning, stacklevel=6)
    return past_key_values if cache is None else cache


def refuse_unaware_peft(model: Any) -> None:
    """Raise a ValueError if PEFT calls `generate` for a learned prompt and does not know the name of the cache.

    PEFT replaces `prepare_inputs_for_generation` of the model by its own, which looks for `past_key_values` to tell the
    first forward pass from the others. Without it, PEFT 0.21 inserts the learned prompt again before every token, and
    leaves out a learned prefix.
    """
    peft_model = getattr(vars(model).get("prepare_inputs_for_generation"), "__self__", None)
    peft_config = getattr(peft_model, "active_peft_config", None)
    if CACHE == "past_key_values" or not getattr(peft_config, "is_prompt_learning", False):
        return
    peft: Any = sys.modules["peft"]
    if Version(peft.__version__) < Version("0.22"):
        method = peft_config.peft_type.value
        instead = f"use_cache=False, or transformers {OLDEST} to 5.23.0"
        if method in ("PREFIX_TUNING", "CARTRIDGE"):  # their keys and values are refused there
            instead = "LoRA or prompt tuning in its place"
        raise ValueError(
            f"PEFT {peft.__version__} does not fit transformers {transformers.__version__}: to generate with {method}, "
            f"it looks for a cache named past_key_values, which is now named {CACHE}, and tokens would be wrong. "
            f"Use {instead}"
        )


def refuse_unknown(model: Any, arguments: dict[str, Any]) -> None:
    """Raise a TypeError for a keyword argument, other than None, that no layer uses; a ValueError for is_causal=False.

    Args:
        model: a decoder.
        arguments: keyword arguments that are not named in the signature of its `forward`.
    """
    for name in arguments.keys() - _PASSED_ON - model.own_arguments:
        if arguments[name] is not None:
            known = inspect.signature(model.forward).parameters.keys() | _PASSED_ON
            hint = "".join(f"; did you mean {close}?" for close in get_close_matches(name, known, n=1))
            raise TypeError(f"unknown argument {name}: nothing in {type(model).__name__} takes it{hint}")
    if arguments.get("is_causal") is False:
        raise ValueError("is_causal must be True or None, got False: the shift only looks back")
