"""Part "memory": bytes that one decoder layer of the paper's sizes saves for the backward pass, and its peak memory.

Both are differences between a model of two layers and one of one layer, without a head, on one sequence: the memory
held after the forward pass, without weights (`activation_memory.py`), and the peak of a forward and backward pass,
without weights and gradients (`peak.py`). The peak of whole training steps is in the rows of "train".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaModel

from kvshift.models.llama import SIZES, KVShiftLlamaModel
from kvshift_lab.benchmarks.activation_memory import bytes_saved
from kvshift_lab.benchmarks.cases import Case, Implementation, Session
from kvshift_lab.benchmarks.language_model import build_llama, implementations
from kvshift_lab.benchmarks.peak import peak_bytes


def memory_cases(session: Session) -> Iterator[Case]:
    """Yield a case for a layer of each size of the preset, with one sequence in bfloat16."""
    for size, tokens in session.preset.memory:
        names = implementations(SIZES[size])
        yield Case(
            part="memory",
            name=f"{size}, one decoder layer, {tokens} tokens, bfloat16",
            baseline=names[0],
            build=functools.partial(_build, names, size, tokens, session.device),
            facts={"model": size, "layers": 1, "shape": [1, tokens], "dtype": "bfloat16"},
            clock=session.wall_clock,
            rounds=0,
        )


def _build(
    names: Sequence[str], size: str, tokens: int, device: torch.device
) -> dict[str, Callable[[], Implementation]]:
    return {name: functools.partial(_implementation, name, size, tokens, device) for name in names}


def _implementation(name: str, size: str, tokens: int, device: torch.device) -> Implementation:
    def saved() -> int:
        kept = [_saved(name, size, layers, tokens, device) for layers in (1, 2)]
        return kept[1] - kept[0]

    peaks = [_peak(name, size, layers, tokens, device) for layers in (1, 2)]
    return Implementation(run=None, saved=saved, facts={"peak_bytes": peaks[1] - peaks[0]})


def _without_head(name: str, size: str, layers: int, device: torch.device) -> Any:
    fields = {**SIZES[size], "num_hidden_layers": layers, "vocab_size": 8}
    return build_llama(name, fields, torch.bfloat16, device, (LlamaModel, KVShiftLlamaModel))


def _embedded(model: Any, tokens: int) -> Tensor:
    width = model.config.hidden_size
    return torch.zeros(1, tokens, width, dtype=torch.bfloat16, device=model.device, requires_grad=True)


def _saved(name: str, size: str, layers: int, tokens: int, device: torch.device) -> int:
    model = _without_head(name, size, layers, device)
    x = _embedded(model, tokens)
    return bytes_saved(lambda: model(inputs_embeds=x, use_cache=False).last_hidden_state, device)


def _peak(name: str, size: str, layers: int, tokens: int, device: torch.device) -> int:
    """Return the peak memory of a step, without weights and gradients, which are allocated before it."""
    model = _without_head(name, size, layers, device)
    x = _embedded(model, tokens)
    used = [x, *(parameter for part, parameter in model.named_parameters() if "embed_tokens" not in part)]
    for leaf in used:
        leaf.grad = torch.zeros_like(leaf)

    def step() -> None:
        model(inputs_embeds=x, use_cache=False).last_hidden_state.sum().backward()

    step()  # libraries allocate some memory once, at the first step
    return peak_bytes(step, device)
