"""Figure 6: the power law of loss by size, and training on three times the tokens."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="fig06",
    title="the power law, and three times the tokens",
    presets={
        "smoke": Preset(seeds=1, cost="80 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3))),
        "laptop": Preset(
            seeds=3,
            cost="80 minutes on two cores, an hour of which fig05 shares",
            grid=Grid(rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)),
        ),
        "paper": Preset(seeds=1, cost="12 runs of models of 1.5B to 19B on many GPUs; not measured"),
    },
    study="scaling",
)
