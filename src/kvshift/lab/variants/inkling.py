"""The convolution that Inkling is deployed with, on keys and values: of width 4, channel by channel, with residual.

    y[t, c] = x[t, c] + sum over j = 0..3 of weight[c, j] * x[t-j, c],    weight ~ N(0, initializer_range^2) at first

It stands right after the projections, before the norm of the keys. The sum is float32 and so are the weights, also in a
model of bfloat16. 8 numbers for each channel of a head. Inkling convolves what attention and MLP add to the residual
stream too, which this does not; how the weights start is that of transformers, not known of its training.

Source: transformers, models/inkling, InklingShortConvolution and InklingAttention.
"""

from functools import partial

from kvshift.lab.variants.convolution import ChannelConvolution
from kvshift.lab.variants.mixing import MixingVariant

__all__ = ["VARIANT"]

VARIANT = MixingVariant(
    name="inkling",
    make=partial(ChannelConvolution, window=4, residual=True, start="normal"),
    fields={"shift_targets": ["k", "v"], "shift_window": 4},
)
