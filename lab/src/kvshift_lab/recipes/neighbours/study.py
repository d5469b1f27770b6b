"""Are four numbers per head enough? KV shift against related methods of production models, at equal parameter count."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from kvshift_lab.recipes.language_models.lm_figures import plot_differences
from kvshift_lab.recipes.language_models.settings import NOTES, TABLES, Setting, arms_of, lower_loss_claims
from kvshift_lab.recipes.neighbours import ENTRY
from kvshift_lab.study.claims import Claim
from kvshift_lab.study.jobs import StudyJob
from kvshift_lab.study.recipe import Recipe, Record
from kvshift_lab.variants.building import llama_config
from kvshift_lab.variants.by_name import find_variant, with_variant
from kvshift_lab.variants.model_config import ModelConfig

NEIGHBOURS = ("canon", "fox-shift")
_TOKENS = 512  # vocabulary for counting parameters where the size sets none; it cancels out of the difference


def _setting(preset: str) -> Setting:
    """Return the tables' setting at the paper's context length 512 (divided by `scale`); smoke keeps all points."""
    setting = TABLES[preset]
    if preset == "smoke":
        return setting
    return replace(setting, points=[point for point in setting.points if point.length * setting.scale == 512])


def arms(preset: str) -> list[StudyJob]:
    """Return jobs of KV shift, vanilla and the neighbours, whose MLPs are narrowed to equal KV shift's parameters."""
    setting = _setting(preset)
    return [
        *arms_of(setting, ["kv-shift", "vanilla"]),
        *(
            replace(
                job,
                config=replace(job.config, model=_narrower(job.config.model, variant, job.config.data.sequence_length)),
            )
            for variant in NEIGHBOURS
            for job in arms_of(setting, [variant])
        ),
    ]


@cache
def _narrower(model: ModelConfig, variant: str, length: int) -> ModelConfig:
    """Return the model with as many parameters as KV shift has, to within half a unit of each layer's MLP."""
    size = llama_config(with_variant(model, "kv-shift"), vocab_size=_TOKENS, sequence_length=length)
    plain = llama_config(with_variant(model, "vanilla"), vocab_size=_TOKENS, sequence_length=length)
    more = find_variant(variant).added_parameters(plain) - find_variant("kv-shift").added_parameters(size)
    unit = 3 * size.hidden_size * size.num_hidden_layers + size.num_hidden_layers * 2 * bool(size.mlp_bias)
    return replace(model, intermediate_size=size.intermediate_size - round(more / unit))


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return the claims that KV shift has a lower loss than each neighbour, and each of them than vanilla."""
    pairs = [("kv-shift", other) for other in (*NEIGHBOURS, "vanilla")]
    pairs += [(other, "vanilla") for other in NEIGHBOURS]
    return lower_loss_claims(records, pairs, lambda *_: "not asked", own=True)


RECIPE = Recipe(
    entry=ENTRY,
    source="No figure of the paper: whether four numbers per head are enough is ours to ask",
    arms=arms,
    plot=lambda records: plot_differences(("kv-shift", *NEIGHBOURS, "vanilla"), records),
    claims=claims,
    notes=NOTES,
)
