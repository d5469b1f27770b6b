"""Figure 1b: at width 8, one layer with KV shift is ahead of two layers without."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="fig01b",
    title="induction at width 8",
    presets={
        "smoke": Preset(seeds=1, cost="10 seconds on two cores"),
        "laptop": Preset(seeds=5, cost="10 minutes on two cores", grid=Grid(rates=(2.5e-3, 5e-3, 1e-2, 2e-2))),
        "paper": Preset(seeds=3, cost="hours on one GPU; not measured"),
    },
)
