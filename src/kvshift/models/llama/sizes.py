"""The paper's models by the name of their size."""

from __future__ import annotations

from typing import Any

from kvshift.models.llama.configuration import KVShiftLlamaConfig
from kvshift.models.paper_sizes import SIZES

__all__ = ["SIZES", "size_config"]


def size_config(name: str, **changes: Any) -> KVShiftLlamaConfig:
    """The configuration of one of the paper's models.

        config = size_config("1.5B", shift_targets=())  # its vanilla twin

    Args:
        name: "0.2B" (tables 6 to 13), "1.5B", "2.9B", "6.7B", "13B" or "19B" (tables 1 and 16).
        changes: any fields of `KVShiftLlamaConfig` to set otherwise.
    """
    if name not in SIZES:
        raise ValueError(f"name must be one of {', '.join(SIZES)}; got {name!r}")
    return KVShiftLlamaConfig(**{**SIZES[name], **changes})
