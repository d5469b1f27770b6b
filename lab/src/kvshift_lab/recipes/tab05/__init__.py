"""Table 5 and Appendix F: to which side the coefficients of the KV heads lean, over training and at its end."""

from kvshift_lab.recipes.language_models import GRIDS
from kvshift_lab.study.entry import Entry, Preset

ENTRY = Entry(
    name="tab05",
    title="which way the coefficients lean",
    presets={
        "smoke": Preset(seeds=1, cost="15 seconds on two cores", grid=GRIDS["smoke"]),
        "laptop": Preset(seeds=3, cost="16 minutes on two cores, all of which tab07 shares", grid=GRIDS["laptop"]),
        "paper": Preset(seeds=1, cost="a run of a model of 2.9B on 512 GPUs; not measured"),
    },
    study="language_models",
)
