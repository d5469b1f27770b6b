"""Ways to get the operator wrong, most of them faults that a neighbour of this operator has had.

Each function replaces a part of the implementation; `test_mutants.py` says which check must notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvshift.ops import ShiftState, boundaries, eager, plain, shift

real_shift, real_eager, real_plan = shift._shift, shift.shift_eager, shift.plan_shift


def replace_shift(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` edit the arguments of every shift but those of the reference, which stays true."""
    names = ("inputs", "mixes", "pasts", "sequences", "max_rows", "cu_seqlens", "seq_idx", "mask", "backend")

    def mutant(*args: Any) -> Any:
        given = dict(zip(names, args, strict=True))
        if given["backend"] != "reference":
            change(given)
        return real_shift(*given.values())

    patch.setattr(shift, "_shift", mutant)


def replace_eager(patch: pytest.MonkeyPatch, mutant: Callable[..., tuple[Tensor, Tensor]]) -> None:
    patch.setattr(shift, "shift_eager", mutant)


def state_forgotten(patch: pytest.MonkeyPatch) -> None:
    def change(given: dict[str, Any]) -> None:
        given["pasts"] = [None if past is None else torch.zeros_like(past) for past in given["pasts"]]

    replace_shift(patch, change)


def prefill_from_zeros(patch: pytest.MonkeyPatch) -> None:
    """State counts only for single tokens: chunked prefill begins anew with every chunk."""

    def change(given: dict[str, Any]) -> None:
        if given["inputs"][0].shape[1] > 1:
            given["pasts"] = [None if past is None else torch.zeros_like(past) for past in given["pasts"]]

    replace_shift(patch, change)


def boundaries_ignored(patch: pytest.MonkeyPatch) -> None:
    def change(given: dict[str, Any]) -> None:
        bounds = given["cu_seqlens"]
        if bounds is not None:
            given["cu_seqlens"] = torch.cat([bounds[:1], bounds[-1:].expand(len(bounds) - 1)])

    replace_shift(patch, change)


def numbers_ignored(patch: pytest.MonkeyPatch) -> None:
    replace_shift(patch, lambda given: given.update(seq_idx=None))


def decoding_by_coincidence(patch: pytest.MonkeyPatch) -> None:
    """A pack of as many tokens as sequences is taken for decoding: every token reads a state."""

    def change(given: dict[str, Any]) -> None:
        bounds = given["cu_seqlens"]
        if bounds is not None and bounds[-1] == len(bounds) - 1:
            given["cu_seqlens"] = torch.arange(len(bounds), dtype=bounds.dtype)

    replace_shift(patch, change)


def no_pad_mask(patch: pytest.MonkeyPatch) -> None:
    replace_shift(patch, lambda given: given.update(mask=None))


def pads_multiplied_by_zero(patch: pytest.MonkeyPatch) -> None:
    """Zeroed by a product, which keeps NaN, instead of left out."""

    def mutant(x: Tensor, index: Tensor) -> Tensor:
        batch = torch.arange(x.shape[0]).unsqueeze(1)
        return x[batch, index.clamp(min=0)] * (index >= 0)[..., None, None]

    patch.setattr(plain, "pick", mutant)
    patch.setattr(eager, "pick", mutant)


def pads_zeroed_but_not_skipped(patch: pytest.MonkeyPatch) -> None:
    """The token before the first real one after a hole is a zero, not the last real one."""

    def change(given: dict[str, Any]) -> None:
        if given["mask"] is not None:
            given["inputs"] = [torch.where(given["mask"][..., None, None], x, 0) for x in given["inputs"]]
            given["mask"] = None

    replace_shift(patch, change)


def state_at_the_padded_end(patch: pytest.MonkeyPatch) -> None:
    def mutant(x: Tensor, mix: Tensor, history: Tensor, plan: Any, max_rows: int) -> tuple[Tensor, Tensor]:
        y, next_history = real_eager(x, mix, history, plan, max_rows)
        return y, next_history if plan is None else x[:, -history.shape[1] :].clone()

    replace_eager(patch, mutant)


def replace_tails(patch: pytest.MonkeyPatch, change: Callable[[Tensor, dict[str, Any]], Tensor]) -> None:
    def mutant(*args: Any, **bounds: Any) -> boundaries.ShiftPlan:
        numbered = real_plan(*args, **bounds)
        return replace(numbered, tails=change(numbered.tails, bounds))

    patch.setattr(shift, "plan_shift", mutant)


def one_token_emits_no_state(patch: pytest.MonkeyPatch) -> None:
    def change(tails: Tensor, bounds: dict[str, Any]) -> Tensor:
        return torch.where(bounds["cu_seqlens"].diff() == 1, -1, tails)

    replace_tails(patch, change)


def no_token_loses_its_state(patch: pytest.MonkeyPatch) -> None:
    def change(tails: Tensor, bounds: dict[str, Any]) -> Tensor:
        return torch.where(bounds["cu_seqlens"].diff() == 0, -1, tails)

    replace_tails(patch, change)


def state_not_reordered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShiftState, "reorder", lambda self, order: self)


def state_reordered_backwards(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: ShiftState, order: list[int]) -> ShiftState:
        k, v = self.k.clone(), self.v.clone()
        k[order], v[order] = self.k, self.v
        return ShiftState(k, v, self.max_rows)

    patch.setattr(ShiftState, "reorder", mutant)


def crop_keeps_the_wrong_row(patch: pytest.MonkeyPatch) -> None:
    def mutant(self: ShiftState, tokens: int, *, window: int = 2) -> ShiftState:
        return self._map(lambda x: x[:, tokens:].clone())

    patch.setattr(ShiftState, "crop", mutant)


def crop_does_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ShiftState, "crop", lambda self, tokens, **kwargs: self)


def change_coefficients(patch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    replace_shift(patch, lambda given: given.update(mixes=[change(mix) for mix in given["mixes"]]))


def lags_swapped(patch: pytest.MonkeyPatch) -> None:
    change_coefficients(patch, lambda mix: mix.flip(1))


def heads_swapped(patch: pytest.MonkeyPatch) -> None:
    change_coefficients(patch, lambda mix: mix.flip(0))


def keys_and_values_swap_coefficients(patch: pytest.MonkeyPatch) -> None:
    replace_shift(patch, lambda given: given.update(mixes=given["mixes"][::-1]))


def coefficients_in_bf16(patch: pytest.MonkeyPatch) -> None:
    change_coefficients(patch, lambda mix: mix.bfloat16())


def products_rounded_too(patch: pytest.MonkeyPatch) -> None:
    """Double rounding: the arithmetic is in the dtype of the keys."""

    def mutant(mix: Tensor, x: Tensor) -> list[eager._Lag]:
        return [eager._Lag(weight, None) for weight in mix.to(x.dtype).unsqueeze(2).unbind(1)]

    patch.setattr(eager, "_lags", mutant)


def zero_times_infinity(patch: pytest.MonkeyPatch) -> None:
    """A coefficient of zero multiplies what stands there, as any other does."""
    real_lags = eager._lags
    patch.setattr(eager, "_lags", lambda mix, x: [lag._replace(zero=None) for lag in real_lags(mix, x)])


def gradient_of_history_missing(patch: pytest.MonkeyPatch) -> None:
    replace_shift(
        patch, lambda given: given.update(pasts=[None if past is None else past.detach() for past in given["pasts"]])
    )


def replace_backward(patch: pytest.MonkeyPatch, change: Callable[..., list[Tensor]]) -> None:
    """Let `change` edit the gradients of x, mix and history where there are no boundaries."""
    real_backward = eager._Slices.backward

    def mutant(ctx: Any, grad_y: Tensor) -> tuple[Tensor, ...]:
        return tuple(change(list(real_backward(ctx, grad_y)), grad_y, *ctx.saved_tensors))

    patch.setattr(eager._Slices, "backward", staticmethod(mutant))


def coefficients_gradient_without_history(patch: pytest.MonkeyPatch) -> None:
    def change(grads: list[Tensor], grad_y: Tensor, x: Tensor, mix: Tensor, history: Tensor) -> list[Tensor]:
        part = (grad_y[:, 0] * history[:, -1]).sum((0, 2))
        return [grads[0], grads[1] - torch.stack([torch.zeros_like(part), part], dim=1), grads[2]]

    replace_backward(patch, change)


def gradient_not_looking_ahead(patch: pytest.MonkeyPatch) -> None:
    def change(grads: list[Tensor], grad_y: Tensor, x: Tensor, mix: Tensor, history: Tensor) -> list[Tensor]:
        return [grad_y * mix[:, :1], *grads[1:]]

    replace_backward(patch, change)


def gradient_across_boundaries(patch: pytest.MonkeyPatch) -> None:
    """Right forward, but each token hands its gradient to its neighbour in memory."""

    def mutant(*args: Any, **bounds: Any) -> boundaries.ShiftPlan:
        numbered = real_plan(*args, **bounds)
        readers = numbered.readers.clone()
        slots, positions = readers.shape[1] - args[1], args[1]
        readers[:, slots : slots + positions - 1, 1] = torch.arange(1, positions)
        return replace(numbered, readers=readers)

    patch.setattr(shift, "plan_shift", mutant)


def blocks_forget_their_neighbours(patch: pytest.MonkeyPatch) -> None:
    real_spans = eager._spans

    def mutant(x_window: Tensor, history: Tensor, start: int, end: int, lags: int) -> Iterator[Any]:
        zeros = torch.zeros_like(x_window)
        zeros[:, start - end :] = x_window[:, start - end :]
        return real_spans(zeros, history, start, end, lags)

    patch.setattr(eager, "_BLOCK", 2**6)
    patch.setattr(eager, "_spans", mutant)


def state_is_a_view(patch: pytest.MonkeyPatch) -> None:
    def mutant(x: Tensor, mix: Tensor, history: Tensor, plan: Any, max_rows: int) -> tuple[Tensor, Tensor]:
        return real_eager(x, mix, history, plan, max_rows)[0], x[:, -max_rows:]

    replace_eager(patch, mutant)


def keys_edited_in_place(patch: pytest.MonkeyPatch) -> None:
    def mutant(x: Tensor, mix: Tensor, history: Tensor, plan: Any, max_rows: int) -> tuple[Tensor, Tensor]:
        y, next_history = real_eager(x, mix, history, plan, max_rows)
        x.data.copy_(y)
        return y, next_history

    replace_eager(patch, mutant)
