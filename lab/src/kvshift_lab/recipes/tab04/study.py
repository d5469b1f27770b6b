"""Table 4: grade-school problems with more operations than those of training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_accuracy, draw_shares
from kvshift_lab.analysis.colors import colors_of
from kvshift_lab.analysis.panels import legend_below, new_figure
from kvshift_lab.recipes.tab04 import ENTRY
from kvshift_lab.run.answers import answer_accuracy
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.run.train_task import TaskTrainConfig
from kvshift_lab.study.arm import Arm, pair
from kvshift_lab.study.claims import Claim, higher, not_testable, percent, points
from kvshift_lab.study.jobs import MeasuredJob, TrainingJob
from kvshift_lab.study.models import paper_proportions
from kvshift_lab.study.recipe import Recipe, Record, accuracy_curves, by_arm
from kvshift_lab.tasks import IGSMConfig
from kvshift_lab.tasks.igsm import IGSMTask
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA

MODELS = {arm.label: arm for arm in pair()}
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
    accumulation=16,  # 512 sequences per step
    eval_every=2000,
    eval_rows=512,
    eval_batch_size=64,
    save_every=5000,
    data_workers=4,  # with GPT-2's tokenizer each worker makes 400 sequences per second
    questions=4096,
)
TR21 = replace(
    TR12,
    task=IGSMConfig(ops=21, test_ops=24, tokenizer="gpt2", letters="random"),
    optimizer=replace(_OPTIMIZER, weight_decay=0.03),
    steps=200_000,
    accumulation=8,  # 256 sequences per step
)
LAPTOP = replace(
    TR12,
    task=IGSMConfig(ops=4, test_ops=5, length=256, loss="solutions", max_new_tokens=104, letters="random", modulus=5),
    optimizer=replace(_OPTIMIZER, learning_rate=4e-3, warmup_steps=200),
    steps=10_000,
    batch_size=8,
    accumulation=1,
    eval_every=500,
    eval_rows=512,
    save_every=2000,
    data_workers=0,
    questions=1000,
)
# Problems of the generator igsm, whose questions ask for quantities that the text implies but never states.
YE = replace(
    LAPTOP,
    task=IGSMConfig(
        generator="igsm", ops=4, test_ops=5, max_edges=8, length=512, loss="solutions", max_new_tokens=120, modulus=5
    ),
    batch_size=4,  # sequences are twice as long, so a step has as many tokens as in laptop
    eval_batch_size=32,
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

# By preset: training settings, then width, layers and heads of the model.
SIZES = {
    "paper": ((TR12, TR21), 768, 12, 12),
    "ye": ((YE,), 64, 2, 4),
    "laptop": ((LAPTOP,), 64, 2, 4),
    "smoke": ((SMOKE,), 16, 1, 2),
}


@dataclass(frozen=True, kw_only=True)
class ProblemJob(MeasuredJob, TrainingJob):
    """Train one model and test it on problems with more operations than in training, then with as many."""

    result_name = "inside"

    def measure(self, model: Any, out: Path) -> dict[str, Any]:
        """Return the shares of correct answers to unseen problems with the largest number of operations of training."""
        task, size = self.config.task, self.config.eval_batch_size or self.config.batch_size
        assert isinstance(task, IGSMConfig)
        inside = IGSMTask(replace(task, test_ops=task.ops))
        return answer_accuracy(model.eval(), inside, self.config.questions, seed=0, batch_size=size)


def arms(preset: str) -> list[ProblemJob]:
    """Return a job for both models in each setting."""
    settings, width, layers, heads = SIZES[preset]
    return [
        ProblemJob(
            arm=Arm(variant=variant, case=_setting(config.task)),
            config=replace(config, model=paper_proportions(width, layers, variant, heads=heads)),
        )
        for config in settings[::-1]  # the longest first
        for variant in SHIFTED_AND_VANILLA
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims that KV shift answers more problems right, in each setting and also within training's range.

    The paper has no number for the second. It separates models that cannot compute from models that do not generalize.
    """
    models = by_arm(records)
    found = []
    for setting in _settings(records):
        runs = [models[arm] for arm in pair(case=setting)]
        printed = PAPER_SHARES.get(setting)
        found.append(
            Claim(
                statement=f"KV shift answers more problems right, {setting}",
                paper=_share_text(printed or PAPER_SHARES["Tr12-Te15"]) + ("" if printed else " (Tr12-Te15)"),
                ours=_accuracy_text(runs, "answers"),
                direction=higher(*(_shares(seeds, "paper") for seeds in runs)),
                note="of the paper's setting, one seed in the paper" if printed else "a miniature; cannot be compared",
            )
        )
        if not printed:
            found[-1] = not_testable(found[-1], "neither model learns to answer, so that neither can be ahead")
        if all("inside" in record.result for seeds in runs for record in seeds.values()):
            inside = [_shares(seeds, "paper", "inside") for seeds in runs]
            found.append(
                Claim(
                    statement=f"KV shift solves more problems that are no longer than those in training, {setting}",
                    paper="no number",
                    ours=_accuracy_text(runs, "inside"),
                    direction=higher(*inside),
                    note="other problems than those of training",
                    own=True,
                )
            )
    return found


def _accuracy_text(runs: Sequence[dict[int, Record]], which: str) -> str:
    """Return the shares of right answers of both models as text, by the paper's rule and with every step right."""
    shifted, vanilla = (_shares(seeds, "paper", which) for seeds in runs)
    strict = [_shares(seeds, "strict", which) for seeds in runs]
    return (
        f"{percent(shifted)} against {percent(vanilla)}: {points(shifted, vanilla)}; "
        f"with every step right {percent(strict[0])} against {percent(strict[1])}"
    )


def plot(records: Sequence[Record]) -> Figure:
    """Plot the share of questions that each run answers, and its accuracy of computed values in training's range."""
    models, settings = by_arm(records), _settings(records)
    labels = ["share of questions answered", *["accuracy of computed values"] * len(settings)]
    figure, (left, *right) = new_figure(["Questions answered", *settings], ylabels=labels, height=3.4)
    answers = {
        model: [[run.result["answers"]["paper"] for run in models[replace(arm, case=one)].values()] for one in settings]
        for model, arm in MODELS.items()
    }
    draw_shares(left, settings, answers)
    for group, setting in enumerate(settings):
        for place, model in zip((-0.15, 0.15), MODELS, strict=True):
            if setting in PAPER_SHARES:
                share = PAPER_SHARES[setting][model]
                left.plot(group + place, share, "x", color=colors_of(MODELS)[model], label=f"{model} in the paper")
    left.set_xlabel("operations in training (Tr) and test (Te)")
    for axes, setting in zip(right, settings, strict=True):
        runs = {model: models[replace(arm, case=setting)] for model, arm in MODELS.items()}
        curves = {model: accuracy_curves(seeds, "values") for model, seeds in runs.items()}
        record = next(record for seeds in runs.values() for record in seeds.values())
        draw_accuracy(axes, curves, chance=1 / record.options["task"]["modulus"])
    legend_below(figure)
    return figure


def _setting(task: object) -> str:
    assert isinstance(task, IGSMConfig)
    return f"Tr{task.ops}-Te{task.test_ops}"


def _settings(records: Sequence[Record]) -> list[str]:
    """Return the settings of the records, easiest first as in the paper."""
    found = {record.arm.case or "" for record in records}
    return sorted(found, key=lambda setting: int(setting.split("-")[0].removeprefix("Tr")))


def _shares(seeds: dict[int, Record], measure: str, which: str = "answers") -> list[float]:
    return [record.result[which][measure]["share"] for record in seeds.values()]


def _share_text(shares: dict[str, float]) -> str:
    shifted, vanilla = shares["KV-shift"], shares["vanilla"]
    return f"{100 * shifted:.2f} % against {100 * vanilla:.2f} %: {100 * (shifted - vanilla):+.2f} points"


RECIPE = Recipe(
    entry=ENTRY,
    source="Table 4, Appendix E.2",
    arms=arms,
    plot=plot,
    claims=claims,
)
