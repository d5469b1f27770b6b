"""A Canon layer on keys and values: a causal convolution of width 4, channel by channel, added to the token itself.

    y[t, c] = x[t, c] + sum over j = 0..3 of weight[c, j] * x[t-j, c],    weight ~ U(-1/2, 1/2) at first

It stands after QK-norm, where there is one, and before rotary embedding, as Canon-B does in its source, which mixes
queries too; this takes keys and values, as KV shift does. 8 numbers for each channel of a head.

Source: Allen-Zhu, Physics of Language Models: Part 4.1 (2025); PhysicsLM4, lingua_modified/lingua/canon_helper.py.
"""

from functools import partial

from kvshift.lab.variants.convolution import ChannelConvolution
from kvshift.lab.variants.mixing import MixingVariant

__all__ = ["VARIANT"]

VARIANT = MixingVariant(
    name="canon",
    make=partial(ChannelConvolution, window=4, residual=True, start="fan_in", after_norm=True),
    fields={"shift_targets": ["k", "v"], "shift_window": 4},
)
