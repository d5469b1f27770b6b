"""Table 4: its jobs, its verdicts and its figure, and one complete run."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from kvshift_lab.recipes.tab04 import study as tab04
from kvshift_lab.run.train_task import TaskTrainConfig
from kvshift_lab.study.arm import arm_from_label
from kvshift_lab.study.recipe import Record
from kvshift_lab.tasks import IGSMConfig
from kvshift_lab.tasks.igsm import IGSMTask
from kvshift_lab.variants.model_config import ModelConfig

from ..study.cases import made_up, ran

RECIPE = tab04.RECIPE


def records(setting: str, ours: list[float], theirs: list[float]) -> list[Record]:
    return [
        made_up(
            f"{model}, {setting}",
            seed,
            options={"task": {"modulus": 5 if setting == "Tr2-Te3" else 23}},
            curve={"step": [2, 4], "loss": [2.0, 1.0], "solution": [0.5, 0.9], "values": [0.04, share]},
            answers={
                "paper": {"share": share, "stderr": 0.01, "questions": 100},
                "strict": {"share": share / 2, "stderr": 0.01, "questions": 100},
            },
        )
        for model, shares in (("KV-shift", ours), ("vanilla", theirs))
        for seed, share in enumerate(shares)
    ]


@pytest.mark.parametrize("preset", RECIPE.presets)
def test_letters_are_random(preset: str):
    """Letters in order would be unseen in longer problems; the generator `igsm` always draws them at random."""
    jobs = RECIPE.jobs(preset, [0, 7])
    assert len(jobs) == 4 * len(tab04.SIZES[preset][0])
    for job in jobs:
        assert isinstance(job.config.task, IGSMConfig)
        assert job.config.task.letters == "random" or job.config.task.generator == "igsm"
        assert job.config.task.modulus == (23 if preset == "paper" else 5)


def test_the_paper_settings_are_those_stated():
    jobs = {job.arm.label: job.config for job in RECIPE.jobs("paper", [0])}
    assert list(jobs) == ["KV-shift, Tr21-Te24", "vanilla, Tr21-Te24", "KV-shift, Tr12-Te15", "vanilla, Tr12-Te15"]
    for setting, rows, steps, decay in (("Tr12-Te15", 512, 100_000, 0.05), ("Tr21-Te24", 256, 200_000, 0.03)):
        config = jobs[f"KV-shift, {setting}"]
        assert isinstance(config.task, IGSMConfig)
        assert isinstance(config.model, ModelConfig)
        assert (config.task.generator, config.task.tokenizer, config.task.length) == ("kamino", "gpt2", 1024)
        assert config.batch_size * config.accumulation == rows
        assert config.steps == steps
        assert config.questions == 4096
        optimizer = config.optimizer
        assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.warmup_steps) == (2e-4, decay, 1000)
        assert (optimizer.beta1, optimizer.beta2, optimizer.min_lr_ratio) == (0.9, 0.98, 0.01)
        assert config.model.num_hidden_layers == config.model.num_attention_heads == 12
        assert config.model.hidden_size == 768


@pytest.mark.parametrize(
    ("ours", "theirs", "direction"),
    [
        ([0.9, 0.88, 0.89], [0.81, 0.82, 0.80], "holds"),
        ([0.81, 0.82, 0.80], [0.9, 0.88, 0.89], "fails"),
    ],
)
def test_each_setting_is_judged_by_its_own_interval(ours: list[float], theirs: list[float], direction: str):
    other = records("Tr12-Te15", [0.9] * len(ours), [0.9] * len(ours))
    first, second = RECIPE.claims([*records("Tr21-Te24", ours, theirs), *other])
    assert "Tr12-Te15" in first.statement
    assert first.paper == "89.09 % against 81.54 %: +7.55 points"
    assert first.direction == "not shown"
    assert "Tr21-Te24" in second.statement
    assert second.paper == "90.62 % against 87.11 %: +3.51 points"
    assert second.direction == direction
    assert f"{100 * sum(ours) / len(ours):.1f} %" in second.ours
    assert f"{50 * sum(ours) / len(ours):.1f} %" in second.ours


@pytest.mark.slow
@pytest.mark.parametrize("config", [tab04.LAPTOP, tab04.YE], ids=lambda config: config.task.generator)
def test_the_miniatures_ask_for_nothing_that_training_lacks(config: TaskTrainConfig):
    """All words of questions and solutions occur in training, and the longest problem fits into a sequence."""
    assert isinstance(config.task, IGSMConfig)
    task = IGSMTask(config.task)
    uniform = random.Random(0).random
    trained, asked = (
        [task.draw(uniform, training=training) for _ in range(count)]
        for training, count in ((True, 2000), (False, 200))
    )
    words = [
        {word for one in problems for part in (*one.statements, one.question, *one.solution) for word in part.split()}
        for problems in (trained, asked)
    ]
    assert words[1] <= words[0]
    encoded = task.encoder.encode(asked)
    assert max(len(one.prompt) + len(one.solution) for one in encoded) <= task.length
    assert max(len(one.solution) for one in encoded) <= task.max_new_tokens


def test_training_of_the_laptop_has_rules_of_several_quantities():
    task = IGSMTask(tab04.LAPTOP.task)
    problems = [task.draw(random.Random(seed).random, training=True) for seed in range(1000)]
    kinds = {(rule.operation, len(rule.dependencies)) for problem in problems for rule in problem.definitions.values()}
    assert {(operation, count) for operation in "+-*" for count in (1, 2, 3)} <= kinds


def test_inside_the_range_of_training_is_a_question_of_ours():
    given = records("Tr2-Te3", [0.3, 0.31], [0.2, 0.22])
    for record, share in zip(given, (0.9, 0.91, 0.92, 0.9), strict=True):
        record.result["inside"] = {measure: {"share": share} for measure in ("paper", "strict")}
    outside, inside = RECIPE.claims(given)
    assert (outside.own, inside.own) == (False, True)
    assert outside.direction == "not testable here"  # because it is a miniature
    assert inside.direction == "not shown"
    assert inside.ours.startswith("90.5 % ")


def test_a_miniature_is_not_compared_with_print():
    (claim,) = RECIPE.claims(records("Tr2-Te3", [0.3, 0.31], [0.2, 0.22]))
    assert claim.paper.endswith("(Tr12-Te15)")
    assert "miniature" in claim.note


def test_a_run_of_smoke(tmp_path: Path):
    job = RECIPE.jobs("smoke", [3])[0]
    assert job.arm.label == "KV-shift, Tr2-Te3"
    record = ran(job, tmp_path)
    assert record.curve["step"] == [2, 4]
    assert record.result["answers"]["paper"]["questions"] == 8
    assert record.result["inside"]["paper"]["questions"] == 8
    claims = RECIPE.claims([record, replace(record, arm=arm_from_label("vanilla, Tr2-Te3"))])
    assert [claim.direction for claim in claims] == ["not testable here", "not shown"]
