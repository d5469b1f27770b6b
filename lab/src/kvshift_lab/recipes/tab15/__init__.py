"""Table 15: multi-head latent attention with and without a hard shift."""

from kvshift_lab.recipes.language_models import GRIDS
from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRY = Entry(
    name="tab15",
    title="multi-head latent attention, with a hard shift and without",
    presets={
        "smoke": Preset(seeds=1, cost="30 seconds on two cores", grid=GRIDS["smoke"]),
        "laptop": Preset(seeds=3, cost="35 minutes on two cores", grid=GRIDS["laptop"]),
        "paper": Preset(
            seeds=3,
            cost="40 runs of two hours each on 8 A100 in the paper; not measured",
            grid=Grid(rates=(2e-3,)),
        ),
    },
    study="language_models",
)
