"""The recipe `encoder`: its jobs and its verdicts."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from kvshift_lab.core.errors import LabError
from kvshift_lab.data.config import SHARED_DATA_ENV
from kvshift_lab.recipes.encoder import study as encoder
from kvshift_lab.study.jobs import on_bundled_text, require_text
from kvshift_lab.study.recipe import Record
from kvshift_lab.variants.building import build_model, count_parameters, describe

from ..study.cases import made_up

RECIPE = encoder.RECIPE
LABELS = [*encoder._models(encoder.LAPTOP.model)]  # type: ignore[arg-type]


def records(losses: dict[str, float]) -> list[Record]:
    return [
        made_up(
            label,
            seed,
            options={"steps": 1000},
            curve={
                "step": [500, 1000],
                "loss": [5.0, loss + Random(f"{label} {seed}").uniform(0, 0.02)],
                "masked": [0.1, 0.2],
            },
        )
        for seed in range(3)
        for label, loss in losses.items()
    ]


def test_every_model_has_what_it_is_called_for() -> None:
    found = RECIPE.jobs("laptop", [0])
    assert [job.arm.label for job in found] == LABELS
    sizes = [describe(job.config.model, vocab_size=20, length=128) for job in found]
    models = [build_model(size, seed=0) for size in sizes]
    assert [count_parameters(model)["shift_parameters"] for model in models] == [0, 2 * 4 * 4, 2 * 4 * 4, 2 * 4 * 6]


def test_a_gain_of_every_seed_is_said_as_one() -> None:
    losses = dict(zip(LABELS, (4.0, 3.8, 3.7, 3.5), strict=True))
    claims = RECIPE.claims(records(losses))
    assert [claim.direction for claim in claims] == ["holds"] * 4
    assert "shift from the next token" in claims[-1].statement


def test_a_loss_of_every_seed_fails_and_no_difference_is_not_shown() -> None:
    claims = RECIPE.claims(records(dict(zip(LABELS, (4.0, 4.2, 4.0, 4.0), strict=True))))
    assert claims[0].direction == "fails"
    assert claims[1].direction == "not shown"


def test_the_text_must_be_there_unless_the_bundled_one_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = RECIPE.jobs("laptop", [0])
    monkeypatch.delenv(SHARED_DATA_ENV, raising=False)
    with pytest.raises(LabError, match=r"must name the folder that contains wiki2014-en/train.*--bundled-text reads"):
        require_text(jobs)
    bundled: list[Any] = on_bundled_text(jobs)
    tasks = [job.config.task for job in bundled]
    assert [(task.corpus, task.validation) for task in tasks] == [("tinyshakespeare", None)] * 4
    require_text(bundled)
    require_text(RECIPE.jobs("smoke", [0]))
    assert on_bundled_text(RECIPE.jobs("smoke", [0])) == RECIPE.jobs("smoke", [0])
