"""KV Shifting Attention: every key/value head mixes the current token's key and value with the previous token's.

What is listed here is the public API; nothing else is promised.
"""

from kvshift.ops import ShiftState, kv_shift

__version__ = "0.1.0"

__all__ = ["ShiftState", "__version__", "kv_shift"]
