"""KV Shifting Attention: every key/value head mixes the current token's key and value with the previous token's.

The names in `__all__` are the public API; nothing else is promised. Each name is imported on first use, because
importing torch takes seconds and `kvshift --help` does not need it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvshift.layers import (
        AttentionState,
        KVShift,
        KVShiftAttention,
        ShiftOptions,
        clamp_after_step,
        exchange_halo,
        param_groups,
        shift_shard,
    )
    from kvshift.ops import ShiftState, kv_shift

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "KVShift",
    "KVShiftAttention",
    "ShiftOptions",
    "ShiftState",
    "__version__",
    "clamp_after_step",
    "exchange_halo",
    "kv_shift",
    "param_groups",
    "shift_shard",
]

_OPERATOR = ("ShiftState", "kv_shift")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("kvshift.ops" if name in _OPERATOR else "kvshift.layers"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
