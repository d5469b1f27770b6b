"""MQAR, multi-query associative recall: a task of the paper's related work, in the setting of Zoology."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="mqar",
    title="recall of many pairs",
    presets={
        "smoke": Preset(seeds=1, cost="20 seconds on two cores", grid=Grid(rates=(1e-3, 2e-3))),
        "laptop": Preset(
            seeds=5, cost="an hour on two cores", grid=Grid(rates=(5e-4, 1e-3, 2e-3, 5e-3, 1e-2), seeds=(1000, 1001))
        ),
        "paper": Preset(
            seeds=1,
            cost="240 runs on a GPU; not measured",
            grid=Grid(rates=(1e-4, 10 ** (-10 / 3), 10 ** (-8 / 3), 1e-2)),
        ),
    },
)
