"""The order in which a run reads its sequences: the same for a seed, whatever the model and the number of devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.utils.data import IterableDataset, Sampler

from kvshift.lab.core.errors import LabError
from kvshift.lab.core.seeds import generator_for


class ShuffledEpochs(Sampler[int]):
    """The first `count` numbers of one permutation of range(sequences) after another.

    Trainer sees a single epoch, so that no batch is cut short where an epoch ends, and all devices together
    take the same sequences in each step, however many they are.
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
    """The sequences of a stream, from its start again whenever it ends."""

    def __init__(self, sequences: Iterable[dict[str, Any]]) -> None:
        self._sequences = sequences

    def __iter__(self) -> Iterator[dict[str, Any]]:
        epoch = 0
        while True:
            if hasattr(self._sequences, "set_epoch"):
                self._sequences.set_epoch(epoch)  # type: ignore[attr-defined]  # datasets shuffle again for each
            sequence = None
            for sequence in self._sequences:
                yield sequence
            if sequence is None:
                raise LabError("data.corpus: the stream is shorter than one sequence of data.sequence_length tokens")
            epoch += 1
