"""When do models begin to copy on real text, and what does the shift gain before, at and after that point?

The preset `search` trains mostly two vanilla layers in many settings to find one in which they begin to copy at all; it
has found none. The other presets train one and two layers with and without the shift in the first of these settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from matplotlib.figure import Figure

from kvshift_lab.data.config import DataConfig
from kvshift_lab.recipes.phase import ENTRY, phase_search
from kvshift_lab.recipes.phase.changes import InductionOnset, mean_text, plot_changes
from kvshift_lab.recipes.phase.phase_search import Setting
from kvshift_lab.study.arm import Arm, layers_text, pair
from kvshift_lab.study.claims import Claim, Direction, higher, question
from kvshift_lab.study.jobs import TextJob, pairs_of_depths
from kvshift_lab.study.recipe import Recipe, Record, without_tuning_runs
from kvshift_lab.training.train_config import OptimizerConfig
from kvshift_lab.variants.by_name import with_variant
from kvshift_lab.variants.model_config import ModelConfig

FOUND_SETTING = Setting(64, 2, 4e-3, max_tokens=5_000_000)
LAPTOP = replace(FOUND_SETTING.config(eval_tokens=204_800), eval_rows=96)
PAPER = replace(
    LAPTOP,
    model=with_variant(ModelConfig(hidden_size=512, num_attention_heads=8), "vanilla"),
    data=replace(LAPTOP.data, vocab_size=8192),
    batch_size=32,
    steps=1200,
    eval_every=25,
)
SMOKE = replace(
    LAPTOP,
    model=with_variant(ModelConfig(hidden_size=16, num_attention_heads=2), "vanilla"),
    data=DataConfig(vocab_size=257, sequence_length=96),
    optimizer=OptimizerConfig(warmup_steps=1),
    steps=4,
    batch_size=2,
    eval_every=2,
    eval_rows=4,
    save_every=4,
    log_every=2,
)
CONFIGS = {"paper": PAPER, "laptop": LAPTOP, "smoke": SMOKE}
DEPTHS = (2, 1)


def arms(preset: str) -> list[TextJob]:
    """Return a job for each setting of the search, or for each depth with and without KV shift."""
    return phase_search.search_arms() if preset == "search" else pairs_of_depths(CONFIGS[preset], DEPTHS)


def _is_search(records: Sequence[Record]) -> bool:
    return any(record.arm.variant is None for record in records)


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims of the search, or those about when models begin to copy and the gain before and after that."""
    return phase_search.claims(records) if _is_search(records) else _claims(InductionOnset(records))


def _claims(changes: InductionOnset) -> list[Claim]:
    found = [changes.sooner_claim(*pair(layers=layers)) for layers in changes.depths]
    one_for_two = (
        Arm(variant="kv-shift", layers=changes.depths[0]),
        Arm(variant="vanilla", layers=changes.depths[-1]),
    )
    if len(changes.depths) > 1:
        found.append(changes.sooner_claim(*one_for_two))
    for layers in changes.depths:
        found += [changes.gain_claim(layers, name, steps) for name, steps in changes.moments(layers).items()]
        found += [_survives(changes, layers), *changes.gain_location_claims(layers)]
    if len(changes.depths) > 1:
        found.append(changes.lower_at_end_claim(*one_for_two))
    return found


def _survives(changes: InductionOnset, layers: int) -> Claim:
    """Return the recipe's main question; it is "not shown" unless vanilla begins to copy in all seeds."""
    theirs = changes.steps_to_change(Arm(variant="vanilla", layers=layers))
    last_steps = changes.last_steps(layers)
    gains = changes.gains(layers, "loss", last_steps)
    decided: Direction = "not shown" if theirs.missing else higher(gains, [0.0] * len(gains))
    but = f"; {theirs.text.replace('%', '% prefix matching', 1)}" if theirs.missing else ""
    return question(
        statement=f"{layers_text(layers)}: the gain survives plain attention's own change",
        ours=f"gain at the end {mean_text(gains)}{but}",
        direction=decided,
        note="decided where vanilla changes in every seed, by the loss after the last step",
    )


def plot(records: Sequence[Record]) -> Figure:
    """Plot the highest prefix matching of each setting of the search, or prefix matching and losses over tokens."""
    return phase_search.plot(records) if _is_search(records) else plot_changes(records)


def tables(records: Sequence[Record]) -> str:
    """Return the table of all settings of the search, or of the gains by kind of target at each moment."""
    shown = without_tuning_runs(records)
    return phase_search.table(shown) if _is_search(shown) else InductionOnset(shown).table()


RECIPE = Recipe(
    entry=ENTRY,
    source="No figure of the paper: its models are long past the point where attention begins to copy",
    arms=arms,
    plot=plot,
    claims=claims,
    tables=tables,
)
