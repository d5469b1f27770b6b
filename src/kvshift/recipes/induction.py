"""What Figures 1a and 1b share: models of one or more layers on induction, curves of accuracy, steps to a level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvshift.lab.analysis.accuracy import draw_accuracy
from kvshift.lab.analysis.learning import Reach, reach_of
from kvshift.lab.config import ModelConfig
from kvshift.lab.tasks import InductionConfig, InductionTask
from kvshift.recipes.recipe import Record, accuracy_curve, by_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["SCORED", "final_accuracy", "guess", "model_label", "plot_induction", "reach_by_label", "sized"]

SCORED = "first_repeat"
"""The paper's metric: the target of the first repeat of each row."""


def model_label(layers: int, shifted: bool) -> str:
    """What figures and tables call the model."""
    return f"{'KV-shift' if shifted else 'vanilla'}, {layers} layer{'s' if layers > 1 else ''}"


def sized(width: int, layers: int, shifted: bool, *, heads: int) -> ModelConfig:
    """A Llama of the paper's proportions: F = ceil(8 E / 3), rounded up to a multiple of 8.

    That makes the sizes of Figure 9 come out exactly; the paper does not state F.
    """
    return ModelConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=-(-8 * width // 24) * 8,
        tie_word_embeddings=False,
        rope_theta=10_000,
        shift_targets=("k", "v") if shifted else (),
    )


def reach_by_label(records: Sequence[Record], level: float) -> dict[str, Reach]:
    """When each model reached an accuracy at the first repeat."""
    return {
        label: reach_of({seed: accuracy_curve(record, SCORED) for seed, record in seeds.items()}, level)
        for label, seeds in by_label(records).items()
    }


def final_accuracy(seeds: Mapping[int, Record]) -> list[float]:
    """Of each seed, at the end of training."""
    return [float(accuracy_curve(record, SCORED)[1][-1]) for record in seeds.values()]


def plot_induction(records: Sequence[Record], title: str) -> Figure:
    """Accuracy at the first repeat over steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    curves = {
        label: {seed: accuracy_curve(record, SCORED) for seed, record in seeds.items()}
        for label, seeds in by_label(records).items()
    }
    axes = figure.add_subplot()
    draw_accuracy(axes, curves, title=title, ylabel="accuracy at the first repeat", chance=guess(records))
    return figure


def guess(records: Sequence[Record]) -> float:
    """The accuracy of one who knows which tokens have come, and not in which order."""
    task = {name: value for name, value in records[0].options["task"].items() if name != "name"}
    return InductionTask(InductionConfig(**task)).chance[SCORED]
