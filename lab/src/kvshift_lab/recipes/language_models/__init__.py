"""The language models that many tables and figures of the paper share: grids and presets of their recipes."""

from kvshift_lab.study.entry import Entry, Grid, Preset

GRIDS = {
    "smoke": Grid(rates=(1.6e-2, 3.2e-2)),
    "laptop": Grid(rates=(1.6e-3, 4e-3, 8e-3, 1.6e-2)),  # four times the paper's last four
    "paper": Grid(rates=(1e-4, 2e-4, 4e-4, 1e-3, 2e-3, 4e-3)),
}
STUDY = "language_models"


def table_entry(name: str, method: str, *, variants: int) -> Entry:
    """Return the entry of one method's table; its recipe trains `variants` variants in all."""
    return Entry(
        name=name,
        title=f"losses by learning rate and context: {method}",
        presets={
            "smoke": Preset(seeds=1, cost=f"{10 * variants} seconds on two cores", grid=GRIDS["smoke"]),
            "laptop": Preset(
                seeds=3,
                cost=f"{13 * variants} minutes on two cores; runs that tables share are done once",
                grid=GRIDS["laptop"],
            ),
            "paper": Preset(
                seeds=3,
                cost=f"{45 * variants} runs of two hours each on 8 A100 in the paper; not measured",
                grid=GRIDS["paper"],
            ),
        },
        study=STUDY,
    )


def figure_entry(name: str, title: str, *, runs: int, size: str) -> Entry:
    """Return the entry of a figure made from the tables' runs; the paper's has `runs` runs of a model of `size`."""
    return Entry(
        name=name,
        title=title,
        presets={
            "smoke": Preset(seeds=1, cost="40 seconds on two cores", grid=GRIDS["smoke"]),
            "laptop": Preset(
                seeds=3,
                cost="32 minutes on two cores; runs that other recipes of the study have done are reused",
                grid=GRIDS["laptop"],
            ),
            "paper": Preset(seeds=1, cost=f"{runs} runs of a model of {size} on many GPUs; not measured"),
        },
        study=STUDY,
    )
