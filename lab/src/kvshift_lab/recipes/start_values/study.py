"""Do the start values of the coefficients decide how soon models begin to copy?

Section 3.2 of the paper says that heads whose (alpha_1, beta_1) start closer to (0, 1) learn to be induction heads much
more easily. Models with two layers start from the paper's uniform values, from the identity, or near (0, 1), in the
setting of `keys_values`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvshift_lab.recipes.decide.onset import InductionOnset, plot_onset
from kvshift_lab.recipes.keys_values import study as keys_values
from kvshift_lab.recipes.start_values import ENTRY
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.jobs import TextJob
from kvshift_lab.study.recipe import Recipe, Record
from kvshift_lab.variants.by_name import with_variant

RATE = 8e-3
"""The best rate of KV shift in `keys_values`, for all three."""
UNIFORM, IDENTITY = (
    Arm(variant="kv-shift", layers=keys_values.LAYERS, case=f"{start} start") for start in ("uniform", "identity")
)
INDUCTION = Arm(variant="kv-shift-induction-start", layers=keys_values.LAYERS)
ARMS = [UNIFORM, IDENTITY, INDUCTION]


def arms(preset: str) -> list[TextJob]:
    """Return a job for each arm."""
    return [_job(preset, arm) for arm in ARMS]


def _job(preset: str, arm: Arm) -> TextJob:
    config = keys_values.setting(preset)
    model = with_variant(config.model, str(arm.variant))
    if arm == IDENTITY:
        model = replace(model, shift_init="identity")
    return TextJob(arm=arm, config=replace(config, model=model)).at_rate(RATE)


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return which of two starts copies sooner, and which has the lower loss at the end, for each two of the three."""
    onset = InductionOnset(records)
    pairs = ((INDUCTION, UNIFORM), (UNIFORM, IDENTITY), (INDUCTION, IDENTITY))
    easier = onset.sooner_claim(*pairs[0])
    return [
        replace(easier, paper="heads closer to (0, 1) learn to be induction heads much more easily", own=False),
        *(onset.sooner_claim(ours, theirs) for ours, theirs in pairs[1:]),
        *(onset.lower_at_end_claim(ours, theirs) for ours, theirs in pairs),
    ]


RECIPE = Recipe(
    entry=ENTRY,
    source="Section 3.2, which has no figure of this",
    arms=arms,
    plot=partial(plot_onset, ARMS),
    claims=claims,
)
