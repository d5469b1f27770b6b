"""Figure 9: memorizing a table of triples, where KV shift makes no difference."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="fig09",
    title="a table of triples, memorized",
    presets={
        "smoke": Preset(seeds=1, cost="10 seconds on two cores"),
        "laptop": Preset(seeds=6, cost="18 minutes on two cores", grid=Grid(rates=(3e-4, 1e-3, 3e-3, 1e-2))),
        "paper": Preset(seeds=3, cost="an hour on one GPU; not measured"),
    },
)
