"""What the recipe `retrofit` measures of a model: its loss on texts that it was not trained on, and how it copies."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, cast

import datasets
import torch

from kvshift.lab.data.config import DataConfig
from kvshift.lab.data.packing import collate, pack_documents
from kvshift.lab.data.sources import load_documents
from kvshift.lab.training.head_scores import measure_heads
from kvshift.lab.training.repeat_config import RepeatConfig
from kvshift.lab.training.trainer import sequence_losses

Texts = dict[str, list[float]]  # by the name of a text, the mean loss of each of its sequences, in nats per token

_BEST_HEADS = 5


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """On what a model is measured.

    Attributes:
        texts: a name and a file or bundled corpus each, the first of the kind that is trained on.
        sequences: of each text, at equal distances.
        begin: sequences at the beginning of each text that are left out: on those of the first, learning rates were
            chosen.
        sequence_length: tokens of each.
        repeated: random sequences of 64 tokens, or fewer, that come twice; see `kvshift.lab.training.head_scores`.
        batch_size: sequences at once.
    """

    texts: tuple[tuple[str, str], ...]
    sequences: int
    begin: int
    sequence_length: int = 256
    repeated: int = 16
    batch_size: int = 8


@torch.no_grad()
def measure(model: Any, tokenizer: Any, config: HeldOut) -> dict[str, Any]:
    """ "losses" as in `Texts`; "repeated": loss and accuracy in the second half of repeated sequences; "induction": the
    mean score of the best five induction heads, "best_heads": which they are, as [layer, head].
    """
    model.eval()
    losses = {name: _losses(model, tokenizer, text, config) for name, text in config.texts}
    model.set_attn_implementation("eager")  # which alone gives probabilities
    found = measure_heads(model, RepeatConfig(rows=config.repeated, batch_size=config.batch_size))
    best = sorted(found.heads, key=lambda head: -head.scores["induction"])[:_BEST_HEADS]
    return {
        "losses": losses,
        "repeated": dict(found.behaviour["second"]),
        "induction": statistics.fmean(head.scores["induction"] for head in best),
        "best_heads": [[head.layer, head.head] for head in best],
    }


def _losses(model: Any, tokenizer: Any, text: str, config: HeldOut) -> list[float]:
    before, documents = load_documents(DataConfig(corpus=text))
    if "/" in text:  # a file of its own; of a bundled corpus, all but the end is trained on
        documents = datasets.concatenate_datasets([cast(datasets.Dataset, before), documents])
    rows = pack_documents(documents, tokenizer, config.sequence_length, "concat")
    count = min(config.sequences, len(rows) - config.begin)
    chosen = [config.begin + number * (len(rows) - config.begin) // count for number in range(count)]
    found: list[float] = []
    for start in range(0, count, config.batch_size):
        batch = collate([rows[at] for at in chosen[start : start + config.batch_size]])
        batch = {name: tensor.to(model.device) for name, tensor in batch.items()}
        labels = batch.pop("labels")
        sums, tokens = sequence_losses(model(**batch, use_cache=False).logits, labels)
        found += (sums / tokens).tolist()
    return found
