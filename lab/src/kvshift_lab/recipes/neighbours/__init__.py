"""Are four numbers per head enough? KV shift against related methods of production models, at equal parameter count."""

from kvshift_lab.recipes.language_models import GRIDS
from kvshift_lab.study.entry import Entry, Preset

ENTRY = Entry(
    name="neighbours",
    title="four numbers per head, or per channel, or by the token",
    presets={
        "smoke": Preset(seeds=1, cost="60 seconds on two cores", grid=GRIDS["smoke"]),
        "laptop": Preset(
            seeds=3, cost="35 minutes on two cores, half of which other recipes share", grid=GRIDS["laptop"]
        ),
        "paper": Preset(
            seeds=3, cost="36 runs of two hours each on 8 A100 in the paper; not measured", grid=GRIDS["paper"]
        ),
    },
    study="language_models",
)
