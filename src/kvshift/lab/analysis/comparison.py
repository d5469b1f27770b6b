"""Twins with and without KV shift, set side by side: one summary of numbers, and one table of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvshift.lab.analysis.runs import Run
from kvshift.lab.analysis.statistics import Estimate, first_reached, mean_of, paired_difference, verdict
from kvshift.lab.errors import LabError

__all__ = ["Pair", "explanation", "summarize", "table"]

_SIDES = ("vanilla", "shifted")


@dataclass(frozen=True)
class Pair:
    """Two finished runs with one seed, equal in everything but the shift."""

    seed: int
    vanilla: Run
    shifted: Run

    @property
    def sides(self) -> dict[str, Run]:
        """The runs by the keys of the summary."""
        return dict(zip(_SIDES, (self.vanilla, self.shifted), strict=True))


def summarize(pairs: Sequence[Pair], step_time: dict[str, Any] | None = None) -> dict[str, Any]:
    """All numbers of a comparison, ready for JSON. Differences are shifted minus vanilla, ratios shifted to vanilla.

    Args:
        pairs: one for each seed.
        step_time: what `kvshift.lab.compare.step_time` measured, handed through.
    """
    seeds = [_of_one_seed(pair) for pair in pairs]
    by_row = None
    if len(seeds) == 1:
        by_row = Estimate(**seeds[0]["difference"])
    first = pairs[0]
    loss = {side: _over_seeds([seed["loss"][side] for seed in seeds]) for side in _SIDES}
    names = {side: run.name for side, run in first.sides.items()}
    found = verdict(
        [seed["difference"]["mean"] for seed in seeds], rows=by_row, names=(names["shifted"], names["vanilla"])
    )
    return {
        "names": names,
        "verdict": asdict(found),
        "validation_rows": len(first.vanilla.result["eval_losses_per_row"]),
        "loss": {side: asdict(estimate) for side, estimate in loss.items()},
        "perplexity": {side: _perplexity(estimate) for side, estimate in loss.items()},
        "seeds": seeds,
        "step_time": step_time,
        "peak_memory": _peak_memory(pairs),
        "parameters": {side: run.result["parameters"] for side, run in first.sides.items()},
        "shift_parameters": first.shifted.result["shift_parameters"],
    }


def _refuse_strangers(pair: Pair) -> None:
    """Twins were given the same options and found the same data; what they recorded shows it."""
    from kvshift.lab.training.train_config import differences  # brings the libraries that read data

    lines = [
        line
        for line in differences(pair.vanilla.config, pair.shifted.config)
        if not line.startswith(("config_hash:", "model.shift_", "model.freeze_shift:"))
    ]
    if lines:
        raise LabError(f"{pair.vanilla.folder} and {pair.shifted.folder} are no twins: {'; '.join(lines)}")


def _of_one_seed(pair: Pair) -> dict[str, Any]:
    _refuse_strangers(pair)
    rows = {side: run.result["eval_losses_per_row"] for side, run in pair.sides.items()}
    if len(rows["vanilla"]) != len(rows["shifted"]):
        raise LabError(
            f"{pair.shifted.folder}: {len(rows['shifted'])} validation sequences, but {len(rows['vanilla'])} in "
            f"{pair.vanilla.folder}; runs are compared on the same sequences"
        )
    loss = {side: _final_loss(run) for side, run in pair.sides.items()}
    by_row = paired_difference(rows["shifted"], rows["vanilla"], pair.vanilla.result["eval_tokens_per_row"])
    # The difference of the two reported losses, so that the numbers of a line add up; its error is over sequences.
    difference = Estimate(loss["shifted"].mean - loss["vanilla"].mean, by_row.stderr, by_row.n)
    target = loss["vanilla"].mean
    reach = {
        unit: {
            # Where its run ended, though its curve may have dipped below its final loss before.
            "vanilla": pair.vanilla.series("eval", unit)[0][-1],
            "shifted": _reached(pair.shifted, unit, target),
        }
        for unit in ("step", "tokens")
    }
    return {
        "seed": pair.seed,
        "loss": {side: asdict(estimate) for side, estimate in loss.items()},
        "difference": asdict(difference),
        "reach": reach,
    }


def _over_seeds(losses: list[dict[str, Any]]) -> Estimate:
    """Mean over seeds, with their error; of a single seed, its own, which is over sequences."""
    return Estimate(**losses[0]) if len(losses) == 1 else mean_of([loss["mean"] for loss in losses])


def _perplexity(loss: Estimate) -> dict[str, Any]:
    """exp(loss); its error is that of the loss times its slope."""
    value = math.exp(loss.mean)
    return asdict(Estimate(value, None if loss.stderr is None else value * loss.stderr, loss.n))


def _peak_memory(pairs: Sequence[Pair]) -> dict[str, float] | None:
    """Bytes of each side, the mean over seeds; None where the system does not tell."""
    peaks = {side: [pair.sides[side].result["peak_memory_bytes"] for pair in pairs] for side in _SIDES}
    if None in peaks["vanilla"] + peaks["shifted"]:
        return None
    mean = {side: _mean(values) for side, values in peaks.items()}
    return {**mean, "ratio": mean["shifted"] / mean["vanilla"]}


def _reached(run: Run, unit: str, target: float) -> float | None:
    where, losses = run.series("eval", unit, "loss")
    return first_reached(where, losses, target)


def _final_loss(run: Run) -> Estimate:
    return Estimate(run.result["eval_loss"], run.result["eval_loss_stderr"], run.result["eval_rows"])


def table(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """The lines of the comparison: what, vanilla, shifted, and how they differ. The first line is the heading."""
    names, seeds = summary["names"], summary["seeds"]
    rows: list[tuple[str, ...]] = [("", names["vanilla"], names["shifted"], "difference or ratio")]
    for seed in seeds:
        label = "validation loss" if len(seeds) == 1 else f"validation loss, seed {seed['seed']}"
        rows.append(
            (label, *(_plus_minus(seed["loss"][side]) for side in _SIDES), _plus_minus(seed["difference"], "+"))
        )
    if len(seeds) > 1:
        found = summary["verdict"]
        difference = f"{found['difference']:+.4f}"
        if found["low"] is not None:
            difference += f" (95 %: {found['low']:+.4f} to {found['high']:+.4f})"
        rows.append(
            (f"mean of {len(seeds)} seeds", *(_plus_minus(summary["loss"][side]) for side in _SIDES), difference)
        )
    perplexity = summary["perplexity"]
    ratio = perplexity["shifted"]["mean"] / perplexity["vanilla"]["mean"]
    rows.append(("perplexity", *(_plus_minus(perplexity[side], digits=2) for side in _SIDES), f"× {ratio:.4f}"))
    rows += [_reach(seeds, unit, label, names["vanilla"]) for unit, label in (("step", "steps"), ("tokens", "tokens"))]
    if (step := summary["step_time"]) is not None:
        milliseconds = (f"{step['milliseconds'][side]:.1f} ms" for side in _SIDES)
        ratio = f"× {step['ratio']:.3f} (quartiles {step['low']:.3f} to {step['high']:.3f})"
        rows.append(("time of a step", *milliseconds, ratio))
    if (memory := summary["peak_memory"]) is not None:
        mebibytes = (f"{memory[side] / 2**20:,.0f} MiB" for side in _SIDES)
        rows.append(("peak memory", *mebibytes, f"× {memory['ratio']:.3f}"))
    count = summary["parameters"]
    rows.append(("parameters", *(f"{count[side]:,}" for side in _SIDES), f"{count['shifted'] - count['vanilla']:+,}"))
    return rows


def _reach(seeds: list[dict[str, Any]], unit: str, label: str, vanilla: str) -> tuple[str, ...]:
    theirs = [seed["reach"][unit]["vanilla"] for seed in seeds]
    ours = [seed["reach"][unit]["shifted"] for seed in seeds]
    title = f"{label} to {vanilla}'s final loss"
    reached = [value for value in ours if value is not None]
    if len(reached) < len(ours):
        missed = "not reached" if len(ours) == 1 else f"not reached by {len(ours) - len(reached)} of {len(ours)} seeds"
        return (title, f"{_mean(theirs):,.0f}", missed, "")
    ratio = _mean(one / other for one, other in zip(reached, theirs, strict=True))
    return (title, f"{_mean(theirs):,.0f}", f"{_mean(reached):,.0f}", f"× {ratio:.2f}")


def _plus_minus(estimate: dict[str, Any], sign: str = "", digits: int = 4) -> str:
    value = f"{estimate['mean']:{sign}.{digits}f}"
    return value if estimate["stderr"] is None else f"{value} ± {estimate['stderr']:.{digits}f}"


def _mean(values: Any) -> float:
    return mean_of(list(values)).mean


def explanation(summary: dict[str, Any]) -> str:
    """What the signs in the table stand for."""
    rows = f"± is one standard error over the {summary['validation_rows']} sequences of the validation set"
    if len(summary["seeds"]) == 1:
        text = f"{rows}; of the difference, paired by sequence."
    else:
        text = (
            f"In the lines of single seeds {rows} (of the difference, paired by sequence); "
            "in those of the mean, over seeds. Steps and tokens are means over seeds."
        )
    if summary["step_time"] is not None:
        text += (
            " The times of a step are medians over rounds; beside them stands the median of the ratios of single "
            "rounds, in which both models ran next to each other: it need not be the ratio of the two times."
        )
    return text
