"""Tables 6 to 13 and 15: validation losses by learning rate and context length, a recipe for each table."""

from kvshift_lab.recipes.language_models import GRIDS, STUDY, table_entry
from kvshift_lab.study.entry import Entry, Grid, Preset

ENTRIES = (
    table_entry("tab06", "vanilla", variants=1),
    table_entry("tab07", "KV-shift", variants=2),
    table_entry("tab08", "QKV-shift", variants=3),
    table_entry("tab09", "K-shift", variants=3),
    table_entry("tab10", "V-shift", variants=3),
    table_entry("tab11", "Differential Transformer", variants=3),
    table_entry("tab12", "Differential Transformer with QK-norm", variants=3),
    table_entry("tab13", "Selective Attention", variants=3),
    Entry(
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
        study=STUDY,
    ),
)
