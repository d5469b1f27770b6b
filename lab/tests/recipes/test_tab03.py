"""Table 3: the verdicts follow from the records, and the formulas in claims are the formulas computed."""

from __future__ import annotations

import copy
import json
import math
import re

import pytest
import torch

from kvshift_lab.recipes.tab03 import study as tab03
from kvshift_lab.recipes.tab03.study import DRAWS, LIMIT, PAPER, DrawsConfig, LimitConfig, compute_draws, compute_limit
from kvshift_lab.study.recipe import Record
from kvshift_lab.theory.checks import COEFFICIENTS
from kvshift_lab.theory.limit_loss import Form, exact, token_logits

from ..study.cases import made_up

RECIPE = tab03.RECIPE
PRINTED = Form(others=6, side="A2")  # T = 8


@pytest.fixture(scope="module")
def computed() -> list[Record]:
    draws = [DrawsConfig(draws=5, width=256, seed=seed) for seed in (0, 1)]
    found = [made_up(DRAWS, config.seed, **as_kept(compute_draws(config))) for config in draws]
    return [*found, made_up(LIMIT, **as_kept(compute_limit(LimitConfig(tokens=(4, 7)))))]


@pytest.fixture
def records(computed: list[Record]) -> list[Record]:
    return copy.deepcopy(computed)


def as_kept(result: dict) -> dict:
    return json.loads(json.dumps(result))


def evaluate(formula: str, coefficients: tuple[float, ...], tokens: int) -> float:
    """Return the value of a formula such as `(2 b1 e^a1 + b2 e^a2) / S`."""
    code = re.sub(r"e\^(a[12])", r"exp(\1)", formula)
    code = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", code)
    values = dict(zip(("a1", "a2", "b1", "b2"), coefficients, strict=True))
    total = 2 * math.exp(values["a1"]) + math.exp(values["a2"]) + tokens - 2
    return eval(code, {"__builtins__": {}, "exp": math.exp, "S": total}, values)


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize("kind", PAPER)
def test_the_quoted_formulas_are_those_that_are_computed(kind: str, coefficients: tuple[float, ...]) -> None:
    _, printed, derived = PAPER[kind]
    point = torch.tensor(coefficients, dtype=torch.float64)
    for formula, form in ((printed, PRINTED), (printed if derived == "the same" else derived, exact(8))):
        found = getattr(token_logits(point, form), kind).item()
        assert evaluate(formula, coefficients, 8) == pytest.approx(found, rel=1e-14)


def test_what_the_model_says(records: list[Record]) -> None:
    claims = RECIPE.claims(records)
    assert [claim.direction for claim in claims] == ["holds", "holds", "fails", "holds", "fails", "fails", "holds"]
    side, theorem, places, draws = claims[2], *claims[4:]
    # The largest error, (e^a2 - e^a1) b2 / S, is at T = 4 and (3, 0, 0, 4): 4 (1 - e^3) / (2 e^3 + 3).
    assert 4 * (math.exp(3) - 1) / (2 * math.exp(3) + 3) == pytest.approx(1.77, abs=0.005)
    assert side.ours.startswith("off by up to 1.8; derived (b1 + b2 e^a1) / S, off by up to ")
    assert side.statement == "Logit of tokens i - 1 and T"
    assert claims[0].note == "8 settings of T, a and b; every i from 2 to T - 2"
    assert re.fullmatch(r"off in loss or gradient by 0\.\d+ to 1\.2; with A1 for A2, by \de-16 at most", theorem.ours)
    assert places.ours == "T = 8, (3, 0, 0, 4): 2.778 for i = 2 ... 6, 1.160 for i = 7"
    assert places.note == "holds for 2 <= i <= T - 2: yes"
    assert draws.ours.endswith("standard errors in all 4 settings")


def test_a_right_table_would_hold(records: list[Record]) -> None:
    for setting in records[-1].result["settings"]:
        setting["logits"]["side"]["printed"] = setting["logits"]["side"]["model"]
        setting["printed"] = setting["exact"]
    for row in records[-1].result["places"]:
        row["loss"][-1] = row["loss"][-2]
    assert {claim.direction for claim in RECIPE.claims(records)} == {"holds"}


def test_logits_that_part_between_positions_would_fail(records: list[Record]) -> None:
    records[-1].result["settings"][0]["logits"]["target"]["spread"] = 1e-3
    assert RECIPE.claims(records)[0].direction == "fails"


def test_draws_of_several_seeds_are_pooled(records: list[Record]) -> None:
    for record, mean, error in zip(records, (2.0, 3.0), (0.3, 0.4), strict=False):
        for row in record.result["settings"]:
            row.update(mean=mean, stderr=error, exact=3.0)
    # The mean is 2.5 and its standard error sqrt(0.3^2 + 0.4^2) / 2 = 0.25.
    assert RECIPE.claims(records)[-1].ours == "within 2.0 standard errors in all 4 settings"
    records[0].result["settings"][1]["exact"] = 3.6
    claim = RECIPE.claims(records)[-1]
    assert (claim.ours, claim.direction) == ("within 4.4 standard errors in all 4 settings", "fails")


def test_only_draws_have_seeds() -> None:
    jobs = RECIPE.jobs("laptop", [0, 3])
    assert [(job.arm.label, job.seed) for job in jobs] == [(DRAWS, 0), (DRAWS, 3), (LIMIT, 0)]
    assert [job.config.seed for job in jobs[:2]] == [0, 3]
