"""Comparison of variants that were trained with the same options: a summary of numbers, and its table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import OptionTrait, differences, option_names
from kvshift_lab.core.statistics import Estimate, first_reached, mean_of, paired_difference, verdict
from kvshift_lab.run.finished import Run
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.variants.model_config import ModelConfig


@dataclass(frozen=True)
class PairedRuns:
    """Finished runs with the same seed that differ only in the variant.

    Attributes:
        seed: Seed of all runs.
        runs: Two or more runs by the name of their variant; the first is the baseline.
    """

    seed: int
    runs: Mapping[str, Run]

    @property
    def baseline(self) -> Run:
        """The run that the others are compared with."""
        return next(iter(self.runs.values()))

    @property
    def others(self) -> dict[str, Run]:
        """All runs except the baseline, by variant."""
        return dict(list(self.runs.items())[1:])


def summarize(paired_runs: Sequence[PairedRuns], step_time: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return all numbers of a comparison by the names of variants, ready for JSON.

    Differences ("verdicts", and "difference" of each seed) and ratios are to the baseline, which has no entry itself.

    Args:
        paired_runs: The runs of each seed, with the same variants.
        step_time: The measurement of `kvshift_lab.commands.compare.step_time`, which is included unchanged.
    """
    seeds = [_summarize_seed(each) for each in paired_runs]
    first = paired_runs[0]
    names = {variant: run.name for variant, run in first.runs.items()}
    loss = {variant: _over_seeds([seed["loss"][variant] for seed in seeds]) for variant in names}
    verdicts = {
        variant: verdict(
            [seed["difference"][variant]["mean"] for seed in seeds],
            rows=Estimate(**seeds[0]["difference"][variant]) if len(seeds) == 1 else None,
            names=(names[variant], first.baseline.name),
        )
        for variant in first.others
    }
    return {
        "names": names,
        "verdicts": {variant: asdict(found) for variant, found in verdicts.items()},
        "validation_rows": len(first.baseline.result["eval_losses_per_row"]),
        "loss": {variant: asdict(estimate) for variant, estimate in loss.items()},
        "perplexity": {variant: _perplexity(estimate) for variant, estimate in loss.items()},
        "seeds": seeds,
        "step_time": step_time,
        "peak_memory": _peak_memory(paired_runs),
        "parameters": {variant: run.result["parameters"] for variant, run in first.runs.items()},
    }


def _require_same_options(baseline: Run, other: Run) -> None:
    """Raise a LabError unless both runs recorded the same options and data, except for options of the variant."""
    varying = option_names(ModelConfig, OptionTrait.VARIES_BY_VARIANT)
    ignored = {"config_hash", *(f"model.{name}" for name in varying)}
    facts = [run.config.get("data_facts") or {} for run in (baseline, other)]
    ignored |= {f"data_facts.{name}" for name in facts[0].keys() ^ facts[1].keys()}  # older versions recorded less
    found = differences(TrainConfig, baseline.config, other.config)
    lines = [line for name, line in found.items() if name not in ignored]
    if lines:
        raise LabError(f"{baseline.folder} and {other.folder} differ in more than the variant: {'; '.join(lines)}")


def _summarize_seed(paired_runs: PairedRuns) -> dict[str, Any]:
    baseline, names = paired_runs.baseline, list(paired_runs.runs)
    loss = {variant: _final_loss(run) for variant, run in paired_runs.runs.items()}
    # The baseline reaches its final loss at its end, even if its curve was below that loss before.
    reach: dict[str, dict[str, Any]] = {
        unit: {names[0]: baseline.series("eval", unit)[0][-1]} for unit in ("step", "tokens")
    }
    differences = {}
    for variant, run in paired_runs.others.items():
        _require_same_options(baseline, run)
        ours, theirs = (each.result["eval_losses_per_row"] for each in (run, baseline))
        if len(ours) != len(theirs):
            raise LabError(
                f"{run.folder} and {baseline.folder} must have the same number of validation sequences, "
                f"got {len(ours)} and {len(theirs)}"
            )
        by_row = paired_difference(ours, theirs, baseline.result["eval_tokens_per_row"])
        # Use the difference of the reported losses, so that the numbers of a row add up. Its error is over sequences.
        differences[variant] = Estimate(loss[variant].mean - loss[names[0]].mean, by_row.stderr, by_row.n)
        for unit, reached in reach.items():
            where, losses = run.series("eval", unit, "loss")
            reached[variant] = first_reached(where, losses, loss[names[0]].mean)
    return {
        "seed": paired_runs.seed,
        "loss": {variant: asdict(estimate) for variant, estimate in loss.items()},
        "difference": {variant: asdict(estimate) for variant, estimate in differences.items()},
        "reach": reach,
    }


def _over_seeds(losses: list[dict[str, Any]]) -> Estimate:
    """Return the mean over seeds with its error; for a single seed, its own estimate with an error over sequences."""
    return Estimate(**losses[0]) if len(losses) == 1 else mean_of([loss["mean"] for loss in losses])


def _perplexity(loss: Estimate) -> dict[str, Any]:
    """Return exp(loss), with the error of the loss times exp(loss)."""
    value = math.exp(loss.mean)
    return asdict(Estimate(value, None if loss.stderr is None else value * loss.stderr, loss.n))


def _peak_memory(paired_runs: Sequence[PairedRuns]) -> dict[str, float] | None:
    """Return the peak memory of each variant in bytes, a mean over seeds; None if the system does not report it."""
    peaks = {
        variant: [each.runs[variant].result["peak_memory_bytes"] for each in paired_runs]
        for variant in paired_runs[0].runs
    }
    if any(None in values for values in peaks.values()):
        return None
    return {variant: _mean(values) for variant, values in peaks.items()}


def _final_loss(run: Run) -> Estimate:
    return Estimate(run.result["eval_loss"], run.result["eval_loss_stderr"], run.result["eval_rows"])


def table(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the comparison, heading first: a label, each variant, and each difference to the baseline."""
    names, seeds = summary["names"], summary["seeds"]
    baseline, *others = names
    heads = ["difference or ratio"] if len(others) == 1 else [f"{names[o]} to {names[baseline]}" for o in others]
    rows: list[tuple[str, ...]] = [("", *names.values(), *heads)]
    for seed in seeds:
        label = "validation loss" if len(seeds) == 1 else f"validation loss, seed {seed['seed']}"
        losses = (_plus_minus(seed["loss"][variant]) for variant in names)
        rows.append((label, *losses, *(_plus_minus(seed["difference"][variant], "+") for variant in others)))
    if len(seeds) > 1:
        means = (_plus_minus(summary["loss"][variant]) for variant in names)
        rows.append(
            (f"mean of {len(seeds)} seeds", *means, *(_interval(summary["verdicts"][variant]) for variant in others))
        )
    perplexity = summary["perplexity"]
    ratios = (f"× {perplexity[variant]['mean'] / perplexity[baseline]['mean']:.4f}" for variant in others)
    rows.append(("perplexity", *(_plus_minus(perplexity[variant], digits=2) for variant in names), *ratios))
    rows += [_reach(seeds, unit, label, names) for unit, label in (("step", "steps"), ("tokens", "tokens"))]
    if (step := summary["step_time"]) is not None:
        milliseconds = (f"{step['milliseconds'][variant]:.1f} ms" for variant in names)
        rows.append(("time of a step", *milliseconds, *(_quartiles(step["ratios"][variant]) for variant in others)))
    if (memory := summary["peak_memory"]) is not None:
        mebibytes = (f"{memory[variant] / 2**20:,.0f} MiB" for variant in names)
        ratios = (f"× {memory[variant] / memory[baseline]:.3f}" for variant in others)
        rows.append(("peak memory", *mebibytes, *ratios))
    count = summary["parameters"]
    more = (f"{count[variant] - count[baseline]:+,}" for variant in others)
    rows.append(("parameters", *(f"{count[variant]:,}" for variant in names), *more))
    return rows


def _interval(found: dict[str, Any]) -> str:
    ends = "" if found["low"] is None else f" (95 %: {found['low']:+.4f} to {found['high']:+.4f})"
    return f"{found['difference']:+.4f}{ends}"


def _quartiles(ratio: dict[str, float]) -> str:
    return f"× {ratio['ratio']:.3f} (quartiles {ratio['low']:.3f} to {ratio['high']:.3f})"


def _reach(seeds: list[dict[str, Any]], unit: str, label: str, names: dict[str, str]) -> tuple[str, ...]:
    baseline, *others = names
    theirs = [seed["reach"][unit][baseline] for seed in seeds]
    cells, ratios = [f"{_mean(theirs):,.0f}"], []
    for variant in others:
        ours = [seed["reach"][unit][variant] for seed in seeds]
        reached = [value for value in ours if value is not None]
        missed = len(ours) - len(reached)
        if missed:
            cells.append("not reached" if len(ours) == 1 else f"not reached by {missed} of {len(ours)} seeds")
            ratios.append("")
        else:
            cells.append(f"{_mean(reached):,.0f}")
            ratios.append(f"× {_mean(one / other for one, other in zip(reached, theirs, strict=True)):.2f}")
    return (f"{label} to {names[baseline]}'s final loss", *cells, *ratios)


def _plus_minus(estimate: dict[str, Any], sign: str = "", digits: int = 4) -> str:
    value = f"{estimate['mean']:{sign}.{digits}f}"
    return value if estimate["stderr"] is None else f"{value} ± {estimate['stderr']:.{digits}f}"


def _mean(values: Any) -> float:
    return mean_of(list(values)).mean


def legend(summary: dict[str, Any]) -> str:
    """Explain the notation of the table."""
    rows = f"± is one standard error over the {summary['validation_rows']} sequences of the validation set"
    if len(summary["seeds"]) == 1:
        text = f"{rows}; differences are paired by sequence."
    else:
        text = (
            f"In rows of single seeds, {rows} (differences are paired by sequence); "
            "in the other rows, over seeds. Steps and tokens are means over seeds."
        )
    if summary["step_time"] is not None:
        both = "both" if len(summary["names"]) == 2 else "all"
        text += (
            " The times of a step are medians over rounds. Their ratio is the median of the ratios of single rounds, "
            f"in which {both} models ran next to each other, so it may differ from the ratio of the medians."
        )
    if len(summary["names"]) > 2 and len(summary["seeds"]) > 1:
        text += " Each interval covers 95 % by itself; all of them together cover less."
    return text
