"""Masked text: the words of real text that were masked, for models that see what follows.

    text          The  cat  sat   on  the  mat
    input_ids     The    #  sat   on   up  mat       # is the mask token; now and then any token stands there instead
    labels          -    -  cat    -    -  the       one column later, as all tasks have them; - is -100
    slices          .    .    0    .    .    0

Of the positions but the last, each is chosen with the probability `masked`. Of the chosen, 80 % become the mask token,
10 % a random one, and 10 % stay; the label is what stood there.

Source: Devlin et al., BERT (2019), section 3.1.

Shapes: B sequences, T positions in a sequence.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvshift.lab.core.errors import require
from kvshift.lab.core.seeds import generator_for
from kvshift.lab.data.config import SHARED, DataConfig, find_shared
from kvshift.lab.tasks.batch import IGNORED, Batch
from kvshift.lab.tasks.option_checks import check_at_least, check_batch_size


@dataclass(frozen=True, kw_only=True)
class MaskedTextConfig:
    """The text, and how much of it is masked."""

    corpus: str = "tinyshakespeare"
    """A bundled corpus, or a file below the folder that the environment variable KVSHIFT_SHARED_DATA names; where it
    names none, the bundled corpus."""
    validation: str | None = None
    """A file there that is evaluated on; None: the end of the corpus."""
    vocab_size: int = 1024
    """Tokens of the BPE that is trained on the corpus; the mask token is one more."""
    length: int = 128
    """Tokens in a sequence."""
    masked: float = 0.15
    """The part of positions that are chosen."""
    validation_rows: int = 384
    """Sequences that are evaluated on, the first ones."""

    def __post_init__(self) -> None:
        check_at_least("masked_text", self, vocab_size=257, length=2, validation_rows=1)
        require(0 < self.masked < 1, "masked_text.masked", self.masked, "between 0 and 1, both excluded")


class MaskedTextTask:
    """Sequences of the training text, drawn at random, with masks drawn anew; evaluation has other text.

    Slices: "masked", all labels.

    Chance: the guesser always names the most frequent token of the evaluation text.
    """

    slice_names = ("masked",)

    def __init__(self, config: MaskedTextConfig) -> None:
        # Here alone is a tokenizer needed, which takes a second to import.
        from kvshift.lab.data.text import load_text_data

        self.config = config
        files = {"corpus": config.corpus, "validation": config.validation}
        if "/" in config.corpus:
            files = {name: find_shared(file) for name, file in files.items()} if os.environ.get(SHARED) else {}
        given: dict[str, Any] = {name: file for name, file in files.items() if file is not None}
        data_config = DataConfig(vocab_size=config.vocab_size, sequence_length=config.length, **given)
        with tempfile.TemporaryDirectory() as scratch:
            data = load_text_data(data_config, seed=0, tokenizer_folder=Path(scratch) / "tokenizer")
        self._train: Any = data.train.with_format("numpy")  # type: ignore[union-attr]  # it is not streamed
        count = min(config.validation_rows, len(data.validation))
        self._held_out = torch.as_tensor(data.validation.with_format("numpy")[:count]["input_ids"], dtype=torch.long)
        self._mask_token = len(data.tokenizer)
        self.vocab_size = len(data.tokenizer) + 1
        self.length = config.length
        self.chance = {"masked": int(self._held_out.flatten().bincount().max()) / self._held_out.numel()}

    def batch(self, generator: torch.Generator, batch_size: int) -> Batch:
        """The next `batch_size` sequences; see `Task.batch`."""
        check_batch_size(batch_size)
        rows = torch.randint(len(self._train), (batch_size,), generator=generator)
        return self._masked(torch.as_tensor(self._train[rows.tolist()]["input_ids"], dtype=torch.long), generator)

    def whole_table(self) -> Batch:
        """The evaluation text, always masked at the same positions."""
        return self._masked(self._held_out, generator_for("masked text of evaluation", 0))

    def _masked(self, text_BT: Tensor, generator: torch.Generator) -> Batch:
        chosen = torch.rand(text_BT.shape, generator=generator) < self.config.masked
        chosen[:, -1] = False  # whose label would stand behind the sequence
        how = torch.rand(text_BT.shape, generator=generator)
        any_token = torch.randint(self._mask_token, text_BT.shape, generator=generator)
        input_ids = torch.where(chosen & (how < 0.9), any_token, text_BT)
        input_ids = input_ids.masked_fill(chosen & (how < 0.8), self._mask_token)
        labels = text_BT.masked_fill(~chosen, IGNORED).roll(1, dims=1)  # of the last column nothing was chosen
        return Batch(input_ids, labels, (labels != IGNORED).long() - 1)
