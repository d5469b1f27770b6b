"""Measure the cost of one token on the host per layer, in our Llama and in transformers' own.

    python benchmarks/host.py                                 operations and calls, the same on every machine
    python benchmarks/host.py --rounds 100                    also microseconds, on an idle machine
    python benchmarks/host.py --rounds 100 --width 512 --prompt 2000
    python benchmarks/host.py --instructions                  also instructions, by valgrind: half an hour
    python benchmarks/host.py --rounds 100 --instructions --out results/host/rows.jsonl

Decoding a small model waits for the host, which prepares and starts every operation. Here it does little else: a model
of 8 layers is so narrow (width 64) that its arithmetic takes almost no time. It decodes 20 tokens after a prompt of 7.
With --width 512 or --prompt 2000, arithmetic and the cache take time as well. Each number is one layer's share of one
token; work that is done once for all layers is divided among them.

"operations" counts those of PyTorch's dispatcher, most of which are a kernel launch on a GPU. "functions" counts calls
of Python functions. "instructions" counts all instructions that the processor executes: it measures the host's work
independently of other load on the machine, but not the time spent waiting for memory.
Times are measured on a CPU and exclude kernel launches. A round takes the fastest token of each model; "ratio" is the
median over rounds of the ratio to transformers, with its quartiles. "fastest" is the ratio of the fastest tokens of all
rounds, which other load on the machine affects least.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.benchmark import Timer
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from kvshift.models.extending import CACHE
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.core.environment import environment
from kvshift_lab.core.json_lines import write_lines

LAYERS, TOKENS = 8, 20
WIDTH, PROMPT = 64, 7
BASELINE = "transformers"


def _size(width: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "intermediate_size": width,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": LAYERS,
        "vocab_size": 8,
        "max_position_embeddings": 4096,
        "attn_implementation": "sdpa",
    }


def _ours(width: int, **options: Any) -> Any:
    return KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**_size(width), **options))


MODELS: dict[str, Callable[[int], Any]] = {
    BASELINE: lambda width: LlamaForCausalLM(LlamaConfig(**_size(width))),
    "vanilla": lambda width: _ours(width, shift_targets=()),
    "kv shift": lambda width: _ours(width),
    "kv shift, QK-norm": lambda width: _ours(width, qk_norm=True),
}


class Operations(TorchDispatchMode):
    """A dispatch mode that counts operations."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


class Decoding:
    """A model that reads a prompt and then decodes one token at a time."""

    def __init__(self, name: str, cache: str, width: int = WIDTH, prompt: int = PROMPT) -> None:
        torch.manual_seed(0)
        self.name, self.kind, self.prompt = name, cache, prompt
        self.model = MODELS[name](width).eval()
        self.token = torch.ones(1, 1, dtype=torch.long)

    def begin(self) -> None:
        """Read the prompt and decode one token, because some objects are created only at the first token."""
        config = self.model.config
        length = self.prompt + TOKENS + 3
        dynamic = self.kind == "dynamic"
        self.cache = DynamicCache(config=config) if dynamic else StaticCache(config=config, max_cache_len=length)
        self.model(input_ids=self.token.expand(1, self.prompt), **{CACHE: self.cache})
        self.next()

    def next(self) -> None:
        """Decode one token."""
        self.model(input_ids=self.token, **{CACHE: self.cache})


def functions_called(call: Callable[[], Any]) -> int:
    """Return the number of calls of functions written in Python, not counting `call` itself."""
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


def counts(decoding: Decoding) -> dict[str, Any]:
    """Return the operations and function calls of one token, as one layer's share."""
    decoding.begin()
    with Operations() as operations:
        decoding.next()
    called = functions_called(decoding.next)
    return {"operations": operations.count / LAYERS, "functions": called / LAYERS}


def instructions(name: str, cache: str) -> dict[str, float]:
    """Return the instructions of one token, as one layer's share: the mean of 4 tokens in a process under valgrind."""
    # Timer starts the first "python" on PATH.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    setup = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from host import Decoding
torch.set_grad_enabled(False)
decoding = Decoding({name!r}, {cache!r})
decoding.begin()
"""
    found = Timer("decoding.next()", setup=setup).collect_callgrind(number=4, collect_baseline=False)
    return {"instructions": found.counts() / 4 / LAYERS}


def fastest_token(decoding: Decoding) -> float:
    """Return the microseconds of the fastest of 20 tokens, as one layer's share."""
    decoding.begin()
    times = []
    for _ in range(TOKENS):
        start = time.perf_counter()
        decoding.next()
        times.append(time.perf_counter() - start)
    return min(times) / LAYERS * 1e6


def times(models: dict[str, Decoding], rounds: int) -> dict[str, dict[str, Any]]:
    """Return microseconds and ratios to transformers in the same round; each round has a new random order."""
    found: dict[str, list[float]] = {name: [] for name in models}
    gc.disable()
    try:
        for _ in range(rounds):
            for name in random.sample(list(models), len(models)):
                found[name].append(fastest_token(models[name]))
    finally:
        gc.enable()
    rows = {}
    for name, measured in found.items():
        ratios = [own / base for own, base in zip(measured, found[BASELINE], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(ratios)
        fastest = min(measured) / min(found[BASELINE])
        microseconds = statistics.median(measured)
        rows[name] = {"microseconds": microseconds, "ratio": median, "quartiles": [low, high], "fastest": fastest}
    return rows


@torch.no_grad()
def measure(
    rounds: int, *, width: int = WIDTH, prompt: int = PROMPT, count_instructions: bool = False
) -> list[dict[str, Any]]:
    """Return a row for each kind of cache and each model."""
    kinds = {cache: {name: Decoding(name, cache, width, prompt) for name in MODELS} for cache in ("dynamic", "static")}
    timed = {cache: times(models, rounds) if rounds else {} for cache, models in kinds.items()}
    if rounds and count_instructions:
        print("timing is done: the machine need no longer be idle", flush=True)
    rows = []
    for cache, models in kinds.items():
        for name, decoding in models.items():
            row = {"model": name, "cache": cache, **counts(decoding), **timed[cache].get(name, {})}
            rows.append(row | (instructions(name, cache) if count_instructions else {}))
    return rows


def main() -> None:
    """Print a line for each model and cache, and write the rows to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=0, help="rounds of timing: at least 2, or 0 to count only")
    parser.add_argument("--width", type=int, default=WIDTH, help="width of the models, a multiple of 8")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens in the cache before the first token")
    parser.add_argument("--instructions", action="store_true", help="also count instructions, with valgrind")
    parser.add_argument("--out", type=Path, help="JSON Lines file to write")
    options = parser.parse_args()
    if options.instructions and (options.width, options.prompt) != (WIDTH, PROMPT):
        parser.error("--instructions counts at the default --width and --prompt alone")
    torch.set_num_threads(1)
    rows = measure(options.rounds, width=options.width, prompt=options.prompt, count_instructions=options.instructions)
    for row in rows:
        line = (
            f"{row['cache']:8} {row['model']:18} {row['operations']:6.1f} operations {row['functions']:6.1f} functions"
        )
        if options.instructions:
            line += f" {row['instructions'] / 1e6:6.3f} million instructions"
        if options.rounds:
            low, high = row["quartiles"]
            line += f" {row['microseconds']:7.1f} us, ratio {row['ratio']:.3f} ({low:.3f} to {high:.3f})"
            line += f", ratio of the fastest {row['fastest']:.3f}"
        print(line)
    if options.out:
        stamp = environment(torch.device("cpu"), processes=1) | {
            "options": {"rounds": options.rounds, "width": options.width, "prompt": options.prompt}
        }
        write_lines(options.out, (row | stamp for row in rows))


if __name__ == "__main__":
    main()
