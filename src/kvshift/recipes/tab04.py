"""Table 4: grade-school problems with more operations than were trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvshift.lab.analysis.accuracy import draw_accuracy, draw_shares, share_position
from kvshift.lab.analysis.colors import colors_of
from kvshift.lab.analysis.panels import legend_below
from kvshift.lab.tasks import IGSMConfig
from kvshift.lab.training.task_training import TaskTrainConfig
from kvshift.lab.training.train_config import OptimizerConfig
from kvshift.recipes.catalogue import CATALOGUE
from kvshift.recipes.claims import Claim, higher, percent, points
from kvshift.recipes.jobs import TrainingJob
from kvshift.recipes.models import sized
from kvshift.recipes.recipe import Recipe, Record, accuracy_curves, by_label

if TYPE_CHECKING:  # takes a second to import
    from matplotlib.figure import Figure

__all__ = ["RECIPE"]

MODELS = {"KV-shift": "kv-shift", "vanilla": "vanilla"}  # variants by label
PAPER_SHARES = {
    "Tr12-Te15": {"vanilla": 0.8154, "KV-shift": 0.8909},
    "Tr21-Te24": {"vanilla": 0.8711, "KV-shift": 0.9062},
}
_OPTIMIZER = OptimizerConfig(
    learning_rate=2e-4, schedule="cosine", min_lr_ratio=0.01, warmup_steps=1000, beta2=0.98, weight_decay=0.05
)
TR12 = TaskTrainConfig(
    out=Path(),
    task=IGSMConfig(ops=12, test_ops=15, tokenizer="gpt2", letters="random"),
    optimizer=_OPTIMIZER,
    steps=100_000,
    batch_size=32,
    accumulation=16,  # 512 rows a step
    eval_every=2000,
    eval_rows=512,
    eval_batch_size=64,
    save_every=5000,
    data_workers=4,  # GPT-2's tokenizer: 400 rows a second from each
    questions=4096,
)
TR21 = replace(
    TR12,
    task=IGSMConfig(ops=21, test_ops=24, tokenizer="gpt2", letters="random"),
    optimizer=replace(_OPTIMIZER, weight_decay=0.03),
    steps=200_000,
    accumulation=8,  # 256 rows a step
)
LAPTOP = replace(
    TR12,
    task=IGSMConfig(ops=2, test_ops=3, length=104, loss="solutions", max_new_tokens=72, letters="random", modulus=5),
    optimizer=replace(_OPTIMIZER, learning_rate=4e-3, warmup_steps=200),
    steps=2000,
    batch_size=16,
    accumulation=1,
    eval_every=200,
    eval_rows=512,
    save_every=1000,
    data_workers=0,
    questions=1000,
)
SMOKE = replace(
    LAPTOP,
    task=IGSMConfig(ops=2, test_ops=3, length=96, max_new_tokens=5, letters="random", modulus=5),
    optimizer=replace(_OPTIMIZER, warmup_steps=1),
    steps=4,
    batch_size=4,
    eval_every=2,
    eval_rows=8,
    eval_batch_size=8,
    questions=8,
)

# settings, then width, layers and heads
SIZES = {
    "paper": ((TR12, TR21), 768, 12, 12),
    "laptop": ((LAPTOP,), 64, 2, 4),
    "smoke": ((SMOKE,), 16, 1, 2),
}


def jobs(preset: str, seeds: Sequence[int]) -> list[TrainingJob]:
    """Both models in each setting with each seed."""
    settings, width, layers, heads = SIZES[preset]
    return [
        TrainingJob(
            label=f"{model}, {_setting(config.task)}",
            config=replace(config, seed=seed, model=sized(width, layers, variant, heads=heads)),
        )
        for config in settings[::-1]  # the longest first
        for seed in seeds
        for model, variant in MODELS.items()
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """KV shift has more right, in each setting, by the paper's rule."""
    models = by_label(records)
    found = []
    for setting in _settings(records):
        ours, theirs = (_shares(models[f"{model}, {setting}"], "paper") for model in MODELS)
        strict = [_shares(models[f"{model}, {setting}"], "strict") for model in MODELS]
        printed = PAPER_SHARES.get(setting)
        found.append(
            Claim(
                statement=f"KV shift answers more problems right, {setting}",
                paper=_in_print(printed or PAPER_SHARES["Tr12-Te15"]) + ("" if printed else " (Tr12-Te15)"),
                ours=f"{percent(ours)} against {percent(theirs)}: {points(ours, theirs)}; "
                f"with every step right {percent(strict[0])} against {percent(strict[1])}",
                direction=higher(ours, theirs),
                size="of the paper's setting, one seed in the paper" if printed else "a miniature; cannot be compared",
            )
        )
    return found


def plot(records: Sequence[Record]) -> Figure:
    """What share of questions each run answers, and how well it computes in rows like those of training."""
    from matplotlib.figure import Figure

    models, settings = by_label(records), _settings(records)
    figure = Figure(figsize=(4.6 * (1 + len(settings)), 4.0), layout="constrained")
    left, *right = figure.subplots(1, 1 + len(settings))
    draw_shares(
        left,
        {
            model: [
                [record.result["answers"]["paper"] for record in models[f"{model}, {setting}"].values()]
                for setting in settings
            ]
            for model in MODELS
        },
    )
    colors = colors_of(MODELS)
    for at, model in enumerate(MODELS):
        for group, setting in enumerate(settings):
            if setting in PAPER_SHARES:
                left.plot(share_position(group, at), PAPER_SHARES[setting][model], "x", color=colors[model])
    left.set_xticks(range(len(settings)), settings)
    left.set(
        ylabel="questions answered (x: in the paper)",
        title="Table 4",
        ylim=(-0.02, 1.02),
        xlim=(-0.5, len(settings) - 0.5),
    )
    left.grid(alpha=0.25)
    for axes, setting in zip(right, settings, strict=True):
        curves = {model: accuracy_curves(models[f"{model}, {setting}"], "values") for model in MODELS}
        record = next(iter(models[f"{next(iter(MODELS))}, {setting}"].values()))
        chance = 1 / record.options["task"]["modulus"]
        draw_accuracy(axes, curves, title=setting, ylabel="accuracy of computed values", chance=chance)
    legend_below(figure)
    return figure


def _setting(task: object) -> str:
    assert isinstance(task, IGSMConfig)
    return f"Tr{task.ops}-Te{task.test_ops}"


def _settings(records: Sequence[Record]) -> list[str]:
    """Easiest first, as in the paper."""
    found = {record.label.split(", ")[1] for record in records}
    return sorted(found, key=lambda setting: int(setting.split("-")[0].removeprefix("Tr")))


def _shares(seeds: dict[int, Record], measure: str) -> list[float]:
    return [record.result["answers"][measure]["share"] for record in seeds.values()]


def _in_print(shares: dict[str, float]) -> str:
    ours, theirs = shares["KV-shift"], shares["vanilla"]
    return f"{100 * ours:.2f} % against {100 * theirs:.2f} %: {100 * (ours - theirs):+.2f} points"


RECIPE = Recipe(
    entry=CATALOGUE["tab04"],
    source="Table 4, Appendix E.2",
    jobs=jobs,
    plot=plot,
    claims=claims,
    paper={**PAPER_SHARES, "Tr12-Te15, learning rate 2e-3": {"vanilla": 0.5, "KV-shift": 0.7}},
    notes=(
        'The paper says "similar hyper-parameters" to Ye et al. (2024), with a context of 1,024 and a learning rate of '
        "2e-4. Here: their medium setting for Tr12, their hard one for Tr21 (steps, rows, weight decay), 12 layers of "
        "width 768 in the Llama form for both models.",
        "An operation is a line of the solution. The released generator cannot make as many as the paper trained and "
        "tested on; docs/tasks.md says what was done instead, and how its problems are parted.",
        "With our names and GPT-2's tokens, 96 % of the problems of 24 operations are longer than 1,024 tokens, and "
        "28 % of those of 21, which training leaves out: answers continue past the context of training.",
        "The released code names quantities a, b, c ... in order: training up to 12 operations never has the letters "
        "m, n and o, which 15 operations need: no solution that long could be right in every step. Here all presets "
        "draw letters at random (letters=random); letters=in_order is the released form.",
        'The paper\'s rule asks only for one step with the right quantity and value. "Every step right" also asks for '
        "new letters, and a model that always writes the likeliest one may repeat itself.",
        "The laptop trains up to 2 operations and asks for 3, modulo 5 instead of 23, with words for tokens and labels "
        "on solutions only. A guess of the number is right once in 5. Of 2,000 questions 61 % asked for a constant, "
        "which its statement gives: to copy those and guess the others would have 69 % right. Solutions stop at the "
        "length of training: in a trial, KV shift wrote 297 lines where 450 were due.",
    ),
)
