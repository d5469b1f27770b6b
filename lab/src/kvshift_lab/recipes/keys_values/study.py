"""Is it the shift of keys or that of values by which models begin to copy on real text?

In the paper's construction, a head copies by shifted keys alone: the key of a token holds what came before it. Models
with two layers that shift both, keys alone, or values alone are trained in the setting of `decide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvshift_lab.recipes.decide import study as decide
from kvshift_lab.recipes.decide.onset import InductionOnset, plot_onset
from kvshift_lab.recipes.keys_values import ENTRY
from kvshift_lab.run.train_config import TrainConfig
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.jobs import TextJob
from kvshift_lab.study.recipe import Recipe, Record
from kvshift_lab.variants.by_name import with_variant

LAYERS = 2
ARMS = [Arm(variant=variant, layers=LAYERS) for variant in ("kv-shift", "k-shift", "v-shift")]
BOTH, KEYS, VALUES = ARMS
_STEPS = {"laptop": 3_200_000 // (decide.LAPTOP.batch_size * decide.LAPTOP.data.sequence_length), "smoke": 4}


def setting(preset: str) -> TrainConfig:
    """Return the options of a preset, without the variant."""
    config = decide.setting(preset)
    return replace(
        config,
        model=replace(config.model, num_hidden_layers=LAYERS),
        optimizer=replace(config.optimizer, schedule="constant"),
        steps=_STEPS.get(preset, 2000),
    )


def arms(preset: str) -> list[TextJob]:
    """Return a job for each arm."""
    config = setting(preset)
    return [
        TextJob(arm=arm, config=replace(config, model=with_variant(config.model, str(arm.variant)))) for arm in ARMS
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return which of two arms begins to copy sooner, and which has the lower loss at the end, for each two arms."""
    onset = InductionOnset(records)
    pairs = ((KEYS, VALUES), (BOTH, KEYS), (BOTH, VALUES))
    return [
        *(onset.sooner_claim(ours, theirs) for ours, theirs in pairs),
        *(onset.lower_at_end_claim(ours, theirs) for ours, theirs in pairs),
    ]


RECIPE = Recipe(
    entry=ENTRY,
    source="No figure of the paper; its construction of an induction head shifts keys alone",
    arms=arms,
    plot=partial(plot_onset, ARMS),
    claims=claims,
)
