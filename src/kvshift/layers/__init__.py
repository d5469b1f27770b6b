"""Level 1: modules, which depend on torch and `kvshift.ops` alone."""

from kvshift.layers.attention import KVShiftAttention
from kvshift.layers.attention_state import AttentionState
from kvshift.layers.halo import exchange_halo, shift_shard
from kvshift.layers.optim import clamp_after_step, param_groups
from kvshift.layers.options import ShiftOptions
from kvshift.layers.shift import KVShift

__all__ = [
    "AttentionState",
    "KVShift",
    "KVShiftAttention",
    "ShiftOptions",
    "clamp_after_step",
    "exchange_halo",
    "param_groups",
    "shift_shard",
]
