"""Is it the shift of keys or that of values by which models begin to copy on real text?"""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="keys_values",
    title="whether models begin to copy by shifted keys or by shifted values",
    presets={
        "smoke": Preset(seeds=1, cost="30 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3))),
        "laptop": Preset(seeds=6, cost="an hour on two cores", grid=Grid(rates=(2e-3, 4e-3, 8e-3, 16e-3))),
        "paper": Preset(seeds=3, cost="hours on one GPU; not measured", grid=Grid(rates=(5e-4, 1e-3, 2e-3))),
    },
)
