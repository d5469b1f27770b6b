"""A recipe to copy: vanilla and KV shift on a task, compared over seeds, each at its best learning rate."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="my_recipe",  # that of the folder
    title="recall of one pair among four",
    presets={
        "smoke": Preset(seeds=2, cost="seconds", grid=Grid(rates=(1e-3, 1e-2))),
        "laptop": Preset(seeds=5, cost="not measured", grid=Grid(rates=(1e-3, 3e-3, 1e-2))),
    },
)
