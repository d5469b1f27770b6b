"""The order in which a run reads its sequences; it depends on the seed, but not on the model or number of devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from kvshift_lab.core.errors import LabError
from kvshift_lab.core.seeds import generator_for


class ShuffledEpochs(Sampler[int]):
    """A sampler that concatenates random permutations of range(sequences) and stops after `count` indices.

    Trainer sees a single epoch. Thus no batch is cut short at the end of a pass over the data, and each step takes the
    same sequences for any number of devices.
    """

    def __init__(self, sequences: int, count: int, seed: int) -> None:
        self.sequences, self.count, self.seed = sequences, count, seed

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        generator = generator_for("order of rows", self.seed)
        epochs = (
            torch.randperm(self.sequences, generator=generator)[: self.count - start].tolist()
            for start in range(0, self.count, self.sequences)
        )
        return chain.from_iterable(epochs)


class EndlessStream(IterableDataset):
    """A dataset that repeats a stream of sequences endlessly, in the same order."""

    def __init__(self, sequences: Iterable[dict[str, Any]]) -> None:
        self._sequences = sequences

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            sequence = None
            for sequence in self._sequences:
                yield sequence
            if sequence is None:  # it would be read again and again without an end
                raise LabError("data.corpus: the stream contains no sequence")
