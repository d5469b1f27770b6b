"""3-gram: memorize a fixed table of pairs of tokens, each with its next token.

Source: the paper's Figure 9. The table is drawn once, so the answer is not in the sequence. The task is the control
in which induction should not help. A sequence of three tokens, and a packed one of nine:

    input_ids    8  1 18
    labels       -  - 18
    slices       .  .  0

    input_ids    5  1  5  2  0  2  5  1  5
    labels       -  -  5  -  -  2  -  -  5
    slices       .  .  0  .  .  0  .  .  1      0 new, 1 repeated

Shapes: B sequences, T positions in a sequence, N pairs in the table, P pairs in a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvshift_lab.core.errors import require
from kvshift_lab.core.seeds import generator_for
from kvshift_lab.tasks.batch import IGNORED, Batch
from kvshift_lab.tasks.option_checks import check_at_least, check_batch_size


@dataclass(frozen=True, kw_only=True)
class NGramConfig:
    """Options of the table and of the sequences drawn from it."""

    vocab_size: int = 32
    """Vocabulary size; it is small, so that neither x1 nor x2 alone determines x3."""
    pairs: int = 200
    """Number of pairs drawn for the table. Duplicates are removed, so the table may have fewer."""
    table_seed: int = 0
    """Random seed of the table, independent of the seed of the sequences. Another seed is another task."""
    length: int = 3
    """Tokens per sequence, a multiple of 3. Longer sequences are packed with several triples, some of which may be
    repeated, so that copying helps in addition to memory. (The longest below 512 is 510.)"""

    def __post_init__(self) -> None:
        check_at_least("ngram", self, vocab_size=2, pairs=1, length=3)
        require(self.length % 3 == 0, "ngram.length", self.length, "a multiple of 3")


class NGramTask:
    """Predict x3 in triples x1 x2 x3 with (x1, x2) uniform over the pairs of the table and x3 = table(x1, x2).

    Only x3 has a label. Training and evaluation share the table, because the task measures memory; `whole_table` is
    the evaluation set. Packed sequences of the two splits do differ.

    Slices: "new" contains the labels of pairs that occur for the first time in their sequence (all labels if sequences
    are not packed); "repeated" contains the others.

    Chance, for new: the guesser always names the most frequent x3.

    Attributes:
        pairs: (N, 2) int64, the sorted, distinct pairs of the table.
        targets: (N,) int64, x3 of each pair.
    """

    slice_names = ("new", "repeated")

    def __init__(self, config: NGramConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.length = config.length
        generator = generator_for("3-gram table", config.table_seed)
        drawn = torch.randint(config.vocab_size, (config.pairs, 2), generator=generator)
        self.pairs = drawn.unique(dim=0)
        self.targets = torch.randint(config.vocab_size, (len(self.pairs),), generator=generator)
        self.chance = {"new": int(self.targets.bincount().max()) / len(self.targets)}

    def batch(self, generator: torch.Generator, batch_size: int) -> Batch:
        """Draw the next `batch_size` sequences; see `Task.batch`."""
        check_batch_size(batch_size)
        return self._rows(torch.randint(len(self.pairs), (batch_size, self.length // 3), generator=generator))

    def whole_table(self) -> Batch:
        """Return each pair of the table once, in sequences of three tokens: (N, 3)."""
        return self._rows(torch.arange(len(self.pairs)).unsqueeze(1))

    def _rows(self, index_BP: Tensor) -> Batch:
        rows, triples = index_BP.shape
        input_ids = torch.cat([self.pairs[index_BP], self.targets[index_BP].unsqueeze(-1)], dim=-1)
        labels = torch.full_like(input_ids, IGNORED)
        labels[:, :, 2] = input_ids[:, :, 2]
        order_BP = torch.arange(triples).expand_as(index_BP)
        first_BN = torch.full((rows, len(self.pairs)), triples).scatter_reduce(1, index_BP, order_BP, "amin")
        slices = torch.full_like(input_ids, -1)
        slices[:, :, 2] = (first_BN.gather(1, index_BP) < order_BP).long()
        return Batch(*(tensor.reshape(rows, 3 * triples) for tensor in (input_ids, labels, slices)))
