"""One of several processes that each compute a part of a torchtitan step; see `test_parity.py`.

A single process saves the weights and gradients of every model in a folder; several processes compare with them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # imported once for all forked processes
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional
from torch.distributed.tensor import DTensor, distribute_tensor

from kvshift import ShiftOptions
from kvshift.layers import halo
from tests.titan.tiny import ROWS, TINY_LLAMA, tiny_trainer_config

from torchtitan.distributed.context_parallel import api as context_parallel  # isort: skip  # after on_cpu

from kvshift.integrations.titan.shifted_gqa import TitanShift, find_shifts  # isort: skip  # imports torchtitan

MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen": {"family": "qwen3"},
    "llama, window 3": {"options": ShiftOptions(window=3)},
    "llama, q, gate": {"options": ShiftOptions(targets=("q", "k", "v"), constraint="gate")},
    "llama, 512 tokens": {"length": 512},  # context parallelism needs 128 tokens per rank
    "llama, float32": {"dtype": "float32"},
    "one layer, float32": {"dtype": "float32", "model": TINY_LLAMA | {"num_hidden_layers": 1}},
}


def cp(degree: int, layout: str | None) -> dict[str, Any]:
    return {"context_parallel_degree": degree, "context_parallel_load_balancer": layout}


TP = {"tensor_parallel_degree": 2}
PIPELINE: dict[str, Any] = {"pipeline_parallel_degree": 2, "pipeline_parallel_microbatch_size": 2}
ONE_F_ONE_B = PIPELINE | {"pipeline_parallel_schedule": "1F1B"}
HEAD_TAIL, CONTIGUOUS = cp(2, "headtail"), cp(2, None)

# For each number of processes, by name of the case: a model, and arguments of `tiny_trainer_config`.
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
        "PP 1F1B": ("llama", ONE_F_ONE_B),
        "PP interleaved": ("llama", PIPELINE | {"pipeline_parallel_schedule": "Interleaved1F1B"}),
        "Qwen 3, TP": ("qwen", TP),
        "Qwen 3, CP": ("qwen", HEAD_TAIL),
        "CP, float32": ("llama, float32", HEAD_TAIL),
        "FSDP, compiled": ("one layer, float32", {"compile_model": True}),
        "CP, compiled": ("one layer, float32", HEAD_TAIL | {"compile_model": True}),
    },
    4: {
        "CP 4 head-tail": ("llama, 512 tokens", cp(4, "headtail")),
        "CP 4 contiguous": ("llama, 512 tokens", cp(4, None)),
        "FSDP 2 x TP 2": ("llama", TP),
        "FSDP 2 x CP 2": ("llama", HEAD_TAIL),
        "CP 2 x TP 2": ("llama", HEAD_TAIL | TP),
        "PP 2 x CP 2 head-tail": ("llama", ONE_F_ONE_B | HEAD_TAIL | {"pipeline_parallel_microbatch_size": 4}),
        "PP 2 x CP 2 contiguous": ("llama", ONE_F_ONE_B | CONTIGUOUS | {"pipeline_parallel_microbatch_size": 4}),
        "PP 2 x TP 2": ("llama", ONE_F_ONE_B | TP),
    },
}
BROKEN = ((2, "CP head-tail"), (2, "CP contiguous"))
# These models run in float32, where a compiler may sum in another order; all others run in float64.
TOLERANCE = {"llama, float32": 1e-5, "one layer, float32": 1e-5}


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def name_of(parameter: str) -> str:
    return parameter.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")


def step(trainer: Any) -> dict[str, Tensor]:
    """Return the full gradients, of a step on the first rows, for the parameters on this rank."""
    trainer.dataloader.step = 0
    trainer.optimizers.zero_grad()
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
    """Return random weights, none of which is 0 or 1, so that every gradient matters."""
    rng = torch.Generator().manual_seed(5)
    state = {name: whole(x) for name, x in trainer.model_parts[0].state_dict().items()}
    for x in state.values():
        if x.is_floating_point():
            drawn = torch.randn(x.shape, generator=rng, dtype=torch.float64)
            x.copy_(drawn * (0.3 if x.ndim > 1 else 0.1) + (x.ndim == 1))
    return state


def difference(gradients: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, str]:
    """Return the largest difference on any rank, relative to the largest entry of that gradient, and its name."""
    found = {
        name: float((x - expected[name]).abs().max() / expected[name].abs().max()) for name, x in gradients.items()
    }
    name = max(found, key=found.__getitem__)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, (found[name], name, sorted(found)))
    seen = {name for _, _, names in everywhere for name in names}
    assert seen == set(expected), sorted(seen ^ set(expected))
    return max(everywhere)[:2]


@contextmanager
def counted_traffic() -> Iterator[dict[str, list[int]]]:
    """Count the bytes that the shift sends to each rank in forward, and the bytes that attention gathers."""
    traffic: dict[str, list[int]] = {"sent": [], "gathered": []}
    exchange, gather = functional.all_to_all_single_autograd, context_parallel.flex_cp_allgather

    def count_sent(tokens: Tensor, received: list[int], sent: list[int], group: Any) -> Tensor:
        traffic["sent"] += [number * tokens[0].nbytes for number in sent if number]
        return exchange(tokens, received, sent, group)

    def count_gathered(k: Tensor, v: Tensor, *where: Any) -> Any:
        gathered = gather(k, v, *where)
        traffic["gathered"].append(sum(x.nbytes for x in gathered) - k.nbytes - v.nbytes)
        return gathered

    sending = patch.object(functional, "all_to_all_single_autograd", count_sent)
    with sending, patch.object(context_parallel, "flex_cp_allgather", count_gathered):
        yield traffic


def run(folder: Path, model: str, given: dict[str, Any], sabotage: Sequence[Sabotage] = ()) -> dict[str, Any]:
    """Compare the gradients of a step, and of one more step for each sabotage, with those of a single process.

    Returns the largest difference and the name of its gradient, for each step, and what each rank sent for the shift
    and gathered for attention in the correct step. A single process saves weights and gradients and returns {}.
    """
    settings = {"dtype": "float64"} | MODELS[model] | given
    exact = settings["dtype"] == "float64"
    to_float = torch.Tensor.float  # torchtitan casts RoPE and cross-entropy to float32
    keep = patch.object(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else to_float(x))
    kept, found = folder / f"{model}.pt", {}
    with keep if exact else nullcontext():
        trainer = tiny_trainer_config(str(folder / "dump"), **settings).build()
        if dist.get_world_size() == 1:
            state = drawn_weights(trainer)
            give_weights(trainer, state)
            torch.save({"state": state, "gradients": step(trainer)}, kept)
        else:
            saved = torch.load(kept, weights_only=True)
            give_weights(trainer, saved["state"])
            with nullcontext({}) if given.get("compile_model") else counted_traffic() as traffic:
                gradients = step(trainer)
            found["right"] = difference(gradients, saved["gradients"])
            found["traffic"] = [None] * dist.get_world_size()
            dist.all_gather_object(found["traffic"], traffic)
            for breaks in (*sabotage, nothing) if sabotage else ():  # the last step is correct again
                with ExitStack() as broken:
                    for patched in breaks(find_shifts(trainer.model_parts)):
                        broken.enter_context(patched)
                    found[breaks.__name__] = difference(step(trainer), saved["gradients"])
    dist.barrier()
    trainer.close()
    return found


# Ways to break context parallelism ------------------------------------------------------------------------------------

Sabotage = Callable[[list[TitanShift]], list[Any]]


def _replaced(change: Callable[[Tensor], Tensor]) -> list[Any]:
    exchange = halo._exchange
    return [patch.object(halo, "_exchange", lambda *args, **kwargs: [change(x) for x in exchange(*args, **kwargs)])]


def dropped(shifts: list[TitanShift]) -> list[Any]:
    return _replaced(torch.zeros_like)


def not_differentiated(shifts: list[TitanShift]) -> list[Any]:
    return _replaced(torch.Tensor.detach)


def not_told(shifts: list[TitanShift]) -> list[Any]:
    return [patch.object(shift, "group", None) for shift in shifts]


def other_layout(shifts: list[TitanShift]) -> list[Any]:
    other = {"contiguous": "headtail", "headtail": "contiguous"}
    return [patch.object(shift, "layout", other[shift.layout]) for shift in shifts]


def documents_ignored(shifts: list[TitanShift]) -> list[Any]:
    stock = TitanShift.forward
    return [patch.object(TitanShift, "forward", lambda self, q, k, v, positions: stock(self, q, k, v, None))]


def wrong_neighbour(shifts: list[TitanShift]) -> list[Any]:
    stock = halo._chunks_of_rank
    return [patch.object(halo, "_chunks_of_rank", lambda rank, size, layout: stock(size - 1 - rank, size, layout))]


def nothing(shifts: list[TitanShift]) -> list[Any]:
    return []


SABOTAGE: tuple[Sabotage, ...] = (
    dropped,
    not_differentiated,
    not_told,
    other_layout,
    documents_ignored,
    wrong_neighbour,
)


def main(folder: Path) -> None:
    size = int(os.environ["WORLD_SIZE"])
    found, broken, traffic = {}, {}, {}
    for name, (model, given) in CASES[size].items():
        start = time.process_time()
        breaks = SABOTAGE if (size, name) in BROKEN else ()
        differences = run(folder, model, given, breaks)
        if "right" in differences:
            found[name] = (*differences.pop("right"), TOLERANCE.get(model, 1e-10))
            traffic[name] = differences.pop("traffic")
        broken[name] = {each: value for each, (value, _) in differences.items()}
        print(f"{name}: {found.get(name)}, {time.process_time() - start:.1f} s", flush=True)
    if os.environ["RANK"] == "0":
        results = {"found": found, "broken": broken, "traffic": traffic}
        (folder / f"found-{size}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
