"""KV Shifting Attention: every key/value head mixes the current token's key and value with the previous token's.

What is listed here is the public API; nothing else is promised.
"""

from kvshift.layers import AttentionState, KVShift, KVShiftAttention, clamp_after_step, param_groups
from kvshift.ops import ShiftState, kv_shift

__version__ = "0.1.0"

__all__ = [
    "AttentionState",
    "KVShift",
    "KVShiftAttention",
    "ShiftState",
    "__version__",
    "clamp_after_step",
    "kv_shift",
    "param_groups",
]
