"""The study of language models: the jobs that its recipes run and share, their tables, verdicts and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvshift_lab.core.errors import RunFailedError
from kvshift_lab.recipes.catalogue import CATALOGUE, find_recipe
from kvshift_lab.recipes.language_models import STUDY
from kvshift_lab.recipes.language_models.lm_paper import LOSSES, RATES
from kvshift_lab.recipes.language_models.settings import TABLES, GridPoint, arm_at
from kvshift_lab.recipes.tables import study as tables
from kvshift_lab.study.cost import count_parameters
from kvshift_lab.study.jobs import StudyJob
from kvshift_lab.study.recipe import LEAST_LOSS, Record, has_diverged
from kvshift_lab.study.tuning import best_rates, tuning_jobs
from kvshift_lab.variants.building import build_model, llama_config
from kvshift_lab.variants.by_name import VARIANTS, find_variant, variant_of

from ..study.cases import made_up

SHARING = [name for name, entry in CATALOGUE.items() if entry.study == STUDY]
LENGTHS = sorted({length for _, length in LOSSES["vanilla"]})
ALIKE = [0.02, 0.021, 0.019]


def made(
    variant: str, point: GridPoint, loss: float, *, seed: int = 0, rate: float = 8e-3, tuning: bool = False
) -> Record:
    width = {12: 768, 4: 64, 2: 64}[point.layers]
    options = {
        "model": {"num_hidden_layers": point.layers, "hidden_size": width},
        "data": {"sequence_length": point.length},
        "optimizer": {"learning_rate": rate},
        "steps": 200,
        "tokens_per_step": 512,
    }
    arm = arm_at(point, variant)
    curve = {"step": [100, 200], "loss": [loss + 1, loss]}
    record = made_up(arm, seed, curve=curve, options=options)
    return replace(record, arm=replace(arm, rate=rate), tuning_for=arm) if tuning else record


def seeds(losses: Mapping[str, Sequence[float]], points: Sequence[GridPoint] = (GridPoint(2, 128),)) -> list[Record]:
    """Return a run for each variant, grid point and seed, with the given loss above 3 (and 0.1 more for each seed)."""
    return [
        made(variant, point, 3 + 0.1 * seed + loss, seed=seed)
        for variant, each in losses.items()
        for point in points
        for seed, loss in enumerate(each)
    ]


def paper_grid(variant: str, flip: float = 1.0) -> list[Record]:
    """Return the paper's cells as tuning runs, and one run per length; `flip` = -1 reverses their order."""
    found = []
    for (rate, length), loss in LOSSES[variant].items():
        found.append(made(variant, GridPoint(12, length), flip * loss, seed=1000, rate=rate, tuning=True))
    lengths = {length for _, length in LOSSES[variant]}
    return found + [made(variant, GridPoint(12, length), flip * 3.3, rate=2e-3) for length in sorted(lengths)]


@pytest.mark.parametrize("name", SHARING)
def test_an_arm_has_the_variant_that_is_trained(name: str) -> None:
    recipe = find_recipe(name)
    for preset, size in recipe.presets.items():
        for job in recipe.arms(preset):
            assert isinstance(job, StudyJob)
            variant = variant_of({**vars(job.config.model), "shift_targets": [*(job.config.model.shift_targets or ())]})
            assert variant in VARIANTS
            assert job.arm.label.startswith(VARIANTS[variant].label)
        assert preset != "laptop" or size.seeds >= 3


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["smoke", "laptop", "paper"])
def test_equal_runs_of_two_recipes_have_one_name_and_runs_of_one_name_are_equal(preset: str) -> None:
    by_name: dict[Any, Any] = {}
    by_config: dict[Any, Any] = {}
    shared = 0
    for name in SHARING:
        recipe = find_recipe(name)
        grid, jobs = recipe.presets[preset].grid, recipe.jobs(preset, range(recipe.presets[preset].seeds))
        tuning = [] if grid is None else tuning_jobs(recipe.jobs(preset, grid.seeds), grid)
        for job in [*jobs, *tuning]:
            assert isinstance(job, StudyJob)
            run, text = (job.arm, job.seed, job.tuning_for), repr(job.config)
            shared += run in by_name
            assert by_name.setdefault(run, text) == text
            if job.tuning_for is None:
                assert by_config.setdefault(text, run) == run
    assert shared > 20


def test_the_laptop_is_the_paper_at_a_quarter_of_the_length_and_four_times_the_rate() -> None:
    grid, scale = CATALOGUE["tab07"].presets["laptop"].grid, TABLES["laptop"].scale
    assert grid is not None
    assert {tables._paper_rate(rate / scale) for rate in grid.rates} <= set(RATES)
    assert {point.length * scale for point in TABLES["laptop"].points} <= set(LENGTHS)
    paper = CATALOGUE["tab07"].presets["paper"].grid
    assert paper is not None
    assert paper.rates == RATES
    assert {point.length for point in TABLES["paper"].points} == set(LENGTHS)


def test_a_step_has_as_many_tokens_at_every_length() -> None:
    for setting in TABLES.values():
        configs = [setting.at(point) for point in setting.points]
        assert {config.batch_size * config.data.sequence_length for config in configs} == {setting.tokens_at_once}
        assert len({config.tokens_per_step for config in configs}) == 1


def test_the_paper_preset_is_the_setting_of_blagpt() -> None:
    for job in find_recipe("tab07").jobs("paper", [0]):
        config: Any = job.config  # type: ignore[attr-defined]
        optimizer, data = config.optimizer, config.data
        assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.95, 1e-8)
        assert (optimizer.weight_decay, optimizer.clip_norm) == (0, 0)
        assert (optimizer.schedule, optimizer.warmup_steps) == ("wsd", 250)
        assert config.steps - round(optimizer.decay_fraction * config.steps) == 3100
        assert (config.steps, config.tokens_per_step, config.model.zero_outputs) == (5100, 524_288, True)
        assert (data.tokenizer, data.packing) == ("openai-community/gpt2", "concat")
        size = llama_config(config.model, vocab_size=50_304, sequence_length=data.sequence_length)
        assert (size.num_hidden_layers, size.hidden_size, size.head_dim, size.intermediate_size) == (12, 768, 64, 3072)
        assert (size.num_attention_heads, size.num_key_value_heads) == (12, 4)
        assert (size.attention_bias, size.mlp_bias, size.tie_word_embeddings) == (True, True, True)
        parameters = 103_937_280 + 38_633_472 + (192 if job.arm.label.startswith("KV-shift") else 0)
        assert count_parameters(size).total == parameters


def test_the_papers_tables_are_whole() -> None:
    assert {variant: len(cells) for variant, cells in LOSSES.items()} == {
        **dict.fromkeys(("vanilla", "kv-shift", "qkv-shift", "k-shift", "v-shift"), 30),
        **dict.fromkeys(("differential", "differential-no-qk-norm"), 30),
        "selective-key": 18,
        "mla": 5,
        "mla-kv-shift": 5,
    }
    wins = [LOSSES["kv-shift"][cell] < loss for cell, loss in LOSSES["vanilla"].items()]
    assert wins.count(True) == 26  # of 30 cells, counted in the printed tables


def test_cells_in_the_opposite_order_correlate_at_minus_one() -> None:
    records = [*paper_grid("vanilla", -1), *paper_grid("kv-shift", -1)]
    assert "of the losses -1.00 (30 cells); of the differences from vanilla -1.00" in tables.correlations(
        records, "kv-shift"
    )
    assert "differences" not in tables.correlations(records, "vanilla")


def test_the_laptops_cells_stand_beside_those_of_four_times_the_length_and_a_quarter_of_the_rate() -> None:
    points = [GridPoint(2, 64), GridPoint(2, 128), GridPoint(4, 128)]
    records = seeds({"vanilla": ALIKE}, points)
    records += [
        made("vanilla", point, 3.0 + rate, seed=1000, rate=rate, tuning=True)
        for point in points
        for rate in (4e-3, 8e-3)
    ]
    text = tables.side_by_side(records, "vanilla")
    assert "| 0.004 (0.001) | 3.0040 (3.4701) | 3.0040 (3.3816) | 3.0040 (3.3816) |" in text
    assert "| 0.008 (0.002) | 3.0080 (3.4505) | 3.0080 (3.3605) | 3.0080 (3.3605) |" in text
    assert "(4 cells)" in tables.correlations(records, "vanilla")  # those with two layers


def test_a_cell_that_diverged_says_so_and_is_never_the_best() -> None:
    point = GridPoint(2, 128)
    good = made("vanilla", point, 3.5, seed=1000, rate=4e-3, tuning=True)
    bad = replace(made("vanilla", point, 2.5, seed=1000, rate=8e-3, tuning=True), result={"diverged_at": 7})
    assert has_diverged(bad)
    assert best_rates([good, bad], LEAST_LOSS) == {arm_at(point, "vanilla"): 4e-3}
    records = [good, bad, *seeds({"vanilla": ALIKE})]
    assert "| 0.008 (0.002) | diverged (3.3605) |" in tables.side_by_side(records, "vanilla")


@pytest.mark.parametrize(
    ("kv", "direction"),
    [([0.0, 0.002, -0.002], "holds"), ([0.05, 0.053, 0.047], "fails"), ([0.0, 0.05, 0.02], "not shown")],
)
def test_kv_shift_against_vanilla(kv: list[float], direction: str) -> None:
    claims = find_recipe("tab07").claims(seeds({"kv-shift": kv, "vanilla": ALIKE}))
    assert [claim.direction for claim in claims] == [direction]
    assert claims[0].statement == "2 layers, 128 tokens: KV-shift has a lower loss than vanilla"
    assert claims[0].paper == "at 512 tokens 3.3686 against 3.3605"


def test_where_a_run_diverged_nothing_is_shown() -> None:
    records = seeds({"kv-shift": [0.0, 0.001, -0.001], "vanilla": ALIKE})
    records[0] = replace(records[0], result={"diverged_at": 7})
    claims = find_recipe("tab07").claims(records)
    assert [(claim.direction, claim.ours) for claim in claims] == [("not shown", "a run diverged: no interval")]


def test_latent_attention_stands_beside_the_papers_one_rate() -> None:
    records = [*paper_grid("mla"), *paper_grid("mla-kv-shift")]
    text = tables.side_by_side(records, "mla-kv-shift")
    assert "| 0.002 (0.002) | 3.4987 (3.4987) | 3.4069 (3.4069) |" in text
    assert "differences from MLA 1.00 (5 cells)" in tables.correlations(records, "mla-kv-shift", "mla")
    grid = CATALOGUE["tab15"].presets["paper"].grid
    assert grid is not None
    assert grid.rates == (2e-3,)
    claims = find_recipe("tab15").claims(seeds({"mla-kv-shift": [0.0, 0.002, 0.001], "mla": ALIKE}))
    assert [(claim.direction, claim.paper) for claim in claims] == [("holds", "at 512 tokens 3.4069 against 3.4150")]


def test_longer_contexts_are_compared_within_a_depth() -> None:
    records = [
        made("vanilla", point, loss + 0.1 * seed + 0.01 * seed * (point.length == 64), seed=seed)
        for point, loss in ((GridPoint(2, 64), 3.2), (GridPoint(2, 128), 3.0), (GridPoint(4, 128), 2.9))
        for seed in range(3)
    ]
    claims = find_recipe("tab06").claims(records)
    assert [(claim.statement, claim.direction) for claim in claims] == [
        ("2 layers, vanilla, after 0.1 million tokens of training: 128 tokens have a lower loss than 64", "holds")
    ]
    assert claims[0].paper == "3.3605 against 3.4505 at 512 and 256 tokens"


@pytest.mark.parametrize(
    ("gate", "direction"),
    [
        ([0.03, 0.032, 0.028], "holds"),  # the gate is worse
        ([0.015, 0.016, 0.0145], "holds"),  # the gate is better, by less than the margin
        ([-0.03, -0.032, -0.029], "fails"),
        ([0.0, 0.02, 0.01], "not shown"),
    ],
)
def test_whether_a_gate_helps_by_a_margin(gate: list[float], direction: str) -> None:
    records = seeds({"kv-shift": ALIKE, "kv-shift-gate": gate, "kv-shift-clamp": [0.1, 0.11, 0.12], "vanilla": ALIKE})
    first, second = find_recipe("fig10").claims(records)
    assert (first.direction, second.direction) == (direction, "holds")


def test_whether_queries_change_anything() -> None:
    for qkv, direction in (([0.021, 0.023, 0.020], "holds"), ([0.2, 0.22, 0.21], "fails"), ([0, 0.1, 0], "not shown")):
        records = seeds({"kv-shift": ALIKE, "qkv-shift": qkv, "vanilla": ALIKE})
        assert [claim.direction for claim in find_recipe("fig11").claims(records)] == [direction]


def test_the_ablation_asks_four_questions_of_each_depth() -> None:
    points = [GridPoint(2, 128), GridPoint(4, 128)]
    losses = {"kv-shift": [0.0, 0.001, 0.002], "k-shift": ALIKE, "v-shift": ALIKE, "vanilla": [0.05, 0.051, 0.049]}
    claims = find_recipe("fig07a").claims(seeds(losses, points))
    assert [claim.direction for claim in claims] == ["holds"] * 12
    means = [claim for claim in claims if claim.own]
    assert [claim.statement.partition(", ")[0] for claim in means] == ["Mean over 2 size/context pairs"] * 4


def test_the_mean_over_places_is_one_for_each_seed() -> None:
    points = [GridPoint(2, 128), GridPoint(4, 128)]
    records = [
        made(variant, point, loss, seed=seed)
        for point, gains in zip(points, ([0.30, 0.10, 0.20], [0.0, 0.21, 0.08]), strict=True)
        for seed, gain in enumerate(gains)
        for variant, loss in (("kv-shift", 3.0 - gain), ("vanilla", 3.0))
    ]
    *each, mean = find_recipe("tab07").claims(records)
    assert [claim.direction for claim in each] == ["not shown"] * 2  # 0.2 +- 0.25 and 0.097 +- 0.26
    assert (mean.direction, mean.own) == ("holds", True)  # 0.15, 0.155, 0.14
    assert mean.ours.startswith("KV-shift lower by 0.1483 ")
    assert "after the data had been seen" in mean.note
    assert find_recipe("tab07").claims(records[:6]) == each[:1]  # a single point has no mean


def test_neighbours_have_as_many_parameters_as_kv_shift() -> None:
    for preset, share in (("laptop", 0.002), ("paper", 1e-4)):  # half an MLP unit per layer
        jobs: Any = find_recipe("neighbours").jobs(preset, [0])
        sizes: dict[str, dict[str, int]] = {}
        for job in jobs:
            model, config = job.config.model, job.config
            size = llama_config(model, vocab_size=1024 if preset == "laptop" else 1, sequence_length=64)
            variant = job.arm.variant
            plain = llama_config(replace(model, shift_targets=()), vocab_size=size.vocab_size, sequence_length=64)
            count = count_parameters(plain).total + find_variant(variant).added_parameters(
                size if variant == "kv-shift" else plain
            )
            sizes.setdefault(f"{size.num_hidden_layers}", {})[variant] = count
            assert config.steps == jobs[0].config.steps
        for by_variant in sizes.values():
            ours = by_variant["kv-shift"]
            assert set(by_variant) == {"kv-shift", "vanilla", "canon", "fox-shift"}
            assert all(abs(count / ours - 1) < share for count in by_variant.values())


def test_the_neighbours_questions_are_ours() -> None:
    losses = {"kv-shift": [0.0, 0.002, 0.001], "canon": ALIKE, "fox-shift": [-0.02, -0.021, -0.018]}
    claims = find_recipe("neighbours").claims(seeds({**losses, "vanilla": [0.05, 0.051, 0.053]}))
    assert all(claim.own for claim in claims)
    assert [claim.direction for claim in claims] == ["holds", "fails", "holds", "holds", "holds"]


def test_table_11_is_without_qk_norm_and_table_12_with() -> None:
    for name, normed in (("tab11", False), ("tab12", None)):
        jobs: Any = find_recipe(name).jobs("paper", [0])
        models = [job.config.model for job in jobs if job.config.model.variant == "differential"]
        assert [model.qk_norm for model in models] == [normed] * 5
        assert all(job.config.model.qk_norm is None for job in jobs if job.config.model.variant is None)


@pytest.mark.parametrize("name", ["tab11", "tab12", "tab13", "tab15", "neighbours"])
def test_baselines_can_be_built(name: str) -> None:
    jobs: Any = find_recipe(name).jobs("laptop", [0])
    variants = set()
    for job in jobs:
        model = job.config.model
        if model.variant is not None and model.variant not in variants:
            variants.add(model.variant)
            size = llama_config(model, vocab_size=64, sequence_length=job.config.data.sequence_length)
            assert build_model(size, seed=0, variant=model.variant).num_parameters() > 0
    assert variants


@pytest.mark.slow
def test_a_run_that_diverges_is_finished_and_one_that_fails_otherwise_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: Any = find_recipe("tab07").jobs("smoke", [3])[-1].at_rate(1e30)  # type: ignore[attr-defined]
    job.run(tmp_path / "run")
    assert job.is_finished(tmp_path / "run")
    job.run(tmp_path / "run")  # a finished run is left unchanged
    found = Record(arm=job.arm, seed=3, **job.record(tmp_path / "run"))
    assert has_diverged(found)
    assert 1 <= found.result["diverged_at"] <= 4
    assert LEAST_LOSS(found) == (-math.inf,)

    def full(*args: Any) -> None:
        raise RunFailedError("writing failed: no space left on device")

    monkeypatch.setattr("kvshift_lab.study.jobs.train", full)
    with pytest.raises(RunFailedError, match="no space"):
        job.run(tmp_path / "other")
