"""What does the shift add to a model that copies already, and does it keep copying?"""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="both_copy",
    title="what KV shift adds to plain attention that has learnt to copy first",
    presets={
        "smoke": Preset(seeds=1, cost="a minute on two cores", grid=Grid(rates=(1e-3, 2e-3))),
        "laptop": Preset(seeds=6, cost="three hours on two cores", grid=Grid(rates=(2e-3, 4e-3))),
        "deeper": Preset(seeds=6, cost="two hours on two cores", grid=Grid(rates=(2e-3, 4e-3))),
        "full": Preset(
            seeds=6,
            cost="sixteen hours on two cores, ten minutes on a GPU; neither measured",
            grid=Grid(rates=(2e-3, 4e-3, 8e-3, 16e-3)),
        ),
    },
)
