"""Options of the repeated sequences on which attention heads are scored."""

from __future__ import annotations

from dataclasses import dataclass

from kvshift_lab.core.errors import require


@dataclass(frozen=True, kw_only=True)
class RepeatConfig:
    """Sequences of distinct random tokens, each repeated once."""

    length: int | None = None
    """Tokens before the repeat. None: 64, or fewer if the vocabulary or the context is smaller."""
    rows: int = 32
    """Number of sequences to average over."""
    batch_size: int = 4
    """Sequences per batch; the attention weights of all layers are in memory for a batch."""
    seed: int = 0
    """Random seed of the tokens."""
    lowest_token: int | None = None
    """Smallest token id in the sequences, for vocabularies that begin with unused ids. None: 0."""
    highest_token: int | None = None
    """Largest token id in the sequences. None: the last of the tokenizer of a run, or of the model's vocabulary."""
    begin: int | None = None
    """Token id to put before each sequence and not repeat, such as the beginning-of-text token. None: no token."""

    def check(self) -> None:
        """Raise a LabError that names the option, its value, and what it may be."""
        for name in ("rows", "batch_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
