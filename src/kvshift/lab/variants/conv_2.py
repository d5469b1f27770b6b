"""KV shift with its four numbers for each channel of a head in place of each head: a causal convolution of width 2.

    y[t, c] = weight[c, 0] * x[t, c] + weight[c, 1] * x[t-1, c]

All else is as in KV shift, place and start values included (U(0, 1), summing to 1), so that a comparison of the two is
of nothing but this.
"""

from functools import partial

from kvshift.lab.variants.convolution import ChannelConvolution
from kvshift.lab.variants.mixing import MixingVariant

__all__ = ["VARIANT"]

VARIANT = MixingVariant(
    name="conv-2",
    make=partial(ChannelConvolution, window=2),
    fields={"shift_targets": ["k", "v"], "shift_window": 2},
)
