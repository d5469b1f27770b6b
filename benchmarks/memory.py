"""Count the bytes that one decoder layer of the paper's sizes saves for the backward pass, and its peak memory.

    python benchmarks/memory.py [--preset laptop] [--out FOLDER]

Both are differences between a model of two layers and one of one layer, without a head, on one sequence in bfloat16:
the memory held after the forward pass, without weights, and the peak of a forward and backward pass, without weights
and gradients (`allocated.py`). The peak of whole training steps is in the rows of `model.py train`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from allocated import bytes_saved, peak_bytes
from model import build, names_of
from timing import Benchmark, Implementation, arguments
from transformers import LlamaModel

from kvshift.models.llama import SIZES, KVShiftLlamaModel

_WHOLE = {"0.2B": 4096, "2.9B": 4096, "1.5B": 4096}
TOKENS = {"smoke": {"0.2B": 512}, "laptop": _WHOLE, "paper": _WHOLE}


def of_layers(layers: int, name: str, size: Any, tokens: int, device: torch.device) -> tuple[int, int]:
    """Return the bytes saved by a forward pass, and the peak of both passes, of a model of that many layers."""
    fields = {**size, "num_hidden_layers": layers, "vocab_size": 8}
    model = build(name, fields, torch.bfloat16, device, LlamaModel, KVShiftLlamaModel)
    x = torch.zeros(1, tokens, model.config.hidden_size, dtype=torch.bfloat16, device=device, requires_grad=True)
    saved = bytes_saved(lambda: model(inputs_embeds=x, use_cache=False).last_hidden_state, device)
    for leaf in (x, *(parameter for part, parameter in model.named_parameters() if "embed_tokens" not in part)):
        leaf.grad = torch.zeros_like(leaf)

    def step() -> None:
        model(inputs_embeds=x, use_cache=False).last_hidden_state.sum().backward()

    step()  # libraries allocate some memory once, at the first step
    return saved, peak_bytes(step, device)


def make(name: str, size: Any, tokens: int, device: torch.device) -> Implementation:
    (saved, peak), (saved_by_two, peak_of_two) = (of_layers(count, name, size, tokens, device) for count in (1, 2))
    return Implementation(run=None, saved=lambda: saved_by_two - saved, facts={"peak_bytes": peak_of_two - peak})


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    bench = Benchmark(options)
    for size, tokens in TOKENS[options.preset].items():
        bench.case(
            "memory",
            f"{size}, one decoder layer, {tokens} tokens, bfloat16",
            lambda size=size, tokens=tokens: {
                name: functools.partial(make, name, SIZES[size], tokens, bench.device) for name in names_of(SIZES[size])
            },
            rounds=0,
            model=size,
            layers=1,
            shape=[1, tokens],
            dtype="bfloat16",
        )
    bench.finish()


if __name__ == "__main__":
    main()
