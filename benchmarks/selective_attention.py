"""Measure the memory of selective attention, whole and in blocks of queries, and the difference between the two.

    python benchmarks/selective_attention.py
    python benchmarks/selective_attention.py --out results/selective_attention/rows.jsonl

"attention": forward and backward of one layer's attention for one sequence, 3 query heads and 1 KV head of size 64 in
float32, a quarter of the paper's 0.2B. "peak_bytes" is the peak memory beyond queries, keys and values; it includes the
output, its gradient and the gradients of queries, keys and values. "difference" is the largest difference from the
whole form in output and gradients, each relative to the largest number in the tensor.

"model": a training step of a Llama with the same heads and width 192, with 2 layers minus 1: the memory a layer adds.

"growth" is the ratio to the memory at half the context: 2 for linear growth, 4 for quadratic growth.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from allocated import peak_bytes
from torch import Tensor

from kvshift_lab.core.environment import environment
from kvshift_lab.core.json_lines import write_lines
from kvshift_lab.variants.building import build_model, describe
from kvshift_lab.variants.by_name import with_variant
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.selective_attention import selective_attention, selective_attention_full

CONTEXTS = (512, 1024, 2048, 4096)
HEADS, KV_HEADS, SIZE = 3, 1, 64
CPU = torch.device("cpu")


def whole(q: Tensor, k: Tensor, v: Tensor, axis: Any) -> Tensor:
    return selective_attention_full(q, k, v, scaling=SIZE**-0.5, axis=axis)[0]


def blocks(q: Tensor, k: Tensor, v: Tensor, axis: Any) -> Tensor:
    return selective_attention(q, k, v, scaling=SIZE**-0.5, axis=axis)


def vanilla(q: Tensor, k: Tensor, v: Tensor, axis: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def results(form: Callable[..., Tensor], axis: str, context: int) -> tuple[list[Tensor], int]:
    """Return the output and gradients, and the peak memory of computing them."""
    chance = torch.Generator().manual_seed(0)
    shapes = [(1, heads, context, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    inputs = [torch.randn(shape, generator=chance).requires_grad_() for shape in shapes]
    found: list[Tensor] = []

    def step() -> None:
        output = form(*inputs, axis)
        found[:] = [output.detach(), *torch.autograd.grad(output.square().sum(), inputs)]

    step()  # libraries allocate some memory once, at the first step
    found.clear()
    return found, peak_bytes(step, CPU)


def attention() -> Iterator[dict[str, Any]]:
    for axis in ("query", "key", None):
        for context in CONTEXTS:
            expected: list[Tensor] = []
            for form in (whole, blocks) if axis else (vanilla,):
                got, peak = results(form, axis or "", context)
                expected = expected or got
                differences = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(got, expected, strict=True)]
                row = {"part": "attention", "form": form.__name__, "axis": axis, "context": context}
                yield {**row, "peak_bytes": peak, "difference": max(differences)}


def model() -> Iterator[dict[str, Any]]:
    options = ModelConfig(hidden_size=HEADS * SIZE, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    for form, name, implementation in (
        ("vanilla", "vanilla", "sdpa"),
        ("whole", "selective", "eager"),
        ("blocks", "selective", "sdpa"),
    ):
        for context in CONTEXTS:
            peaks = []
            for layers in (1, 2):
                made = with_variant(replace(options, num_hidden_layers=layers), name)
                size = describe(made, vocab_size=8, length=context)
                built: Any = build_model(size, seed=0, variant=made.variant).train()
                built.config._attn_implementation = implementation
                ids = torch.zeros(1, context, dtype=torch.long)
                for parameter in built.parameters():
                    parameter.grad = torch.zeros_like(parameter)
                step = partial(_backward, built, ids)
                step()
                peaks.append(peak_bytes(step, CPU))
            axis = "query" if name == "selective" else None
            row = {"part": "model", "form": form, "axis": axis, "context": context}
            yield {**row, "peak_bytes": peaks[1] - peaks[0]}


def _backward(model: Any, ids: Tensor) -> None:
    model(input_ids=ids, use_cache=False).logits.sum().backward()


def main() -> None:
    """Print a line for each form and context, and write the rows to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON Lines file to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for row in itertools.chain(attention(), model()):
        before = [one for one in rows if all(one[key] == row[key] for key in ("part", "form", "axis"))]
        row["growth"] = row["peak_bytes"] / before[-1]["peak_bytes"] if before else None
        rows.append(row)
        print(
            f"{row['part']:9} {row['form']:8} {row['axis'] or '':6} {row['context']:5} "
            f"{row['peak_bytes'] / 2**20:9.1f} MiB"
            + (f", growth {row['growth']:.2f}" if before else "")
            + (f", difference {row['difference']:.1e}" if row.get("difference") else ""),
            flush=True,
        )
    if options.out:
        stamp = environment(CPU, processes=1)
        write_lines(options.out, (row | stamp for row in rows))


if __name__ == "__main__":
    main()
