"""The measurements of the recipe `retrofit`: a model's loss on held-out texts, and how well it copies."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any, cast

import datasets
import torch

from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.packing import collate, pack_documents
from kvshift_lab.data.sources import load_documents
from kvshift_lab.training.head_scores import measure_heads
from kvshift_lab.training.repeat_config import RepeatConfig
from kvshift_lab.training.trainer import sequence_losses

Texts = dict[str, list[float]]  # mean loss of each sequence in nats per token, by name of the text

_BEST_HEADS = 5


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The data on which a model is measured.

    Attributes:
        texts: name and file (or bundled corpus) of each text; the first is of the kind that is trained on.
        sequences: number of sequences of each text, evenly spaced.
        begin: number of sequences to skip at the beginning of each text: those of the first text were used to choose
            learning rates.
        sequence_length: tokens per sequence.
        repeated: number of random sequences of up to 64 tokens, each repeated once; see
            `kvshift_lab.training.head_scores`.
        batch_size: sequences per batch.
    """

    texts: tuple[tuple[str, str], ...]
    sequences: int
    begin: int
    sequence_length: int = 256
    repeated: int = 16
    batch_size: int = 8


@torch.no_grad()
def measure(model: Any, tokenizer: Any, config: HeldOut) -> dict[str, Any]:
    """Measure a model.

    Returns:
        "losses": as in `Texts`; "repeated": loss and accuracy in the second half of repeated sequences; "induction":
        mean score of the five best induction heads; "best_heads": these heads, as [layer, head].
    """
    model.eval()
    losses = {name: _losses(model, tokenizer, text, config) for name, text in config.texts}
    model.set_attn_implementation("eager")  # the only implementation that returns attention weights
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
    if "/" in text:  # a file is held out as a whole; of a bundled corpus, only the validation part at its end is
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
