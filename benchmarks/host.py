"""What one token costs the host in one attention layer: calls counted, in ours and in transformers' own Llama.

    python benchmarks/host.py                 counts alone: the same on every machine
    python benchmarks/host.py --time          microseconds too, on an idle machine
    python benchmarks/host.py --out results/host/rows.jsonl

Decoding a small model waits for the host, which prepares and starts every operation. Each row is one token through the
attention of one layer (projections, shift, rotation, cache, attention, output), after a prompt; width 256, 4 heads.
"operations": of PyTorch's dispatcher, each of which is at least one launch on a GPU; "functions": calls of Python.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import benchmark
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, LlamaConfig, LlamaModel, StaticCache

from kvshift.lab.runs.folder import environment
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaModel

SIZE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "vocab_size": 8,
    "attn_implementation": "sdpa",
}
MODELS: dict[str, Callable[[], Any]] = {
    "transformers": lambda: LlamaModel(LlamaConfig(**SIZE)),
    "vanilla": lambda: KVShiftLlamaModel(KVShiftLlamaConfig(**SIZE, shift_targets=())),
    "kv shift": lambda: KVShiftLlamaModel(KVShiftLlamaConfig(**SIZE)),
}
PROMPT = 7


class _Operations(TorchDispatchMode):
    """How many operations run."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def token_of(name: str, kind: str) -> Callable[[], Any]:
    """One token of one attention layer, as often as it is called."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    config = model.config
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=1 << 12)
    model(input_ids=torch.ones(1, PROMPT, dtype=torch.long), past_key_values=cache)
    attention, x = model.layers[0].self_attn, torch.randn(1, 1, config.hidden_size)
    rotary = model.rotary_emb(x, torch.tensor([[PROMPT]]))
    if name != "transformers":
        from kvshift.ops.rope import half_tables

        rotary = half_tables(*rotary)
    return lambda: attention(x, position_embeddings=rotary, attention_mask=None, past_key_values=cache)


def functions_called(call: Callable[[], Any]) -> int:
    """Calls of functions written in Python, `call` itself not counted."""
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return counted - 1


@torch.no_grad()
def measure(name: str, kind: str, *, timed: bool) -> dict[str, Any]:
    """One row."""
    call = token_of(name, kind)
    for _ in range(3):  # what is made at the first call alone
        call()
    with _Operations() as operations:
        call()
    row = {"model": name, "cache": kind, "operations": operations.count, "functions": functions_called(call)}
    if timed:
        timing = benchmark.Timer("call()", globals={"call": call}).blocked_autorange(min_run_time=2)
        row["microseconds"] = timing.median * 1e6
    return row


def main() -> None:
    """Print a line for each model and cache, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", action="store_true", help="measure microseconds too")
    parser.add_argument("--out", type=Path, help="a file of JSON lines to write")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, kind, timed=options.time) for kind in ("dynamic", "static") for name in MODELS]
    for row in rows:
        print(
            "  ".join(f"{key} {value:.0f}" if key == "microseconds" else f"{key} {value}" for key, value in row.items())
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        stamp = environment(torch.device("cpu"), processes=1)
        options.out.write_text("".join(json.dumps(row | stamp) + "\n" for row in rows))


if __name__ == "__main__":
    main()
