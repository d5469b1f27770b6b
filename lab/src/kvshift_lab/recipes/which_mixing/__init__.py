"""KV shift beside other ways to mix a token with those before it, in runs long enough for models to copy."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="which_mixing",
    title="KV shift, Canon, the shift of FoX, smear, short convolutions and differential attention, until models copy",
    presets={
        "smoke": Preset(seeds=1, cost="a minute on two cores", grid=Grid(rates=(1e-3, 2e-3))),
        "laptop": Preset(
            seeds=6,
            cost="three hours on two cores",
            grid=Grid(rates=(2e-3, 4e-3, 8e-3, 16e-3)),
        ),
        "lower_rate": Preset(seeds=6, cost="half an hour on two cores"),
        "paper": Preset(seeds=3, cost="hours on one GPU; not measured", grid=Grid(rates=(5e-4, 1e-3, 2e-3))),
    },
)
