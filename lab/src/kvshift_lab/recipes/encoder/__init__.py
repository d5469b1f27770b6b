"""Masked tokens of real text: does a bidirectional encoder gain from a shift in both directions?"""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="encoder",
    title="masked words, with a shift in both directions",
    presets={
        "smoke": Preset(seeds=1, cost="20 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3))),
        "laptop": Preset(seeds=5, cost="an hour on two cores", grid=Grid(rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3))),
        "paper": Preset(seeds=3, cost="hours on one GPU; not measured", grid=Grid(rates=(5e-4, 1e-3, 2e-3))),
    },
)
