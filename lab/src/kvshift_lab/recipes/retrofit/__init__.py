"""Does KV shift help a model pretrained without it? Coefficients, LoRA or both are trained for a few minutes."""

from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="retrofit",
    title="a model that learned without the shift, and is given one",
    presets={
        "smoke": Preset(seeds=1, cost="30 seconds on two cores", grid=Grid(rates=(1e-3, 1e-2))),
        "laptop": Preset(
            seeds=3,
            cost="three hours on two cores, after `make smollm`",
            grid=Grid(rates=(5e-4, 2e-3, 8e-3, 3.2e-2)),
        ),
        "longer": Preset(seeds=2, cost="two hours on two cores"),
        "paper": Preset(
            seeds=5,
            cost="hours on one GPU; not measured",
            grid=Grid(rates=(2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2), seeds=(1000, 1001)),
        ),
    },
)
