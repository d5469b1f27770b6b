"""Does KV shift lower the loss on real text, at 2, 4 and 8 layers? Claims and margin precede all runs."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="decide",
    title="the main claim on real text, at 2, 4 and 8 layers, claims written before any run",
    presets={
        "smoke": Preset(seeds=1, cost="30 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3))),
        "laptop": Preset(
            seeds=6,
            cost="ten hours on two cores, seven minutes on an H200",
            grid=Grid(rates=(2e-3, 4e-3, 8e-3, 16e-3)),
        ),
        "pilot": Preset(
            seeds=2,
            first_seed=2000,  # none of them is also reported
            cost="an hour and a half on two cores: how much the seed matters, before laptop",
        ),
        "paper": Preset(seeds=3, cost="hours on one GPU; not measured", grid=Grid(rates=(5e-4, 1e-3, 2e-3))),
    },
)
