"""Figures 5 and 6: losses by model size, a power law fitted to them, and losses by number of tokens."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvshift_lab.analysis.accuracy import draw_means
from kvshift_lab.analysis.colors import colors_of, marker_of
from kvshift_lab.analysis.panels import INTERVALS, LOSS, legend_below, new_figure
from kvshift_lab.analysis.scaling import Interval, PowerLaw, fit_power_law
from kvshift_lab.core.statistics import difference_interval
from kvshift_lab.data.config import DataConfig
from kvshift_lab.recipes.language_models.settings import LARGE, WIKI
from kvshift_lab.run.train_config import OptimizerConfig, TrainConfig
from kvshift_lab.study.arm import Arm, layers_text
from kvshift_lab.study.claims import Claim, Direction, higher, lower_loss, verdict
from kvshift_lab.study.cost import count_parameters
from kvshift_lab.study.entry import Entry
from kvshift_lab.study.jobs import StudyJob
from kvshift_lab.study.models import llama_config_from_record
from kvshift_lab.study.notes import read_notes
from kvshift_lab.study.recipe import Recipe, Record, accuracy_curve, by_arm, has_diverged
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA, VARIANTS, with_variant
from kvshift_lab.variants.model_config import ModelConfig

_LAPTOP = TrainConfig(
    out=Path(),
    data=replace(WIKI, sequence_length=128),
    optimizer=OptimizerConfig(warmup_steps=40),
    steps=400,
    batch_size=16,
    eval_every=100,
    eval_rows=384,
    save_every=200,
    log_every=50,
    report_to=(),
    progress=False,
)
_SMOKE = replace(
    _LAPTOP,
    data=DataConfig(vocab_size=257, sequence_length=16),
    optimizer=OptimizerConfig(warmup_steps=1),
    steps=4,
    batch_size=2,
    eval_every=2,
    eval_rows=4,
    save_every=4,
    log_every=2,
)


def _config_of_width(config: TrainConfig, width: int, layers: int, head: int) -> tuple[str, TrainConfig]:
    model = ModelConfig(hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // head)
    return f"{layers_text(layers)} of width {width}", replace(config, model=model)


def _paper_config(size: str) -> tuple[str, TrainConfig]:
    """Return a size of Table 16 and its options: 10 billion tokens with the optimizer of the smallest size."""
    config, base = LARGE[size].config, LARGE["1.5B"].config
    tokens = 2_097_152 if size == "13B" else 1_048_576
    data = replace(base.data, sequence_length=2048, vocab_size=config.data.vocab_size)
    return size, replace(
        config, data=data, optimizer=base.optimizer, batch_size=8, tokens_per_step=tokens, steps=10**10 // tokens
    )


# By preset: the sizes, smallest first, and the index of the one that is also trained three times as long.
SIZES: Mapping[str, tuple[dict[str, TrainConfig], int]] = {
    "paper": (dict(map(_paper_config, LARGE)), 0),
    "laptop": (
        dict(
            _config_of_width(_LAPTOP, width, layers, 16)
            for width, layers in ((32, 2), (48, 3), (64, 4), (96, 4), (128, 5))
        ),
        2,
    ),
    "smoke": (dict(_config_of_width(_SMOKE, width, 1, 8) for width in (8, 16, 24)), 0),
}
IN_FIGURE_5 = {"paper": ("1.5B", "6.7B", "13B")}


def _arms(preset: str, *, longer: bool) -> list[StudyJob]:
    """Return jobs of each size with and without KV shift, longest first; `longer` adds one size at thrice the steps."""
    sizes, long = SIZES[preset]
    named = [(name, config) for name, config in sizes.items() if longer or name in IN_FIGURE_5.get(preset, sizes)]
    runs = [(Arm(case=name), config) for name, config in named]
    if longer:
        name, config = named[long]
        steps = 3 * config.steps
        runs.append((Arm(case=name, steps=steps), replace(config, steps=steps)))
    return [
        StudyJob(arm=replace(arm, variant=variant), config=replace(config, model=with_variant(config.model, variant)))
        for arm, config in reversed(runs)
        for variant in SHIFTED_AND_VANILLA
    ]


def parameters_of(record: Record) -> int:
    """Return N of Figure 6a: the number of parameters without embedding, output layer and shift coefficients."""
    found = count_parameters(llama_config_from_record(record))
    return found.total - found.embedding - found.shift


@dataclass(frozen=True)
class _Runs:
    """The runs of one size with and without the shift, paired by seed."""

    name: str
    shifted: Sequence[Record]
    vanilla: Sequence[Record]

    @property
    def size(self) -> int:
        return parameters_of(self.vanilla[0])

    def losses(self, at: float = 1.0) -> tuple[list[float], list[float]]:
        """Return the losses with and without the shift at the evaluation nearest to the fraction `at` of the steps."""
        return [_loss(record, at) for record in self.shifted], [_loss(record, at) for record in self.vanilla]


def _loss(record: Record, part: float) -> float:
    steps, losses = accuracy_curve(record, "loss")
    return min(zip(steps, losses, strict=True), key=lambda point: abs(point[0] - part * steps[-1]))[1]


def _by_size(records: Sequence[Record], *, longer: bool = False) -> list[_Runs]:
    """Return the runs by size, smallest first: only those with three times the steps if `longer`, else the others."""
    models = by_arm(records)
    sizes = dict.fromkeys(replace(arm, variant=None) for arm in models if (arm.steps is not None) == longer)
    found = []
    for size in sizes:
        shifted, vanilla = ([*models[replace(size, variant=variant)].values()] for variant in SHIFTED_AND_VANILLA)
        found.append(_Runs(size.label, shifted, vanilla))
    return sorted(found, key=lambda runs: runs.size)


def _without_diverged(records: Sequence[Record]) -> list[Record]:
    """Return the records of the seeds of which no run diverged: sizes share seeds, and models are paired by them."""
    diverged = {record.seed for record in records if has_diverged(record)}
    return [record for record in records if record.seed not in diverged]


def _plot_without_diverged(plot: Callable[[Sequence[Record]], Figure], records: Sequence[Record]) -> Figure:
    kept = _without_diverged(records)
    return plot(kept) if kept else new_figure(["In every seed a run diverged"], ylabels=[LOSS])[0]


def _unless_one_diverged(
    claims: Callable[[Sequence[Record]], Sequence[Claim]], records: Sequence[Record]
) -> Sequence[Claim]:
    """Return the claims; if a run diverged, one that is not shown, since a choice of seeds would decide the others."""
    diverged = [f"{record.arm}, seed {record.seed}" for record in records if has_diverged(record)]
    if not diverged:
        return claims(records)
    claim = Claim(
        statement="KV-shift has a lower loss than vanilla at every size",
        paper="lower at every size",
        ours=f"runs diverged: {'; '.join(diverged)}",
        direction="not shown",
        note="no loss at the end, so there are no intervals and no power law",
    )
    return [claim]


def _at_each_size(records: Sequence[Record]) -> list[Claim]:
    claims = []
    for runs in _by_size(records):
        shifted, vanilla = runs.losses()
        claims.append(
            lower_loss(
                f"{runs.name}: KV-shift has a lower loss than vanilla",
                shifted,
                vanilla,
                paper="lower at 1.5B, 6.7B and 13B",
                note=f"nats per token, of {runs.size:,} parameters without embeddings",
            )
        )
    return claims


def over_sizes(records: Sequence[Record]) -> list[Claim]:
    """Return the claims about each size and about the mean over sizes, one value per seed as sizes share seeds."""
    claims = _at_each_size(records)
    if len(claims) < 2:
        return claims
    both = [runs.losses() for runs in _by_size(records)]
    by_size = [[one - other for one, other in zip(shifted, vanilla, strict=True)] for shifted, vanilla in both]
    means = [statistics.fmean(of_seed) for of_seed in zip(*by_size, strict=True)]
    mean = lower_loss(
        f"Mean over {len(both)} sizes, by seed: KV-shift has a lower loss than vanilla",
        means,
        [0.0] * len(means),
        note="nats per token; chosen after the data had been seen",
    )
    return [*claims, mean]


def _fits(records: Sequence[Record]) -> tuple[PowerLaw, PowerLaw]:
    """Return the power laws fitted to the losses of all runs with the shift, and of all runs without."""
    sizes: list[float] = []
    losses: tuple[list[float], list[float]] = ([], [])
    for runs in _by_size(records):
        sizes += [runs.size] * len(runs.shifted)
        for both, found in zip(losses, runs.losses(), strict=True):
            both += found
    shifted, vanilla = (fit_power_law(sizes, found) for found in losses)
    return shifted, vanilla


def _ratios_by_seed(records: Sequence[Record]) -> list[PowerLaw]:
    """Return each seed's power law of the ratio of losses, with over without: its exponent is their difference."""
    sizes = _by_size(records)
    seeds = zip(*([one / other for one, other in zip(*runs.losses(), strict=True)] for runs in sizes), strict=True)
    return [fit_power_law([runs.size for runs in sizes], ratios) for ratios in seeds]


def _over_seeds(values: Sequence[float]) -> str:
    mean, interval = statistics.fmean(values), difference_interval(values)
    return f"{mean:.4g} ({len(values)} seeds)" if interval is None else str(Interval(mean, *interval))


def scaling(records: Sequence[Record]) -> list[Claim]:
    """Return the claims of Figure 6: the gain at every size, exponents, extrapolation to larger models, more tokens."""
    each = [claim.direction for claim in _at_each_size(records)]
    together: Direction = "fails" if "fails" in each else "holds" if set(each) == {"holds"} else "not shown"
    shifted, vanilla = _fits(records)
    sizes = _by_size(records)
    beyond = 10 * sizes[-1].size
    ratios = _ratios_by_seed(records)
    steeper, at = [law.exponent.value for law in ratios], [law.at(beyond).value for law in ratios]
    claims = [
        Claim(
            statement="KV-shift has a lower loss than vanilla at every size",
            paper="at every size, without numbers",
            ours=f"of {len(each)} sizes it holds at {each.count('holds')} and fails at {each.count('fails')}",
            direction=together,
            note=f"{sizes[0].size:,} to {sizes[-1].size:,} parameters without embeddings",
        ),
        Claim(
            statement="L(N) = (N_c / N)^a falls faster with KV-shift",
            paper="it gives no exponents",
            ours=f"the exponents differ by {_over_seeds(steeper)}",
            direction=higher(steeper, [0.0] * len(steeper)),
            note=f"a is {shifted.exponent} with and {vanilla.exponent} without, N_c {shifted.critical_size:.3g} and "
            f"{vanilla.critical_size:.3g}: of all runs, by the bootstrap",
            own=True,
        ),
        Claim(
            statement="Extrapolated to ten times the largest size, KV-shift still has the lower loss",
            paper="it does not extrapolate",
            ours=f"the ratio of the losses is {_over_seeds(at)}",
            direction=higher([1.0] * len(at), at),
            note=f"at {beyond:,} parameters {shifted.at(beyond)} nats against {vanilla.at(beyond)}, of all runs by the "
            "bootstrap, if the power law holds so far",
            own=True,
        ),
    ]
    return [*claims, *map(_with_tokens, _by_size(records, longer=True))]


def _with_tokens(runs: _Runs) -> Claim:
    """Return the claim that the gain at the end is as large as after a third of the tokens."""
    gains = [[other - one for one, other in zip(*runs.losses(part), strict=True)] for part in (1 / 3, 1.0)]
    changes = [late - early for early, late in zip(*gains, strict=True)]
    names = ("the gain after all tokens", "that after a third")
    return Claim(
        statement=f"{runs.name}: the gain of KV-shift is no smaller than after a third of the tokens",
        paper="the difference does not decrease, from 10 to 30 billion tokens",
        ours=verdict(changes, names=names).text,
        direction=higher(gains[1], gains[0]),
        note=f"gains {', '.join(f'{gain:.4f}' for gain in gains[1])} against "
        f"{', '.join(f'{gain:.4f}' for gain in gains[0])}, by seed",
    )


def plot_curves(records: Sequence[Record]) -> Figure:
    """Plot the loss over steps, one panel for each size."""
    sizes = _by_size(records)
    figure, panels = new_figure([runs.name for runs in sizes], ylabels=[LOSS], sharey=True)
    for axes, runs in zip(panels, sizes, strict=True):
        _draw_runs(axes, runs)
    legend_below(figure, INTERVALS)
    return figure


def plot_scaling(records: Sequence[Record]) -> Figure:
    """Plot the power laws up to ten times the largest size, and the losses of the runs with three times the steps."""
    from matplotlib.ticker import ScalarFormatter

    (longer,) = _by_size(records, longer=True)
    titles = ["Loss by size; dotted: the largest trained", longer.name]
    figure, (left, right) = new_figure(titles, ylabels=[LOSS], height=3.6)
    sizes, colors = _by_size(records), colors_of(VARIANTS[variant].label for variant in SHIFTED_AND_VANILLA)
    first, last = sizes[0].size, 10 * sizes[-1].size
    grid = [first * (last / first) ** (step / 40) for step in range(41)]
    for number, (variant, fit) in enumerate(zip(SHIFTED_AND_VANILLA, _fits(records), strict=True)):
        label = VARIANTS[variant].label
        at = [fit.at(size) for size in grid]
        marker = marker_of(label, colors)
        left.plot(grid, [each.value for each in at], color=colors[label], marker=marker, markevery=[], label=label)
        low, high = [max(each.low, each.value / 2) for each in at], [min(each.high, each.value * 2) for each in at]
        left.fill_between(grid, low, high, color=colors[label], alpha=0.15)  # unclipped, 0 to infinity
        for runs in sizes:
            losses = runs.losses()[number]
            left.plot([runs.size] * len(losses), losses, marker, color=colors[label], markersize=3)
    left.axvline(sizes[-1].size, color="black", linestyle=":", linewidth=0.8)
    left.set(xscale="log", yscale="log", xlabel="parameters without embeddings")
    for which in (left.yaxis.set_major_formatter, left.yaxis.set_minor_formatter):
        which(ScalarFormatter())
    _draw_runs(right, longer)
    legend_below(figure, INTERVALS)
    return figure


def _draw_runs(axes: Axes, runs: _Runs) -> None:
    curves = {
        VARIANTS[variant].label: {seed: accuracy_curve(record, "loss") for seed, record in enumerate(found)}
        for variant, found in zip(SHIFTED_AND_VANILLA, (runs.shifted, runs.vanilla), strict=True)
    }
    draw_means(axes, curves)


def scaling_recipe(
    entry: Entry,
    source: str,
    claims: Callable[[Sequence[Record]], Sequence[Claim]],
    plot: Callable[[Sequence[Record]], Figure],
    *,
    longer: bool,
) -> Recipe:
    """Return the recipe of a figure of losses by size; with `longer`, one size is also trained three times as long."""
    return Recipe(
        entry=entry,
        source=source,
        arms=partial(_arms, longer=longer),
        plot=partial(_plot_without_diverged, plot),
        claims=partial(_unless_one_diverged, claims),
        notes=read_notes(Path(__file__).with_name("notes.md")),
    )
