"""The rebuttal's control: KV shift does not improve how well a model generates sentences of a context-free grammar."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="cfg",
    title="sentences of a grammar",
    presets={
        "smoke": Preset(seeds=1, cost="15 seconds on two cores"),
        "laptop": Preset(seeds=3, cost="20 minutes on two cores", grid=Grid(rates=(1.5e-3, 3e-3, 6e-3, 1.2e-2))),
        "long": Preset(seeds=3, cost="two hours on two cores", grid=Grid(rates=(3e-3, 1.2e-2))),
        "paper": Preset(seeds=3, cost="days on one GPU; not measured"),
    },
)
