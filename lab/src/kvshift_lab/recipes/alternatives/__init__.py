"""Figure 1a under other readings of details that the paper leaves open: does its comparison depend on them?"""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="alternatives",
    title="Figure 1a under other readings",
    presets={
        "smoke": Preset(seeds=1, cost="20 seconds on two cores"),
        "laptop": Preset(
            seeds=5,
            cost="an hour and a half on two cores, a third of which fig01a shares",
            grid=Grid(rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2), steps=1500),
        ),
        "paper": Preset(seeds=3, cost="a day on one GPU; not measured"),
    },
    study="induction",
)
