"""One of several processes that each compute a part of a step of torchtitan: see `test_parity.py`.

python -m tests.titan.parity_worker FOLDER [CASE ... or sabotage], with the environment of torchrun.

With one process it keeps, in FOLDER, the weights of every model, its loss and its gradients; with more it compares.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from kvshift import ShiftOptions
from kvshift.layers import halo
from tests.titan.tiny import ROWS, tiny_trainer_config

from kvshift.integrations.titan.shifted_gqa import shifts_of  # isort: skip  # imports torchtitan

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen": {"family": "qwen3"},
    "llama, window 3": {"options": ShiftOptions(window=3)},
    "llama, q, gate": {"options": ShiftOptions(targets=("q", "k", "v"), constraint="gate")},
    "llama, 512 tokens": {"length": 512},  # context parallelism of torchtitan wants 128 for each of its ranks
    "llama, float32": {"dtype": "float32"},
}


def cp(degree: int, layout: str | None) -> dict[str, Any]:
    return {"context_parallel_degree": degree, "context_parallel_load_balancer": layout}


TP = {"tensor_parallel_degree": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2}
HEAD_TAIL, CONTIGUOUS = cp(2, "headtail"), cp(2, None)

# By number of processes, then by name: model, and what `tiny_trainer_config` is given.
CASES: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    1: {name: (name, {}) for name in MODELS},
    2: {
        "FSDP": ("llama", {}),
        "TP": ("llama", TP),
        "CP head-tail": ("llama", HEAD_TAIL),
        "CP contiguous": ("llama", CONTIGUOUS),
        "CP, window 3": ("llama, window 3", HEAD_TAIL),
        "CP, queries and gate": ("llama, q, gate", HEAD_TAIL),
        "TP, queries and gate": ("llama, q, gate", TP),
        "CP, full checkpointing": ("llama", HEAD_TAIL | {"checkpointing": "full"}),
        "CP, selective checkpointing": ("llama", CONTIGUOUS | {"checkpointing": "selective"}),
        "PP 1F1B": ("llama", PIPELINE | {"pipeline_parallel_schedule": "1F1B"}),
        "PP interleaved": ("llama", PIPELINE | {"pipeline_parallel_schedule": "Interleaved1F1B"}),
        "Qwen 3, TP": ("qwen", TP),
        "Qwen 3, CP": ("qwen", HEAD_TAIL),
        "CP, float32": ("llama, float32", HEAD_TAIL),
        "FSDP, compiled": ("llama, float32", {"compile_model": True}),
        "CP, compiled": ("llama, float32", HEAD_TAIL | {"compile_model": True}),
    },
    4: {
        "CP 4 head-tail": ("llama, 512 tokens", cp(4, "headtail")),
        "CP 4 contiguous": ("llama, 512 tokens", cp(4, None)),
        "FSDP 2 x TP 2": ("llama", TP),
        "FSDP 2 x CP 2": ("llama", HEAD_TAIL),
        "CP 2 x TP 2": ("llama", HEAD_TAIL | TP),
    },
}
# In float32, and where a compiler sums in another order; otherwise float64.
TOLERANCE = {"llama, float32": 1e-5}


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def name_of(parameter: str) -> str:
    return parameter.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def step(trainer: Any) -> dict[str, Tensor]:
    """Gradients of one step, whole, of the parameters of this rank."""
    batches = trainer.batch_generator(trainer.dataloader)
    groups = [next(batches) for _ in range(trainer.num_pipeline_parallel_microbatches)]
    tokens = torch.tensor(ROWS * trainer.config.training.seq_len)
    inputs, labels = [group[0] for group in groups], [group[1] for group in groups]
    if not trainer.parallel_dims.pp_enabled:
        inputs, labels = inputs[0], labels[0]
    trainer.forward_backward_step(input_dict=inputs, labels=labels, global_valid_tokens=tokens)
    parameters = [each for part in trainer.model_parts for each in part.named_parameters()]
    return {name_of(name): whole(parameter.grad) for name, parameter in parameters}


def give_weights(trainer: Any, state: dict[str, Tensor]) -> None:
    for part in trainer.model_parts:
        own = part.state_dict()
        loaded = {
            name: distribute_tensor(state[name], x.device_mesh, x.placements) if isinstance(x, DTensor) else state[name]
            for name, x in own.items()
        }
        part.load_state_dict(loaded)


def drawn_weights(trainer: Any) -> dict[str, Tensor]:
    """None is 0 or 1, so that each gradient matters."""
    rng = torch.Generator().manual_seed(5)
    state = {name: whole(x) for name, x in trainer.model_parts[0].state_dict().items()}
    for x in state.values():
        if x.is_floating_point():
            drawn = torch.randn(x.shape, generator=rng, dtype=torch.float64)
            x.copy_(drawn * (0.3 if x.ndim > 1 else 0.1) + (x.ndim == 1))
    return state


def difference(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """The largest on any rank, relative to the largest number of its gradient."""
    found = {
        name: float((x - expected[name]).abs().max() / expected[name].abs().max()) for name, x in gradients.items()
    }
    name = max(found, key=found.__getitem__)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (found[name], name, sorted(found)))
    seen = {name for _, _, names in everywhere for name in names}
    assert seen == set(expected), sorted(seen ^ set(expected))
    return max(everywhere)[:2]


def run(folder: Path, model: str, given: dict[str, Any], break_shift: Any = None) -> tuple[float, str]:
    settings = {"dtype": "float64"} | MODELS[model] | given
    exact = settings["dtype"] == "float64"
    to_float = torch.Tensor.float  # torchtitan casts RoPE and cross-entropy to float32
    keep = patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))
    with keep if exact else nullcontext():
        trainer = tiny_trainer_config(str(folder / "dump"), **settings).build()
        kept = folder / f"{model}.pt"
        if dist.get_world_size() == 1:
            state = drawn_weights(trainer)
            give_weights(trainer, state)
            gradients = step(trainer)
            torch.save({"state": state, "gradients": gradients}, kept)
            result = 0.0, ""
        else:
            saved = torch.load(kept, weights_only=True)
            give_weights(trainer, saved["state"])
            broken: AbstractContextManager[Any] = nullcontext()
            if break_shift is not None:
                broken = break_shift(shifts_of(trainer.model_parts))
            with broken:
                result = difference(step(trainer), saved["gradients"])
    dist.barrier()
    trainer.close()
    return result


# Ways to break context parallelism ------------------------------------------------------------------------------------


def _replaced(change: Any) -> Any:
    exchange = halo.exchange_halo
    return patch.object(halo, "exchange_halo", lambda *args, **kwargs: [change(x) for x in exchange(*args, **kwargs)])


def dropped(shifts: Any) -> Any:
    return _replaced(torch.zeros_like)


def not_differentiated(shifts: Any) -> Any:
    return _replaced(torch.Tensor.detach)


def not_told(shifts: Any) -> Any:
    for shift in shifts:
        shift.group = None
    return nullcontext()


def other_layout(shifts: Any) -> Any:
    for shift in shifts:
        shift.layout = {"contiguous": "headtail", "headtail": "contiguous"}[shift.layout]
    return nullcontext()


def documents_ignored(shifts: Any) -> Any:
    stock = type(shifts[0]).forward
    return patch.object(type(shifts[0]), "forward", lambda self, q, k, v, positions: stock(self, q, k, v, None))


def wrong_neighbour(shifts: Any) -> Any:
    stock = halo._Division.chunks
    return patch.object(halo._Division, "chunks", lambda self, rank: stock(self, self.size - 1 - rank))


SABOTAGE = (dropped, not_differentiated, not_told, other_layout, documents_ignored, wrong_neighbour)


def main(folder: str, *names: str) -> None:
    size = int(os.environ["WORLD_SIZE"])
    found = {}
    for name, (model, given) in CASES[size].items():
        if names and name not in names:
            continue
        value, where = run(Path(folder), model, given)
        found[name] = (value, TOLERANCE.get(model, 1e-10), where)
        if os.environ["RANK"] == "0":
            print(f"{name}: {value:.1e} {where}", flush=True)
    broken = {}
    if size == 2 and (not names or "sabotage" in names):
        for layout in (HEAD_TAIL, CONTIGUOUS):
            for sabotage in SABOTAGE:
                value, where = run(Path(folder), "llama", layout, sabotage)
                broken[f"{sabotage.__name__}, {layout['context_parallel_load_balancer']}"] = value
    if os.environ["RANK"] == "0":
        Path(folder, f"found-{size}.json").write_text(json.dumps({"found": found, "broken": broken}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
