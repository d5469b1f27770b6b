"""Masked text: predict the masked tokens of real text, for models that also attend to later tokens.

    text          The  cat  sat   on  the  mat
    input_ids     The    #  sat   on   up  mat       # is the mask token; "up" is a random token in its place
    labels          -    -  cat    -    -  the       one column later, as in all tasks; - is -100
    slices          .    .    0    .    .    0

Each position except the last is chosen with probability `masked`. Of the chosen tokens, 80 % are replaced by the mask
token and 10 % by a random token, and 10 % remain unchanged; the label is the original token.

Source: Devlin et al., BERT (2019), section 3.1.

Shapes: B sequences, T positions in a sequence.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvshift_lab.core.errors import require
from kvshift_lab.core.seeds import generator_for
from kvshift_lab.data.config import DataConfig, find_shared
from kvshift_lab.data.tokenizers import vocab_size_of
from kvshift_lab.tasks.batch import IGNORED, Batch
from kvshift_lab.tasks.option_checks import check_at_least, check_batch_size


@dataclass(frozen=True, kw_only=True)
class MaskedTextConfig:
    """Options of masked text; the defaults use the bundled corpus."""

    corpus: str = "tinyshakespeare"
    """A bundled corpus, or a file below the folder that the environment variable KVSHIFT_SHARED_DATA names."""
    validation: str | None = None
    """A file in that folder to evaluate on; None: the end of the corpus."""
    vocab_size: int = 1024
    """Vocabulary size of the BPE that is trained on the corpus, without the mask token."""
    length: int = 128
    """Tokens per sequence."""
    masked: float = 0.15
    """Fraction of positions that are chosen, on average."""
    validation_rows: int = 384
    """Number of sequences to evaluate on, from the start of the evaluation text."""

    def __post_init__(self) -> None:
        check_at_least("masked_text", self, vocab_size=257, length=2, validation_rows=1)
        require(0 < self.masked < 1, "masked_text.masked", self.masked, "between 0 and 1, both excluded")

    def data_config(self) -> DataConfig:
        """Return the data options of the text on this machine."""
        files = {"corpus": self.corpus, "validation": self.validation}
        if "/" in self.corpus:
            files = {name: find_shared(file) for name, file in files.items()}
        given: dict[str, Any] = {name: file for name, file in files.items() if file is not None}
        return DataConfig(vocab_size=self.vocab_size, sequence_length=self.length, **given)


class MaskedTextTask:
    """Predict masked tokens in random sequences of the training text, with a new mask each time.

    The evaluation text is separate from the training text.

    Slices: "masked", all labels.

    Chance: the guesser always names the most frequent token of the evaluation text.
    """

    slice_names = ("masked",)

    def __init__(self, config: MaskedTextConfig) -> None:
        # Imported here because no other task needs it and the import takes a second.
        from kvshift_lab.data.text import load_text_data

        self.config = config
        with tempfile.TemporaryDirectory() as scratch:
            data = load_text_data(config.data_config(), seed=0, tokenizer_folder=Path(scratch) / "tokenizer")
        self._train: Any = data.train.with_format("numpy")  # type: ignore[union-attr]  # it is not streamed
        count = min(config.validation_rows, len(data.validation))
        self._held_out = torch.as_tensor(data.validation.with_format("numpy")[:count]["input_ids"], dtype=torch.long)
        self._mask_token = vocab_size_of(data.tokenizer)
        self.vocab_size = self._mask_token + 1
        self.length = config.length
        self.chance = {"masked": int(self._held_out.flatten().bincount().max()) / self._held_out.numel()}

    def batch(self, generator: torch.Generator, batch_size: int) -> Batch:
        """Draw the next `batch_size` sequences; see `Task.batch`."""
        check_batch_size(batch_size)
        rows = torch.randint(len(self._train), (batch_size,), generator=generator)
        return self._masked(torch.as_tensor(self._train[rows.tolist()]["input_ids"], dtype=torch.long), generator)

    def whole_table(self) -> Batch:
        """Return the evaluation text, always masked at the same positions."""
        return self._masked(self._held_out, generator_for("masked text of evaluation", 0))

    def _masked(self, text_BT: Tensor, generator: torch.Generator) -> Batch:
        chosen = torch.rand(text_BT.shape, generator=generator) < self.config.masked
        chosen[:, -1] = False  # its label would be after the end of the sequence
        how = torch.rand(text_BT.shape, generator=generator)
        any_token = torch.randint(self._mask_token, text_BT.shape, generator=generator)
        input_ids = torch.where(chosen & (how < 0.9), any_token, text_BT)
        input_ids = input_ids.masked_fill(chosen & (how < 0.8), self._mask_token)
        labels = text_BT.masked_fill(~chosen, IGNORED).roll(1, dims=1)  # the last column is never chosen
        return Batch(input_ids, labels, (labels != IGNORED).long() - 1)
