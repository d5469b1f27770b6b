"""Figure 1a: one layer with KV shift learns induction, and does so sooner than two layers without."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="fig01a",
    title="one layer learns induction",
    presets={
        "smoke": Preset(seeds=1, cost="15 seconds on two cores"),
        "laptop": Preset(
            seeds=5,
            cost="100 minutes on two cores",
            grid=Grid(rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), steps=1500),
        ),
        "paper": Preset(seeds=3, cost="hours on one GPU; not measured"),
    },
    study="induction",
)
