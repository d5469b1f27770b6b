"""Figure 4c at rates that are doubled, without clipping and QK-norm, until plain attention diverges.

No preset has a grid, because the learning rates are themselves the subject: `RATES` in study.py.
"""

from kvshift_lab.study.entry import Entry, Preset

ENTRY = Entry(
    name="fig04c",
    title="divergence at doubled rates, without clipping and QK-norm",
    presets={
        "smoke": Preset(seeds=1, cost="40 seconds on two cores"),
        "laptop": Preset(seeds=6, cost="half an hour on two cores"),
    },
)
