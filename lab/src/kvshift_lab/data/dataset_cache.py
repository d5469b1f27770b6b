"""Generated datasets, stored in the cache of Hugging Face datasets (HF_DATASETS_CACHE)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import datasets.config
from datasets.exceptions import DatasetGenerationError

from kvshift_lab.core.errors import LabError

# Part of every key. Increase it whenever the code that makes a dataset changes, which the other parts do not reflect.
_VERSION = 2


class CacheError(LabError):
    """Raised when the cache cannot be written, for example because the disk is full."""

    exit_code = 3


def fingerprint(*parts: Any) -> str:
    """Return a cache key for `parts`: all values that the dataset depends on, each serializable as JSON."""
    return hashlib.sha256(json.dumps([_VERSION, *parts]).encode()).hexdigest()[:32]


def cached_dataset(
    generate: Callable[..., Iterator[dict[str, Any]]], features: datasets.Features, key: str, **arguments: Any
) -> datasets.Dataset:
    """Return the rows of `generate(**arguments)`, memory-mapped from the cache; generate them if `key` is missing.

    Concurrent processes with the same key wait for the first one. A partially written dataset is never read.
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
    except ValueError:  # datasets raises it for a generator without rows
        if next(generate(**arguments), None) is not None:
            raise
        return datasets.Dataset.from_dict({name: [] for name in features}, features=features)


def _cache_error(error: OSError) -> CacheError:
    return CacheError(
        f"cannot write the data cache {datasets.config.HF_DATASETS_CACHE} (set HF_DATASETS_CACHE to move it): {error}"
    )
