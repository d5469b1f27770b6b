"""Figure 8: k-hop induction, and how many hops models with two to six layers can follow."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="fig08",
    title="hops from letter to letter",
    presets={
        "smoke": Preset(seeds=1, cost="20 seconds on two cores"),
        "laptop": Preset(seeds=5, cost="2 hours on two cores", grid=Grid(rates=(5e-4, 1e-3, 2e-3, 4e-3, 8e-3))),
        "hops8": Preset(
            seeds=3,
            cost="4 hours on two cores",
            grid=Grid(rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2)),
        ),
        "paper": Preset(seeds=3, cost="hours on one GPU; not measured"),
    },
)
