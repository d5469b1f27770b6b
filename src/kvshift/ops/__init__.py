"""Level 0: the operator, which depends on torch alone."""

from kvshift.ops.dispatch import BACKENDS
from kvshift.ops.shift import kv_shift, shift_tokens
from kvshift.ops.state import ShiftState

__all__ = ["BACKENDS", "ShiftState", "kv_shift", "shift_tokens"]
