"""Time and memory of the shift on this machine, each number beside its baseline in the same run.

    python benchmarks/shift.py [--rounds N] [--only operator,training,decoding] [--output FILE]

operator: forward and backward of one tensor (B, T, G, D), as a multiple of one `copy_` of it into memory that is
    there already. The floor is 2.5: five passes over the tensor (read x, write y; read g and x, write their
    gradient) against the copy's two.
training: a whole step (forward, backward, AdamW) of a small Llama, as a multiple of transformers' own.
decoding: a token of greedy generation with a cache, likewise.

"kv_shift" is what a user gets: with the CPU kernel where it is built; "eager" is the same without it.

Contestants take turns within each round; the table gives the median over rounds and the range between the quartiles.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kvshift.ops import shift_tokens
from kvshift.ops.cpu_op import cpu_refusal

SHAPES = ((4, 2048, 4, 128), (8, 1024, 16, 64))

Function = Callable[[Tensor, Tensor], Tensor]


def appendix_m(x: Tensor, mix: Tensor) -> Tensor:
    """The paper's formulation (appendix M): pad, unfold, multiply, sum. Its kernel has the oldest lag first."""
    windows = F.pad(x, (0, 0, 0, 0, mix.shape[1] - 1, 0)).unfold(1, mix.shape[1], 1)
    return (windows * mix.flip(1)[:, None, :]).sum(-1)


def pad_multiply_add(x: Tensor, mix: Tensor) -> Tensor:
    """The two lines most people would write."""
    before = F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1]
    return x * mix[:, 0, None] + before * mix[:, 1, None]


def ours(x: Tensor, mix: Tensor) -> Tensor:
    return shift_tokens(x, mix)[0]


def without_kernel(x: Tensor, mix: Tensor) -> Tensor:
    return shift_tokens(x, mix, backend="eager")[0]


def measure(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant, in turns; the first two rounds warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(rounds + 2):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            if round_number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratios(seconds: dict[str, list[float]], baseline: str) -> list[dict[str, Any]]:
    base = statistics.median(seconds[baseline])
    rows = []
    for name, values in seconds.items():
        low, middle, high = statistics.quantiles(values, n=4)
        rows.append({"name": name, "ms": middle * 1e3, "ratio": middle / base, "low": low / base, "high": high / base})
    return rows


def bytes_saved(function: Function, *inputs: Tensor) -> int:
    """Bytes kept for backward beyond the inputs."""
    storages = {tensor.untyped_storage().data_ptr(): 0 for tensor in inputs}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*inputs)
    return sum(storages.values())


def operator(rounds: int) -> list[dict]:
    plain = {"appendix M": appendix_m, "pad, multiply, add": pad_multiply_add}
    own = {"kv_shift": ours, "kv_shift, eager": without_kernel}
    own["kv_shift, compiled"] = torch.compile(ours, dynamic=False)
    rows = []
    for shape, dtype in itertools.product(SHAPES, (torch.float32, torch.bfloat16)):
        rows += operator_at(shape, dtype, plain, own, rounds)
    return rows


def operator_at(
    shape: tuple[int, ...], dtype: torch.dtype, plain: dict[str, Function], own: dict[str, Function], rounds: int
) -> list[dict]:
    torch.manual_seed(0)
    x = torch.randn(shape).to(dtype).requires_grad_()
    grad, target = torch.randn(shape).to(dtype), torch.empty(shape, dtype=dtype)
    mix = torch.rand(shape[2], 2).requires_grad_()
    # The plain formulations compute in the dtype of their inputs, so theirs are cast; ours stay in float32.
    mixes = dict.fromkeys(plain, mix.detach().to(dtype).requires_grad_()) | dict.fromkeys(own, mix)
    functions = {**plain, **own}

    def both(name: str) -> None:
        torch.autograd.grad(functions[name](x, mixes[name]), (x, mixes[name]), grad)

    contestants: dict[str, Callable[[], object]] = {"copy_": lambda: target.copy_(x.detach())}
    contestants |= {name: functools.partial(both, name) for name in functions}
    rows = ratios(measure(contestants, rounds), "copy_")
    expected = pad_multiply_add(x.detach().double(), mix.detach().double())
    for row in rows:
        row |= {"part": "operator", "shape": shape, "dtype": str(dtype).removeprefix("torch.")}
        if (name := row["name"]) in functions:
            y = functions[name](x, mixes[name]).detach()
            row["worst error"] = float(((y - expected).abs() / (expected.abs() + 1)).max())
            row["MiB saved"] = bytes_saved(functions[name], x, mixes[name]) / 2**20
    return rows


def small_llamas() -> dict[str, torch.nn.Module]:
    """Transformers' own Llama and ours, in one size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM

    size = {
        "vocab_size": 1024,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "max_position_embeddings": 1024,
    }
    torch.manual_seed(0)
    return {
        "transformers' Llama": LlamaForCausalLM(LlamaConfig(**size)),
        "without shift": KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**size, shift_targets=())),
        "kv shift": KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**size)),
    }


def training(rounds: int) -> list[dict]:
    from kvshift import param_groups

    ids = torch.randint(1024, (8, 512))

    def step_of(model: torch.nn.Module) -> Callable[[], object]:
        optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))

        def step() -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    contestants = {name: step_of(model) for name, model in small_llamas().items()}
    rows = ratios(measure(contestants, rounds), "transformers' Llama")
    return [{"part": "training", "shape": (8, 512), **row} for row in rows]


def decoding(rounds: int) -> list[dict]:
    prompt = torch.randint(1024, (1, 16))
    tokens = 64

    def generation(model: torch.nn.Module) -> Callable[[], object]:
        model.eval()
        return lambda: model.generate(
            prompt, do_sample=False, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0
        )

    contestants = {name: generation(model) for name, model in small_llamas().items()}
    rows = ratios(measure(contestants, rounds), "transformers' Llama")
    return [{"part": "decoding", "shape": (1, tokens), **row, "ms": row["ms"] / tokens} for row in rows]


def table(rows: list[dict]) -> str:
    lines = ["| part | shape | dtype | contestant | ms | multiple of the first | quartiles | MiB saved | worst error |"]
    lines.append("|---|---|---|---|---:|---:|---:|---:|---:|")
    for row in rows:
        saved = f"{row['MiB saved']:.1f}" if "MiB saved" in row else ""
        error = f"{row['worst error']:.1e}" if "worst error" in row else ""
        lines.append(
            f"| {row['part']} | {row['shape']} | {row.get('dtype', 'float32')} | {row['name']} | {row['ms']:.3f} "
            f"| {row['ratio']:.3f} | {row['low']:.3f} to {row['high']:.3f} | {saved} | {error} |"
        )
    return "\n".join(lines)


def hardware() -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "kernel": cpu_refusal(torch.empty(0), 2) or "built",
        "commit": commit.stdout.strip() or None,
        "date": time.strftime("%Y-%m-%d"),
    }


def keep_memory() -> bool:
    """Have the C library keep freed memory, as the allocators do that PyTorch recommends for a CPU.

    glibc hands large blocks back to the system at once, and taking new pages then costs more than what is measured.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # not glibc
        return False
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt(mmap_threshold, 2**30) and mallopt(trim_threshold, 2**31 - 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="measurements of each contestant (default: 30)")
    parser.add_argument("--only", default="operator,training,decoding", help="parts to run, separated by commas")
    parser.add_argument("--system-malloc", action="store_true", help="leave the allocator of the C library as it is")
    parser.add_argument("--output", type=Path, help="append the rows to this file as JSON lines")
    arguments = parser.parse_args()
    kept = not arguments.system_malloc and keep_memory()
    parts = {"operator": operator, "training": training, "decoding": decoding}
    rows = []
    for part in arguments.only.split(","):
        if part not in parts:
            parser.error(f"--only must name parts out of {', '.join(parts)}; got {part!r}")
        rows += parts[part](arguments.rounds)
    machine = {**hardware(), "memory kept": kept}
    print(table(rows))
    print(json.dumps(machine))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        with arguments.output.open("a") as file:
            for row in rows:
                file.write(json.dumps({**row, "hardware": machine}) + "\n")


if __name__ == "__main__":
    main()
