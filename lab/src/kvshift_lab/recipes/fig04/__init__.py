"""Figure 4: vanilla and KV shift over seeds and learning rates, and which of them diverge.

No preset has a grid, because the learning rates are themselves the subject: `PAPER_RATES` in study.py.
"""

from kvshift_lab.study.entry import Entry, Preset

ENTRY = Entry(
    name="fig04",
    title="seeds, learning rates and divergence",
    presets={
        "smoke": Preset(seeds=1, cost="20 seconds on two cores"),
        "laptop": Preset(seeds=5, cost="40 minutes on two cores"),
        "paper": Preset(seeds=5, cost="40 runs of a model of 1.5B on many GPUs; not measured"),
    },
)
