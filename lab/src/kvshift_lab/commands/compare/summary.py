"""The numbers of a comparison, from the records of its runs, and their table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.options import OptionTrait, differences, option_names
from kvshift_lab.core.statistics import Estimate, first_reached, mean_of, paired_difference
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.study.claims import verdict
from kvshift_lab.study.recipe import Record, accuracy_curve, by_arm
from kvshift_lab.variants.by_name import label_of
from kvshift_lab.variants.model_config import ModelConfig


def summarize(records: Sequence[Record], step_time: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return all numbers of a comparison by the names of variants, ready for JSON.

    Differences ("verdicts", and "difference" of each seed) and ratios are to the baseline, which has no entry itself.

    Args:
        records: The records of all variants with each seed; the variant of the first is the baseline.
        step_time: The measurement of `kvshift_lab.commands.compare.step_time`, which is included unchanged.
    """
    runs = {str(arm.variant): seeds for arm, seeds in by_arm(records).items()}
    baseline, *others = runs
    seeds = [_summarize_seed(seed, {variant: runs[variant][seed] for variant in runs}) for seed in runs[baseline]]
    first = {variant: next(iter(by_seed.values())) for variant, by_seed in runs.items()}
    names = {variant: label_of(record.options["model"]) for variant, record in first.items()}
    loss = {variant: _over_seeds([seed["loss"][variant] for seed in seeds]) for variant in runs}
    verdicts = {
        variant: verdict(
            [seed["difference"][variant]["mean"] for seed in seeds],
            rows=Estimate(**seeds[0]["difference"][variant]) if len(seeds) == 1 else None,
            names=(names[variant], names[baseline]),
        )
        for variant in others
    }
    return {
        "names": names,
        "verdicts": {variant: asdict(found) for variant, found in verdicts.items()},
        "validation_rows": len(first[baseline].result["eval_losses_per_row"]),
        "loss": {variant: asdict(estimate) for variant, estimate in loss.items()},
        "perplexity": {variant: _perplexity(estimate) for variant, estimate in loss.items()},
        "seeds": seeds,
        "step_time": step_time,
        "peak_memory": _peak_memory(runs),
        "parameters": {variant: record.result["parameters"] for variant, record in first.items()},
    }


def _summarize_seed(seed: int, runs: Mapping[str, Record]) -> dict[str, Any]:
    """Return the losses of one seed, and for each variant but the first the difference and the steps to its loss."""
    (name, baseline), *others = runs.items()
    loss = {variant: _final_loss(record) for variant, record in runs.items()}
    # The baseline reaches its final loss at its end, even if its curve was below that loss before.
    reach: dict[str, dict[str, Any]] = {unit: {name: _evaluated(baseline, unit)[0][-1]} for unit in ("step", "tokens")}
    difference = {}
    for variant, record in others:
        _require_same_options(baseline, record)
        ours, theirs = (each.result["eval_losses_per_row"] for each in (record, baseline))
        if len(ours) != len(theirs):
            raise LabError(
                f"{variant} and {name}, seed {seed}, must have the same number of validation sequences, "
                f"got {len(ours)} and {len(theirs)}"
            )
        by_row = paired_difference(ours, theirs, baseline.result["eval_tokens_per_row"])
        # Use the difference of the reported losses, so that the numbers of a row add up. Its error is over sequences.
        difference[variant] = Estimate(loss[variant].mean - loss[name].mean, by_row.stderr, by_row.n)
        for unit, reached in reach.items():
            reached[variant] = first_reached(*_evaluated(record, unit), loss[name].mean)
    return {
        "seed": seed,
        "loss": {variant: asdict(estimate) for variant, estimate in loss.items()},
        "difference": {variant: asdict(estimate) for variant, estimate in difference.items()},
        "reach": reach,
    }


def _require_same_options(baseline: Record, other: Record) -> None:
    """Raise a LabError unless both runs recorded the same options and data, except for options of the variant."""
    ignored = {f"model.{name}" for name in option_names(ModelConfig, OptionTrait.VARIES_BY_VARIANT)}
    facts = [record.options.get("data_facts") or {} for record in (baseline, other)]
    ignored |= {f"data_facts.{name}" for name in facts[0].keys() ^ facts[1].keys()}  # older versions recorded less
    found = differences(TrainConfig, baseline.options, other.options)
    lines = [line for name, line in found.items() if name not in ignored]
    if lines:
        raise LabError(
            f"{baseline.arm} and {other.arm}, seed {other.seed}, differ in more than the variant: {'; '.join(lines)}"
        )


def _evaluated(record: Record, unit: str) -> tuple[list[float], list[float]]:
    """Return the steps of all evaluations, or the tokens until then, and the losses."""
    steps, losses = accuracy_curve(record, "loss")
    scale = record.options["tokens_per_step"] if unit == "tokens" else 1
    return [round(step) * scale for step in steps], losses


def _over_seeds(losses: list[dict[str, Any]]) -> Estimate:
    """Return the mean over seeds with its error; for a single seed, its own estimate with an error over sequences."""
    return Estimate(**losses[0]) if len(losses) == 1 else mean_of([loss["mean"] for loss in losses])


def _perplexity(loss: Estimate) -> dict[str, Any]:
    """Return exp(loss), with the error of the loss times exp(loss); above 700 nats, that of 700."""
    value = math.exp(min(loss.mean, 700.0))
    return asdict(Estimate(value, None if loss.stderr is None else value * loss.stderr, loss.n))


def _peak_memory(runs: Mapping[str, Mapping[int, Record]]) -> dict[str, float] | None:
    """Return the peak memory of each variant in bytes, a mean over seeds; None if the system does not report it."""
    peaks = {variant: [run.result["peak_memory_bytes"] for run in seeds.values()] for variant, seeds in runs.items()}
    if any(None in values for values in peaks.values()):
        return None
    return {variant: _mean(values) for variant, values in peaks.items()}


def _final_loss(record: Record) -> Estimate:
    return Estimate(record.result["eval_loss"], record.result["eval_loss_stderr"], record.result["eval_rows"])


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


def _mean(values: Iterable[float]) -> float:
    return mean_of([*values]).mean


def legend(summary: dict[str, Any]) -> str:
    """Explain the notation of the table."""
    rows = f"± is one standard error over the {summary['validation_rows']} sequences of the validation set"
    if len(summary["seeds"]) == 1:
        text = f"A lower loss is better. {rows}; differences are paired by sequence."
    else:
        text = (
            f"A lower loss is better. In rows of single seeds, {rows} (differences are paired by sequence); "
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
