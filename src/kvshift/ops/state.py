"""The state of a shift between two calls: the last raw keys and values.

Shapes: S sequences, R rows of state (newest last), G KV heads, H query heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SequenceState:
    """The state of S sequences between two calls, in tensors with one row per sequence.

    Every method returns a new state and leaves the tensors of this one unmodified. Two states are equal if all their
    tensors have equal values, the same dtype and the same device.
    """

    k: Tensor

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return all(_is_same(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))

    __hash__ = None  # type: ignore[assignment]  # compared by values, which may change

    @property
    def sequences(self) -> int:
        """Number of sequences, S."""
        return self.k.shape[0]

    def select(self, indices: Tensor | Sequence[int]) -> Self:
        """Return the state of the given sequences, in that order. An index may be repeated.

        Args:
            indices: (n,) integers or (S,) booleans. An empty list gives a state of no sequences.
        """
        index = torch.as_tensor(indices, device=self.k.device)
        if index.ndim != 1:
            raise ValueError(f"indices must have one dimension, got shape {tuple(index.shape)}")
        if index.dtype == torch.bool and index.shape[0] != self.sequences:
            raise ValueError(f"boolean indices must have length {self.sequences}, got {index.shape[0]}")
        if index.is_floating_point() and index.numel():  # an empty list has no dtype of its own
            raise TypeError(f"indices must be integers or booleans, got {index.dtype}")
        index = index.nonzero().squeeze(1) if index.dtype == torch.bool else index.long()
        return self._map(lambda x: x.index_select(0, index))

    def reorder(self, beam_indices: Tensor | Sequence[int]) -> Self:
        """Let row i continue row `beam_indices[i]`, (S,) integers, as in beam search."""
        order = torch.as_tensor(beam_indices, device=self.k.device)
        is_integer = order.dtype != torch.bool and not (order.is_floating_point() and order.numel())
        if order.shape != (self.sequences,) or not is_integer:
            raise ValueError(
                f"beam_indices must be {self.sequences} integers, one for each sequence, "
                f"got {order.dtype} of shape {tuple(order.shape)}"
            )
        return self.select(order)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or cast the state, with the arguments of `Tensor.to`. Integer tensors are moved but never cast."""

        def moved(x: Tensor) -> Tensor:
            y = x.to(*args, **kwargs)
            return y if x.is_floating_point() else x.to(y.device)

        return self._map(moved)

    def clone(self) -> Self:
        return self._map(torch.clone)

    def detach(self) -> Self:
        """Detach the state from the graph, as between two chunks of truncated back-propagation through time."""
        return self._map(torch.detach)

    def _map(self, fn: Callable[[Tensor], Tensor]) -> Self:
        """Apply `fn` to each tensor, including those of a nested state."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        mapped = {name: fn(part) for name, part in parts.items() if isinstance(part, Tensor)}
        mapped |= {name: part._map(fn) for name, part in parts.items() if isinstance(part, SequenceState)}
        return replace(self, **mapped)


def _is_same(part: Any, other: Any) -> bool:
    if not (isinstance(part, Tensor) and isinstance(other, Tensor)):
        return part is other or (part == other) is True
    return part.dtype == other.dtype and part.device == other.device and torch.equal(part, other)


@dataclass(frozen=True, eq=False)
class ShiftState(SequenceState):
    """The last raw (unshifted, unrotated) keys and values of S sequences.

    They cannot be recovered from a cache of shifted and rotated keys. If you reorder, select, crop or reset such a
    cache, you must do the same to this state.

    Attributes:
        k: raw keys, (S, R, G, Dk), the newest row last. Rows from before a sequence began are zero.
        v: raw values, (S, R, G, Dv).
        max_rows: maximum number of rows to keep. A window of W needs W - 1; each additional row lets `crop` take one
            more token back. `crop` lowers R, and later calls of the operator raise it again, up to `max_rows`. Calls
            with boundaries or padding leave R unchanged, because shapes must not depend on the data.
        q: raw queries, (S, R, H, D), kept only by layers that shift queries too.
    """

    k: Tensor
    v: Tensor
    max_rows: int
    q: Tensor | None = None

    @classmethod
    def zeros(
        cls,
        sequences: int,
        heads: int,
        k_dim: int,
        v_dim: int | None = None,
        *,
        rows: int = 1,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> ShiftState:
        """Return the state of `sequences` sequences that have not begun, with `rows` rows each.

        For a window of W and roll-backs of up to n tokens, use `rows = W - 1 + n`.
        """
        if rows < 1:
            raise ValueError(f"rows must be at least 1 (window - 1 plus the tokens to roll back), got {rows}")
        k = torch.zeros(sequences, rows, heads, k_dim, dtype=dtype, device=device)
        v = torch.zeros(sequences, rows, heads, k_dim if v_dim is None else v_dim, dtype=dtype, device=device)
        return cls(k, v, rows)

    @property
    def rows(self) -> int:
        """Current number of rows of state, R; at most `max_rows`."""
        return self.k.shape[1]

    def crop(self, tokens: int, *, window: int = 2) -> ShiftState:
        """Remove the last `tokens` tokens of every sequence, for example after rejected drafts.

        Args:
            tokens: number of tokens to remove, 0 or more.
            window: window W of the operator that continues from here; it needs W - 1 rows.

        Raises:
            ValueError: a number is out of range, or the state has too few rows. A state with
                `max_rows = window - 1 + tokens` has enough.
        """
        if tokens < 0:
            raise ValueError(f"tokens must be 0 or more, got {tokens}")
        if window < 2:
            raise ValueError(f"window must be 2 or more, got {window}")
        remaining = self.rows - tokens
        if remaining < window - 1:
            raise ValueError(
                f"cannot crop {tokens} tokens: the state holds {self.rows} rows and a window of {window} needs "
                f"{window - 1} afterwards; keep max_rows >= {window - 1 + tokens} (it is {self.max_rows}). "
                "Older raw keys and values cannot be recovered from shifted ones"
            )
        return self._map(lambda x: x[:, :remaining].clone())

    def reset(self) -> ShiftState:
        """Return the state of the same S sequences before their first token."""
        return self._map(lambda x: x.new_zeros(x.shape[0], self.max_rows, *x.shape[2:]))

    def split(self, sizes: int | Sequence[int] = 1) -> list[ShiftState]:
        """Split the state into states of `sizes` sequences each; the inverse of `stack`."""
        rows = torch.arange(self.sequences, device=self.k.device)
        return [self.select(part) for part in rows.split(sizes if isinstance(sizes, int) else list(sizes))]

    @staticmethod
    def stack(states: Sequence[ShiftState]) -> ShiftState:
        """Join states along their sequences, for example to batch requests that arrived separately."""
        if not states:
            raise ValueError("states must hold at least one ShiftState, got an empty sequence")
        first = states[0]
        for i, state in enumerate(states):
            if (state.rows, state.max_rows) != (first.rows, first.max_rows):
                raise ValueError(
                    f"states must hold the same number of rows: states[0] has {first.rows} of {first.max_rows}, "
                    f"states[{i}] has {state.rows} of {state.max_rows}"
                )
            if state.k.dtype != first.k.dtype:
                raise ValueError(
                    f"states must have the same dtype: states[0] is {first.k.dtype}, states[{i}] is {state.k.dtype}"
                )
            if (state.q is None) != (first.q is None):
                raise ValueError(f"states must all carry queries or none: states[0] and states[{i}] differ")
        q = None if first.q is None else torch.cat([state.q for state in states if state.q is not None])
        k, v = torch.cat([state.k for state in states]), torch.cat([state.v for state in states])
        return ShiftState(k, v, first.max_rows, q)


def _assign_unchanged(self: Any, name: str, value: Any) -> None:
    """Assign what the field already holds, as code does that maps a function over all attributes of an object."""
    if getattr(self, name, None) is not value:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")


ShiftState.__setattr__ = _assign_unchanged  # type: ignore[method-assign]  # transformers.exporters walks over caches

# A pytree, so that exported programs can take and return it.
torch.export.register_dataclass(ShiftState)
