"""Does the gain survive depth? Models of several depths on real text, a question of the paper's reviewers."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="depth",
    title="whether the gain survives depth",
    presets={
        "smoke": Preset(seeds=1, cost="20 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3))),
        "laptop": Preset(seeds=5, cost="an hour on two cores", grid=Grid(rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))),
        "paper": Preset(seeds=3, cost="hours on one GPU; not measured", grid=Grid(rates=(5e-4, 1e-3, 2e-3, 4e-3))),
    },
)
