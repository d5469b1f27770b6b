"""Gradients from logits to tokens: what depends on what.

Shapes: T positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvshift.models.check.findings import Comparison, NotSupportedError
from kvshift.models.check.subject import Subject

__all__ = ["causality", "token_gradients"]


def token_gradients(subject: Subject, ids: Tensor, spans: Sequence[Tensor], **inputs: Any) -> list[Tensor]:
    """For each span of positions, how much its logits depend on each token: (T,), the largest gradient of each.

    The logits of a span are weighed at random, so that gradients of one token do not cancel. Every table that is
    looked up by (1, T) or (T, 1) numbers counts, those of positions too, which depend on no other token.
    """
    layouts = ids.shape, ids.mT.shape  # XLNet has positions first
    leaves: list[Tensor] = []

    def cut(module: nn.Module, given: Any, output: Tensor) -> Tensor | None:
        if not given or not isinstance(given[0], Tensor) or given[0].shape not in layouts or output.ndim != 3:
            return None
        leaves.append(output.detach().requires_grad_())
        return leaves[-1].clone()  # some models scale it in place, which a leaf does not allow

    tables = [module for module in subject.model.modules() if isinstance(module, nn.Embedding)]
    hooks = [table.register_forward_hook(cut) for table in tables]
    try:
        with torch.enable_grad():
            logits = subject.call(ids, cached=False, **inputs).logits[0].float()
    finally:
        for hook in hooks:
            hook.remove()
    if not leaves or not logits.requires_grad:
        raise NotSupportedError("no gradient reaches the embeddings")
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits.device)
    found = []
    for span in spans:
        objective = (logits[span] * weights[span]).nan_to_num(0.0, 0.0, 0.0).sum()
        gradients = torch.autograd.grad(objective, leaves, retain_graph=True, allow_unused=True)
        sizes = [gradient.abs().amax(-1).flatten().cpu().double() for gradient in gradients if gradient is not None]
        found.append(torch.stack(sizes).amax(0))
    return found


def causality(subject: Subject, found: Comparison) -> None:
    """No gradient from the logits of a position to a token after it."""
    ids = subject.tokens(1, subject.length)
    gradients = token_gradients(subject, ids, [torch.tensor([t]) for t in range(ids.shape[1])])
    largest = max(float(gradient.max()) for gradient in gradients)
    for t, gradient in enumerate(gradients):
        found.case = f"position {t}"
        found.errors(gradient[t + 1 :] / largest, start=t + 1)
