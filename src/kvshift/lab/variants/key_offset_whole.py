"""The key offset of all dimensions: every key is that of the token before, KV shift with a = (0, 1) and b = (1, 0).

Where a document begins, a key stays its own, as in `key_offset`; in KV shift it would be 0.
"""

from functools import partial

from kvshift.lab.variants.key_offset import KeyOffset
from kvshift.lab.variants.mixing import MixingVariant

__all__ = ["VARIANT"]

VARIANT = MixingVariant(
    name="key-offset-whole",
    make=partial(KeyOffset, whole=True),
    fields={"shift_targets": ["k"], "shift_window": 2},
)
