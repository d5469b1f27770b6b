"""Table 4: grade-school problems with more operations than those of training."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="tab04",
    title="grade-school problems",
    presets={
        "smoke": Preset(seeds=1, cost="15 seconds on two cores"),
        "laptop": Preset(seeds=3, cost="80 minutes on two cores", grid=Grid(rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3))),
        "ye": Preset(seeds=3, cost="130 minutes on two cores", grid=Grid(rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3))),
        "paper": Preset(seeds=1, cost="4 runs of days each on one GPU; not measured"),
    },
)
