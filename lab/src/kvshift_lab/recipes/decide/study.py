"""Does KV shift lower the loss on real text, at 2, 4 and 8 layers? Claims and margin precede all runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from kvshift_lab.analysis.panels import INTERVALS, TWO_SEEDS, legend_below, new_figure
from kvshift_lab.core.statistics import difference_interval
from kvshift_lab.data.config import DataConfig
from kvshift_lab.recipes.decide import ENTRY
from kvshift_lab.recipes.decide.onset import (
    BASE,
    KIND_NAMES,
    InductionOnset,
    draw_copying_level,
    draw_onset,
    mean_text,
)
from kvshift_lab.recipes.tab05.study import PAPER as PAPER_HEADS
from kvshift_lab.recipes.tab05.study import PAPER_SHARE, share_on_diagonal
from kvshift_lab.run.probes import KINDS
from kvshift_lab.run.train_config import OptimizerConfig, TrainConfig
from kvshift_lab.study.arm import layers_text, pair
from kvshift_lab.study.claims import Claim, Direction, higher, lower_loss, percent, question
from kvshift_lab.study.jobs import TextJob, pairs_of_depths
from kvshift_lab.study.recipe import Recipe, Record, last_loss, without_tuning_runs
from kvshift_lab.variants.model_config import ModelConfig

MARGIN = 0.01
"""Smallest useful gain, in nats per token. The gains in the paper's tables are 0.01 to 0.03."""

_STEP = 4096  # tokens
LAPTOP = replace(
    BASE,
    model=ModelConfig(hidden_size=64, num_attention_heads=4, qk_norm=True),
    optimizer=OptimizerConfig(schedule="wsd", warmup_steps=100, decay_fraction=0.2, weight_decay=0.0, clip_norm=1.0),
    batch_size=_STEP // BASE.data.sequence_length,
    eval_every=100,
    eval_rows=384,
    save_every=500,
    bf16="no",  # also on a GPU
)
_TOKENS = {8: 6_500_000, 4: 12_000_000, 2: 12_000_000}
"""Training tokens by number of layers, the longest run first."""

PAPER = replace(
    LAPTOP,
    model=replace(LAPTOP.model, hidden_size=512, num_attention_heads=8),
    data=replace(LAPTOP.data, vocab_size=8192),
    batch_size=32,
)
SMOKE = replace(
    LAPTOP,
    model=replace(LAPTOP.model, hidden_size=16, num_attention_heads=2),
    data=DataConfig(vocab_size=257, sequence_length=96),
    optimizer=replace(LAPTOP.optimizer, warmup_steps=1),
    batch_size=2,
    eval_every=2,
    eval_rows=4,
    save_every=4,
    log_every=2,
)
_PILOT_RATE = 4e-3  # the middle of the grid


def setting(preset: str) -> TrainConfig:
    """Return the options that the runs of a preset share, here and in the recipes that have the setting of this one."""
    return {"paper": PAPER, "smoke": SMOKE}.get(preset, LAPTOP)


def _config(preset: str, layers: int) -> TrainConfig:
    config = setting(preset)
    tokens = config.batch_size * config.data.sequence_length
    steps = 4 if preset == "smoke" else _TOKENS[layers] // tokens
    if preset == "pilot":
        config = replace(config, optimizer=replace(config.optimizer, learning_rate=_PILOT_RATE))
    return replace(config, steps=steps)


def arms(preset: str) -> list[TextJob]:
    """Return a job for each depth, with and without KV shift."""
    depths = (2, 1) if preset == "smoke" else tuple(_TOKENS)
    return [job for layers in depths for job in pairs_of_depths(_config(preset, layers), [layers])]


def at_least(gains: Sequence[float], margin: float) -> Direction:
    """Return "holds" if the 95 % interval of the gains lies at or above `margin`, "fails" if wholly below it."""
    interval = difference_interval(gains)
    if interval is None:
        return "not shown"
    return "holds" if interval[0] >= margin else "fails" if interval[1] < margin else "not shown"


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the deciding claim (mean over depths by seed), then claims by depth, on copying, and by kind of target.

    The pilot decides no claim: its runs determined the number of seeds.
    """
    if all(record.seed >= ENTRY.presets["pilot"].first_seed for record in records):
        return []
    onset = InductionOnset(records)
    at_end = {layers: onset.gains(layers, "loss", onset.last_steps(layers)) for layers in onset.depths}
    mean = [statistics.fmean(of_seed) for of_seed in zip(*at_end.values(), strict=True)]
    depths = ", ".join(map(str, onset.depths))
    found = _lower(f"Mean over {depths} layers", mean, "the claim that decides; a mean over depths for each seed")
    for layers, gains in at_end.items():
        losses = [statistics.fmean(map(last_loss, onset.models[arm].values())) for arm in pair(layers=layers)]
        found += _lower(layers_text(layers), gains, f"nats per token: {losses[0]:.4f} against {losses[1]:.4f}")
    found += [onset.sooner_claim(*pair(layers=layers)) for layers in onset.depths]
    for layers in onset.depths:
        found += onset.gain_location_claims(layers)
        found += [_kind(onset, layers, kind) for kind in KINDS]
    return [*found, *(_same_side(onset, layers) for layers in onset.depths)]


def _lower(where: str, gains: Sequence[float], note: str) -> list[Claim]:
    """Return the claims that there is a gain, and that it is at least `MARGIN`."""
    lower = lower_loss(
        f"{where}: KV shift has a lower loss",
        [-gain for gain in gains],
        [0.0] * len(gains),
        paper="lower at every size and in most cells of its tables, by 0.01 to 0.03 nats",
        note=note,
    )
    enough = question(
        statement=f"{where}: the loss is lower by {MARGIN:g} nats per token or more",
        ours=lower.ours,
        direction=at_least(gains, MARGIN),
        note="the margin was written down before the runs",
    )
    return [lower, enough]


def _kind(onset: InductionOnset, layers: int, kind: str) -> Claim:
    gains = onset.gains(layers, f"loss_{kind}", onset.last_steps(layers))
    return question(
        statement=f"{layers_text(layers)}, at the end, {KIND_NAMES[kind]}: KV shift has a lower loss",
        ours=f"gain {mean_text(gains)}",
        direction=higher(gains, [0.0] * len(gains)),
        note="nats per token; positions from 64 on",
    )


def _same_side(onset: InductionOnset, layers: int) -> Claim:
    """Return the claim that the models with KV shift, all of which copy, share what Table 5 counts."""
    shares = [share_on_diagonal(run.result["coefficients"]) for run in onset.models[pair(layers=layers)[0]].values()]
    where = f"{layers_text(layers)}, at the end"
    return Claim(
        statement=f"{where}: alpha1 > alpha2 exactly when beta1 > beta2 in as many KV heads as in Table 5",
        paper=PAPER_HEADS,
        ours=percent(shares),
        direction=higher(shares, [PAPER_SHARE] * len(shares)),
        note="half is expected at the start, where they are independent; this claim was added after the runs",
    )


def plot(records: Sequence[Record]) -> Figure:
    """Plot prefix matching and the losses by kind of target over tokens, in a row for each depth.

    All panels of prefix matching have one vertical axis, and so have all panels of losses.
    """
    onset = InductionOnset(records)
    names = {
        "prefix_matching": "Prefix matching",
        "loss_pair_seen": "Loss, pair seen before",
        "loss_token_seen": "Loss, first token seen",
        "loss_neither": "Loss, first token new",
    }
    titles = [*names.values(), *[""] * (len(names) * (len(onset.depths) - 1))]
    labels = [
        label
        for layers in onset.depths
        for label in (f"{layers_text(layers)}\nprefix matching", "nats per token", "", "")
    ]
    figure, panels = new_figure(titles, ylabels=labels, columns=len(names), height=2.1)
    for row, layers in enumerate(onset.depths):
        shifted, vanilla = pair(layers=layers)
        for column, name in enumerate(names):
            axes = panels[row * len(names) + column]
            if row > 0 or column > 1:
                axes.sharey(panels[min(column, 1)])
            draw_onset(axes, onset, {shifted: "KV-shift", vanilla: "vanilla"}, name)
            if layers != onset.depths[-1]:
                axes.set_xlabel("")
    for axes in panels[:: len(names)]:
        draw_copying_level(axes)
    seeds = len({record.seed for record in records})
    legend_below(figure, f"{TWO_SEEDS if seeds == 2 else INTERVALS}; losses of positions from 64 on")
    return figure


RECIPE = Recipe(
    entry=ENTRY,
    source="The paper's main claim, a lower loss on text, in miniature; claims and margin are older than all runs",
    arms=arms,
    plot=plot,
    claims=claims,
    tables=lambda records: InductionOnset(without_tuning_runs(records)).table(),
)
