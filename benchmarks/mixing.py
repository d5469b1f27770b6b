"""Measure models with KV shift and other ways to mix neighbouring tokens: a training step, and a token of generation.

    python benchmarks/mixing.py [--preset laptop] [--out FOLDER]

The models are those that `kvshift reproduce which_mixing` trains, at the size of `model.py`; the baseline is vanilla.
All but KV shift are plain PyTorch operations, so that KV shift is measured with such operations, too. FOLDER must be
one that `model.py` does not use.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from exact import use_backend
from model import SIZES, decoding, training
from timing import Benchmark, Implementation, arguments

from kvshift.models.llama import KVShiftLlamaConfig
from kvshift_lab.variants.building import build_model
from kvshift_lab.variants.by_name import VARIANTS

NAMES = ("vanilla", "kv-shift", "canon", "inkling", "fox-shift", "smear", "differential")
PLAIN = "KV-shift, plain operations"


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    bench, (sizes, dtype, rounds) = Benchmark(options), SIZES[options.preset]
    size, fields, (batch, length), tokens = sizes[0]

    def implementation(make: Callable[[Any], Implementation], name: str, plain: bool = False) -> Implementation:
        config = KVShiftLlamaConfig(**fields, shift_targets=("k", "v") if name == "kv-shift" else ())
        variant = None if name in ("vanilla", "kv-shift") else name
        model: Any = build_model(config, seed=0, variant=variant)
        model.to(bench.device, getattr(torch, dtype))
        if plain:
            use_backend("eager", model)
        return replace(make(model), check=None)  # the exact models of `model.py` know KV shift alone

    def case(part: str, shape: tuple[int, int], make: Callable[[Any], Implementation]) -> None:
        makes = {VARIANTS[name].label: functools.partial(implementation, make, name) for name in NAMES}
        makes[PLAIN] = functools.partial(implementation, make, "kv-shift", plain=True)
        facts = {"model": size, "layers": fields["num_hidden_layers"], "shape": list(shape), "dtype": dtype}
        name = f"{size}, {facts['layers']} layers, {shape}, {dtype}"
        bench.case(part, name, lambda: makes, rounds=options.rounds or rounds, **facts)

    case("train", (batch, length), functools.partial(training, (batch, length), False))
    case("decode", (1, tokens), functools.partial(decoding, 1, tokens, {}))
    bench.finish()


if __name__ == "__main__":
    main()
