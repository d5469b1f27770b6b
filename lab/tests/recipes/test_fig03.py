"""Figure 3: the dry run of the large models, and the verdicts on it."""

from __future__ import annotations

from typing import Any

import pytest

from kvshift_lab.core.options import to_json
from kvshift_lab.recipes.fig03 import study as fig03
from kvshift_lab.study.recipe import Record

from ..study.cases import made_up

RECIPE = fig03.RECIPE


def records(*, parameters: int = 2_888_000_000, share: float = 1.0) -> list[Record]:
    planned = {"weights": 1000, "gradients": 1000, "optimizer": 2000}
    counted = {"parameters": parameters, "counted": parameters, "gathered": 7, "flops_per_token": 2e10}
    found = []
    for job in RECIPE.jobs("laptop", [0])[:2]:
        shares: dict[str, Any] = {name: share * value for name, value in planned.items()}
        options = to_json(job.config)  # type: ignore[attr-defined]
        options["size"] = "2.9B"
        found.append(made_up(job.arm.label, options=options, planned=planned, **counted, **shares))
    return found


@pytest.mark.parametrize(
    ("parameters", "share", "expected"),
    [
        (2_888_000_000, 1.01, ["holds"] * 4),
        (2_600_000_000, 1.01, ["fails", "holds"] * 2),
        (2_888_000_000, 1.2, ["holds", "fails"] * 2),
        (2_888_000_000, 0.5, ["holds", "fails"] * 2),
    ],
)
def test_sizes_and_bytes(parameters: int, share: float, expected: list[str]) -> None:
    claims = [claim for claim in RECIPE.claims(records(parameters=parameters, share=share)) if claim.by]
    assert [claim.direction for claim in claims] == expected
    assert {claim.by for claim in claims} == {"arithmetic"}


def test_benchmarks_are_not_testable_here() -> None:
    (claim,) = [claim for claim in RECIPE.claims(records()) if not claim.by]
    assert claim.statement == "2.9B: KV-shift scores higher than vanilla on eight benchmarks"
    assert claim.direction == "not testable here"


def test_the_papers_devices_and_contexts() -> None:
    options = [job.config for job in RECIPE.jobs("laptop", [0])]  # type: ignore[attr-defined]
    assert {(one.size, one.devices, one.length, one.layers) for one in options} == {
        ("2.9B", 512, 4096, None),
        ("19B", 240, 12_288, None),
    }
    trained = {job.arm.label: job.config for job in RECIPE.jobs("paper", [0])}  # type: ignore[attr-defined]
    assert len(trained) == 4
    one = trained["KV-shift, 32 layers, 4096 tokens"]
    assert one.steps * (one.tokens_per_step or 0) == pytest.approx(5e11, rel=1e-4)
    assert (one.optimizer.learning_rate, one.optimizer.warmup_steps) == (8e-4, 600)


def test_one_pair_of_training_runs_decides_nothing() -> None:
    curve = {"step": [1, 2], "loss": [3.0, 2.0]}
    given = [made_up(f"{variant}, 32 layers, 4096 tokens", curve=curve) for variant in ("KV-shift", "vanilla")]
    (claim,) = RECIPE.claims(given)
    assert claim.direction == "not shown"


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_a_dry_run_of_smoke() -> None:
    job: Any = RECIPE.jobs("smoke", [0])[0]
    found = made_up(job.arm.label, options=to_json(job.config), **job.function(job.config))
    (claim,) = RECIPE.claims([found])
    assert claim.direction == "holds"
    assert "one of 8 processes takes a step on fake tensors" in claim.statement
