"""Do language models with KV shift repeat themselves less often in what they generate?

Models with two layers, without and with the shift, are trained in the setting of `decide` and continue prompts from the
validation text. Three measures count repetition in the continuations; they are also given for the text itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from transformers import GenerationConfig

from kvshift_lab.analysis.accuracy import draw_chance, draw_groups
from kvshift_lab.analysis.panels import INTERVALS, legend_below, new_figure
from kvshift_lab.data.text import load_text_data
from kvshift_lab.recipes.keys_values import study as keys_values
from kvshift_lab.recipes.repetition import ENTRY
from kvshift_lab.run.folder import RunFolder
from kvshift_lab.study.arm import Arm, pair
from kvshift_lab.study.claims import Claim, lower, percent, points, question
from kvshift_lab.study.jobs import MeasuredJob, TextJob
from kvshift_lab.study.recipe import Recipe, Record, by_arm
from kvshift_lab.variants.by_name import SHIFTED_AND_VANILLA, with_variant
from kvshift_lab.variants.continuing import continue_rows

PROMPT, CONTINUATION = 32, 96  # tokens
_LOOP = 3  # times

DECODINGS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
}
MEASURES = {
    "repeated": "share of 4-grams that occurred before",
    "loops": "share of continuations that end in a loop",
    "distinct": "distinct 2-grams per token",
}


def repeated_share(tokens: Sequence[int], n: int = 4) -> float:
    """Return the share of a text's n-grams that repeat an earlier one: rep-n, or seq-rep-n.

        rep-n = 1 - |distinct n-grams| / |n-grams|

    Source: Welleck et al. 2020, Neural text generation with unlikelihood training, who report n = 4.
    """
    grams = _grams(tokens, n)
    return 1 - len(set(grams)) / len(grams)


def ends_in_loop(tokens: Sequence[int]) -> bool:
    """Return True if a text ends in a phrase of at least two tokens, three times in a row.

    A single token six times in a row is such a phrase. Source: Holtzman et al. 2020, The curious case of neural text
    degeneration.
    """
    tokens = list(tokens)
    ends = (tokens[-_LOOP * length :] for length in range(2, len(tokens) // _LOOP + 1))
    return any(end == end[: len(end) // _LOOP] * _LOOP for end in ends)


def distinct_share(texts: Sequence[Sequence[int]], n: int = 2) -> float:
    """Return the number of distinct n-grams of all texts per token: distinct-n.

    It falls with the number of texts and with their length, so that only equal numbers and lengths can be compared.
    Source: Li et al. 2016, A diversity-promoting objective function for neural conversation models.
    """
    return len({gram for tokens in texts for gram in _grams(tokens, n)}) / sum(map(len, texts))


def _grams(tokens: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return list(zip(*(tokens[start:] for start in range(n)), strict=False))


def measures(texts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return `MEASURES` of texts of equal length, each a mean over the texts or a number of all."""
    return {
        "repeated": statistics.fmean(map(repeated_share, texts)),
        "loops": statistics.fmean(map(ends_in_loop, texts)),
        "distinct": distinct_share(texts),
    }


@dataclass(frozen=True, kw_only=True)
class ContinuationJob(MeasuredJob, TextJob):
    """Train one model and let it continue the beginnings of the rows of its evaluation."""

    result_name = "repetition"

    def measure(self, model: Any, out: Path) -> dict[str, Any]:
        """Return `MEASURES` of the text that follows the prompts, and of continuations of the same length."""
        config = self._with_local_paths()
        text = load_text_data(config.data, seed=config.seed, tokenizer_folder=RunFolder(out).tokenizer)
        rows = torch.as_tensor(text.validation[: config.eval_rows]["input_ids"])[:, : PROMPT + CONTINUATION]
        prompts, following = rows.split([PROMPT, rows.shape[1] - PROMPT], dim=1)
        found = {"text": measures(following.tolist())}
        for name, decoding in DECODINGS.items():
            length = {"min_new_tokens": following.shape[1], "max_new_tokens": following.shape[1]}
            settings = GenerationConfig(**decoding, **length, pad_token_id=0)
            found[name] = measures(continue_rows(model, list(prompts), settings, seed=self.seed).tolist())
        return found


def arms(preset: str) -> list[ContinuationJob]:
    """Return a job for both models."""
    config = keys_values.setting(preset)
    config = replace(config, optimizer=replace(config.optimizer, schedule="wsd"))
    return [
        ContinuationJob(
            arm=Arm(variant=variant, layers=keys_values.LAYERS),
            config=replace(config, model=with_variant(config.model, variant)),
        )
        for variant in SHIFTED_AND_VANILLA
    ]


def claims(records: Sequence[Record]) -> list[Claim]:
    """Return, for each decoding, whether models with the shift repeat 4-grams and end in loops less often."""
    runs = [list(by_arm(records)[arm].values()) for arm in pair(layers=keys_values.LAYERS)]
    found = []
    for decoding in DECODINGS:
        for measure in ("repeated", "loops"):
            shifted, vanilla = ([_value(record, decoding, measure) for record in of_model] for of_model in runs)
            found.append(
                question(
                    statement=f"Continuations, {decoding}: a smaller {MEASURES[measure]} with KV shift",
                    ours=f"{percent(shifted)} against {percent(vanilla)}: {points(shifted, vanilla)}",
                    direction=lower(shifted, vanilla),
                    note=f"in the text itself {percent([_value(record, 'text', measure) for record in runs[0]])}",
                )
            )
    return found


def _value(record: Record, of: str, measure: str) -> float:
    return record.result[ContinuationJob.result_name][of][measure]


def plot(records: Sequence[Record]) -> Figure:
    """Plot each measure by decoding: a dot for each seed, the mean and its interval, and the value of the text."""
    figure, panels = new_figure(
        ["Repeated 4-grams", "Loops", "Distinct 2-grams"], ylabels=list(MEASURES.values()), height=3.4
    )
    for axes, measure in zip(panels, MEASURES, strict=True):
        values = {
            arm.label: [[_value(record, decoding, measure) for record in seeds.values()] for decoding in DECODINGS]
            for arm, seeds in by_arm(records).items()
        }
        draw_groups(axes, list(DECODINGS), values, interval=True)
        draw_chance(axes, _value(records[0], "text", measure), "the text itself")
    legend_below(figure, INTERVALS)
    return figure


RECIPE = Recipe(
    entry=ENTRY,
    source="No figure of the paper; whether heads that copy make models repeat themselves",
    arms=arms,
    plot=plot,
    claims=claims,
)
