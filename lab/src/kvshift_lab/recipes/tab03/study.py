"""Table 3: the logits behind Theorem 3.4, as printed and as derived, compared with the model's own logits."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure

from kvshift_lab.analysis.colors import GREEN, ORANGE, PURPLE
from kvshift_lab.analysis.panels import legend_below, new_figure
from kvshift_lab.recipes.tab03 import ENTRY
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, holds_if
from kvshift_lab.study.jobs import Computation
from kvshift_lab.study.recipe import Recipe, Record, by_arm
from kvshift_lab.theory.checks import (
    COEFFICIENTS,
    check_logits,
    check_monte_carlo,
    check_orthonormal,
    check_positions,
)

LIMIT, DRAWS = "orthonormal embeddings", "Gaussian embeddings"

# By kind of token: the tokens of that kind, their logit as printed, and their logit as derived.
PAPER: Mapping[str, tuple[str, str, str]] = {
    "target": ("token i + 1", "(b1 e^a2 + b2) / S", "the same"),
    "repeated": ("token i", "(2 b1 e^a1 + b2 e^a2) / S", "the same"),
    "side": ("tokens i - 1 and T", "(b1 + b2 e^a2) / S", "(b1 + b2 e^a1) / S"),
    "other": ("all other tokens", "(b1 + b2) / S", "the same"),
}

_EXACT = 1e-12  # float64, sums of 32 terms: the derivation agrees with the model to 1e-15


@dataclass(frozen=True, kw_only=True)
class LimitConfig:
    """The limit of large d, which orthonormal embeddings meet exactly."""

    tokens: tuple[int, ...] = (4, 5, 8, 12, 32)
    """Sequence lengths T."""
    coefficients: tuple[tuple[float, float, float, float], ...] = COEFFICIENTS
    """Coefficients a1, a2, b1, b2 of each setting."""
    edge: int = 8
    """Sequence length T for the loss at each i = 1 ... T - 1."""


@dataclass(frozen=True, kw_only=True)
class DrawsConfig:
    """The model with Gaussian embeddings, at the `COEFFICIENTS`."""

    draws: int
    """Number of independent draws of all embeddings."""
    width: int
    """Width d of the embeddings."""
    tokens: int = 8
    """Sequence length T."""
    repeated: int = 4
    """Position i of the repeated token."""
    seed: int = 0
    """Random seed of the draws."""


def compute_limit(config: LimitConfig) -> dict[str, Any]:
    """Compare logits, loss and gradients of the model with both forms, and compute the loss at every position i."""
    return {
        "settings": [
            {
                "tokens": tokens,
                "coefficients": coefficients,
                "logits": check_logits(tokens, coefficients),
                **check_orthonormal(tokens, coefficients),
            }
            for tokens in config.tokens
            for coefficients in config.coefficients
        ],
        "places": [
            {"coefficients": coefficients, "loss": check_positions(config.edge, coefficients)}
            for coefficients in config.coefficients
        ],
    }


def compute_draws(config: DrawsConfig) -> dict[str, Any]:
    """Compare the model's mean loss over draws with the closed forms."""
    rows = check_monte_carlo(
        config.draws, config.width, tokens=config.tokens, repeated=config.repeated, seed=config.seed
    )
    return {"settings": rows}


# Number of draws, their width d, and the lengths T of the limit.
SIZES = {
    "smoke": (5, 64, (4, 5)),
    "laptop": (100, 4096, (4, 5, 8, 12, 32)),
    "paper": (1000, 4096, (4, 5, 8, 12, 32, 102)),
}


def arms(preset: str) -> list[Computation]:
    """Return a job for the draws and one for the limit, in which nothing is random."""
    draws, width, tokens = SIZES[preset]
    return [
        Computation(arm=Arm(case=DRAWS), config=DrawsConfig(draws=draws, width=width), function=compute_draws),
        Computation(arm=Arm(case=LIMIT), config=LimitConfig(tokens=tokens), function=compute_limit),
    ]


_MARKERS = {"printed": "o", "script": "^", "derived": "s"}


def plot(records: Sequence[Record]) -> Figure:
    """Plot how far each logit is from the model's, and how far each closed-form loss is from the mean over draws."""
    titles = ["Logits of Table 3", "Loss, Gaussian embeddings"]
    labels = ["difference from the model", "difference in standard errors"]
    figure, (left, right) = new_figure(titles, ylabels=labels, height=3.8)
    settings = _limit(records)["settings"]
    for form, color, shift in (("printed", ORANGE, -0.12), ("derived", GREEN, 0.12)):
        places, errors = [], []
        for number, kind in enumerate(PAPER):
            found = _errors(settings, kind, form)
            places += [number + shift] * len(found)
            errors += [max(error, 1e-17) for error in found]  # a logarithmic axis has no 0
        left.semilogy(places, errors, _MARKERS[form], color=color, alpha=0.6, markersize=4, label=form)
    left.set_xticks(range(len(PAPER)), [textwrap.fill(name, 12) for name, *_ in PAPER.values()])

    rows = _pooled(records)
    for number, (name, form, color) in enumerate(
        (("printed", "table3", ORANGE), ("script", "script", PURPLE), ("derived", "exact", GREEN))
    ):
        places = [place + 0.15 * (number - 1) for place in range(len(rows))]
        away = [(row[form] - row["mean"]) / row["stderr"] for row in rows]
        right.plot(places, away, _MARKERS[name], color=color, label=name)
    right.axhspan(-2, 2, color="#999999", alpha=0.2, label="2 standard errors")
    right.set_yscale("symlog", linthresh=4)
    names = ["\n".join(f"{value:g}" for value in row["coefficients"]) for row in rows]
    right.set_xticks(range(len(rows)), names)
    right.set_xlabel("coefficients $α_1, α_2, β_1, β_2$, from above")
    legend_below(figure)
    return figure


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims about each row of the table and about the theorem that is built on it."""
    limit = _limit(records)
    settings = limit["settings"]
    return [
        *(_row(settings, kind) for kind in PAPER),
        _theorem(settings),
        _places(limit["places"]),
        _draws(_pooled(records)),
    ]


def _row(settings: Sequence[Mapping[str, Any]], kind: str) -> Claim:
    tokens, printed, derived = PAPER[kind]
    off, exactly = max(_errors(settings, kind, "printed")), max(_errors(settings, kind, "derived"))
    right = off < _EXACT
    return Claim(
        statement=f"Logit of {tokens}",
        paper=printed,
        ours=f"off by up to {off:.2g}" + ("" if right else f"; derived {derived}, off by up to {exactly:.1g}"),
        direction=holds_if(right),
        note=f"{len(settings)} settings of T, a and b; every i from 2 to T - 2",
    )


def _theorem(settings: Sequence[Mapping[str, Any]]) -> Claim:
    printed, derived = ([setting[form] for setting in settings] for form in ("printed", "exact"))
    return Claim(
        statement="Theorem 3.4 with these logits is the loss of the model, for large d",
        paper="proved in appendix C",
        ours=f"off in loss or gradient by {min(printed):.2g} to {max(printed):.2g}; "
        f"with A1 for A2, by {max(derived):.1g} at most",
        direction=holds_if(max(printed) < _EXACT),
        note="one letter: the proof above the table has it right",
    )


def _places(rows: Sequence[Mapping[str, Any]]) -> Claim:
    *_, row = rows
    (*inner, last), tokens = row["loss"][1:], len(row["loss"]) + 1
    listed = ", ".join(f"{value:g}" for value in row["coefficients"])
    return Claim(
        statement="The loss is the same for all 1 < i < T",
        paper="i > 1 and i < T",
        ours=f"T = {tokens}, ({listed}): {inner[0]:.3f} for i = 2 ... {tokens - 2}, {last:.3f} for i = {tokens - 1}",
        direction=holds_if(all(_same([*row["loss"][1:]]) for row in rows)),
        note=f"holds for 2 <= i <= T - 2: {'yes' if all(_same(row['loss'][1:-1]) for row in rows) else 'no'}",
    )


def _draws(rows: Sequence[Mapping[str, Any]]) -> Claim:
    def away(form: str) -> list[float]:
        return [abs(row[form] - row["mean"]) / row["stderr"] for row in rows]

    printed = [distance for distance, row in zip(away("table3"), rows, strict=True) if row["coefficients"][3] != 0]
    return Claim(
        statement="Gaussian embeddings come near the limit as derived",
        paper="for large d",
        ours=f"within {max(away('exact')):.1f} standard errors in all {len(rows)} settings",
        direction=holds_if(max(away("exact")) < 4),
        note=f"Table 3 is out by {min(printed):.0f} standard errors or more wherever b2 is not 0",
    )


def _errors(settings: Sequence[Mapping[str, Any]], kind: str, form: str) -> list[float]:
    """Return the largest error of each setting for one kind of token; T = 4 has no tokens of the kind "other"."""
    rows = [setting["logits"][kind] for setting in settings if kind in setting["logits"]]
    return [abs(row[form] - row["model"]) + row["spread"] for row in rows]


def _same(losses: Sequence[float]) -> bool:
    return max(losses) - min(losses) < _EXACT


def _limit(records: Sequence[Record]) -> Mapping[str, Any]:
    return by_arm(records)[Arm(case=LIMIT)][0].result


def _pooled(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the settings of the draws over all seeds, with the mean of the seeds' means and its standard error."""
    seeds = [record.result["settings"] for record in by_arm(records)[Arm(case=DRAWS)].values()]
    return [
        {
            **rows[0],
            "mean": sum(row["mean"] for row in rows) / len(rows),
            "stderr": math.hypot(*(row["stderr"] for row in rows)) / len(rows),
        }
        for rows in zip(*seeds, strict=True)
    ]


RECIPE = Recipe(
    entry=ENTRY,
    source="Table 3, Theorem 3.4, Appendix C",
    arms=arms,
    plot=plot,
    claims=claims,
)
