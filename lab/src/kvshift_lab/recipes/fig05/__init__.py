"""Figure 5: losses by model size."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="fig05",
    title="losses by size",
    presets={
        "smoke": Preset(seeds=1, cost="60 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3))),
        "laptop": Preset(seeds=3, cost="an hour on two cores", grid=Grid(rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))),
        "paper": Preset(seeds=1, cost="6 runs of models of 1.5B to 13B on many GPUs; not measured"),
    },
    study="scaling",
)
