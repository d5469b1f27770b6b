"""MQAR, multi-query associative recall: key-value pairs, then each key again, whose value is the answer.

Source: Arora et al., "Zoology" (2023), Figure 2 and the data in its code; the paper mentions MQAR beside induction.
A sequence with length 16, pairs 3 and vocab_size 20 (keys 1 ... 9, values 10 ... 19):

    input_ids    9 17  1 13  3 11  3  0  9  0  0  0  1  0  0  0
    labels       -  -  -  -  -  -  - 11  - 17  -  -  - 13  -  -
    slices       .  .  .  .  .  .  .  0  .  0  .  .  .  0  .  .      0 queries

Shapes: B sequences, T positions in a sequence, P pairs, S slots for queries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kvshift_lab.core.errors import require
from kvshift_lab.tasks.batch import IGNORED, Batch
from kvshift_lab.tasks.option_checks import check_at_least, check_batch_size, check_choices
from kvshift_lab.tasks.sampling import distinct_rows

FILLER = 0


@dataclass(frozen=True, kw_only=True)
class MQARConfig:
    """Options of MQAR. Figure 2 of Zoology uses (length, pairs) = (64, 4), (128, 8) and (256, 16)."""

    length: int = 64
    """Tokens per sequence, T: an even number, at least 4 times `pairs`."""
    pairs: int = 4
    """Number of key-value pairs, P; each key is queried once."""
    vocab_size: int = 8192
    """Vocabulary size. Keys are 1 ... vocab_size // 2 - 1, values are vocab_size // 2 ... vocab_size - 1."""
    power: float = 0.01
    """Exponent of the slot weights: slot g = 0, 1, ... is drawn with weight (g + 1)^(power - 1). 1 is uniform, and
    smaller values prefer early slots."""
    filler: Literal["zero", "random"] = "zero"
    """Tokens between queries: id 0 (as in Figure 2), or random tokens of the vocabulary."""

    def __post_init__(self) -> None:
        check_choices("mqar", self)
        check_at_least("mqar", self, pairs=1)
        room = self.length % 2 == 0 and self.length >= 4 * self.pairs
        least = f"even and at least 4 * pairs = {4 * self.pairs} (two tokens for each pair and two for its slot)"
        require(room, "mqar.length", self.length, least)
        least = f"{2 * self.pairs + 2} or more for {self.pairs} pairs"
        require(self.vocab_size // 2 - 1 >= self.pairs, "mqar.vocab_size", self.vocab_size, least)


class MQARTask:
    """Recall the values of keys.

    Columns 0 ... 2P - 1 contain the pairs k_1 v_1 ... k_P v_P. Slots of two columns follow; slot g starts at 2P + 2g.
    Keys and values are drawn without replacement. Each key is at the start of a slot, which is drawn without
    replacement by the weights; its value is the label of the next column, which contains filler. There are no other
    labels.

    Slice: "queries". Chance: the guesser names one of the values in the sequence, 1 / P.
    """

    slice_names = ("queries",)

    def __init__(self, config: MQARConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.length = config.length
        self.chance = {"queries": 1 / config.pairs}

    def batch(self, generator: torch.Generator, batch_size: int) -> Batch:
        """Draw the next `batch_size` sequences; see `Task.batch`."""
        check_batch_size(batch_size)
        config = self.config
        half = config.vocab_size // 2
        keys_BP = 1 + torch.from_numpy(distinct_rows(batch_size, config.pairs, half - 1, generator))
        values_BP = half + torch.from_numpy(
            distinct_rows(batch_size, config.pairs, config.vocab_size - half, generator)
        )
        slots = config.length // 2 - config.pairs
        weight_S = torch.arange(1, slots + 1, dtype=torch.float64) ** (config.power - 1)
        # The first of several exponential clocks with rates `weight` is g with probability weight_g / sum(weight), and
        # likewise among the remaining ones. The P earliest are thus P draws without replacement, in the order drawn.
        rings_BS = torch.empty(batch_size, slots, dtype=torch.float64).exponential_(generator=generator) / weight_S
        slots_BP = rings_BS.topk(config.pairs, largest=False, sorted=True).indices
        query_BP = 2 * config.pairs + 2 * slots_BP

        shape = (batch_size, config.length)
        if config.filler == "zero":
            input_ids = torch.full(shape, FILLER)
        else:
            input_ids = torch.randint(config.vocab_size, shape, generator=generator)
        input_ids[:, 0 : 2 * config.pairs : 2] = keys_BP
        input_ids[:, 1 : 2 * config.pairs : 2] = values_BP
        input_ids.scatter_(1, query_BP, keys_BP)
        labels = torch.full(shape, IGNORED).scatter_(1, query_BP + 1, values_BP)
        slices = torch.full(shape, -1).scatter_(1, query_BP + 1, 0)
        return Batch(input_ids, labels, slices)
