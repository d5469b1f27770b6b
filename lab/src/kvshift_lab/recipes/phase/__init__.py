"""When do models begin to copy on real text, and what does the shift gain before, at and after that point?"""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="phase",
    title="when induction begins on real text, and what the shift gains before and after",
    presets={
        "smoke": Preset(seeds=1, cost="30 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3))),
        "laptop": Preset(seeds=5, cost="hours on two cores", grid=Grid(rates=(1e-3, 2e-3, 4e-3, 8e-3))),
        "search": Preset(seeds=1, cost="hours on two cores: vanilla alone, in many settings"),
        "paper": Preset(seeds=3, cost="hours on one GPU; not measured", grid=Grid(rates=(5e-4, 1e-3, 2e-3, 4e-3))),
    },
)
