"""Datasets generated once and kept in the cache of Hugging Face datasets (HF_DATASETS_CACHE)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import datasets.config
from datasets.exceptions import DatasetGenerationError

from kvshift.lab.core.errors import LabError

# Part of every key. To be raised with any change of the code that makes a dataset, which the other parts do not see.
_VERSION = 2


class CacheError(LabError):
    """The cache cannot be written, for instance because the disk is full."""

    exit_code = 3


def fingerprint(*parts: Any) -> str:
    """A key made of `parts`, which must be all that the dataset depends on and be fit for JSON."""
    return hashlib.sha256(json.dumps([_VERSION, *parts]).encode()).hexdigest()[:32]


def cached_dataset(
    generate: Callable[..., Iterator[dict[str, Any]]], features: datasets.Features, key: str, **arguments: Any
) -> datasets.Dataset:
    """The rows of `generate(**arguments)`, memory-mapped from the cache, generated where `key` is not there yet.

    Processes that ask for the same key at the same time wait for the first; what is written half is never read.
    """
    try:
        return datasets.Dataset.from_generator(generate, features=features, gen_kwargs=arguments, fingerprint=key)
    except DatasetGenerationError as error:
        cause = error.__cause__
        if isinstance(cause, LabError):
            raise cause from None
        if isinstance(cause, OSError):
            raise _cache_error(cause) from cause
        raise
    except OSError as error:
        raise _cache_error(error) from error
    except ValueError:  # what datasets says of a generator without rows
        if next(generate(**arguments), None) is not None:
            raise
        return datasets.Dataset.from_dict({name: [] for name in features}, features=features)


def _cache_error(error: OSError) -> CacheError:
    return CacheError(
        f"cannot write the data cache {datasets.config.HF_DATASETS_CACHE} (set HF_DATASETS_CACHE to move it): {error}"
    )
