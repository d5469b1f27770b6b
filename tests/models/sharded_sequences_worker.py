"""The program of one of two processes that get parts of sequences, see `test_sharded_sequences.py`.

RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 python -m tests.models.sharded_sequences_worker RENDEZVOUS FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.state import AcceleratorState
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention as experimental
from torch.distributed.tensor.experimental import context_parallel
from transformers import Trainer, TrainingArguments

from .llama.tiny import random_tokens, tiny_model
from .registry import MODELS, RETROFITTED
from .retrofit.tiny_families import shifted

T = 16


@contextmanager
def refused(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        message = str(error)
    else:
        raise AssertionError(f"{name}: not refused")
    for part in ("KV shift is not supported with", name, "the token before, which is in another process", "use DDP"):
        assert part in message, message


@contextmanager
def configured(config: ParallelismConfig) -> Iterator[None]:
    """The state that an `Accelerator` of two processes leaves."""
    AcceleratorState._shared_state["parallelism_config"] = config
    yield
    AcceleratorState._shared_state.clear()


@contextmanager
def module_wrapper(mesh: Any, ids: torch.Tensor) -> Iterator[None]:
    """The newer form of context parallelism, which does not replace functions."""
    experimental._context_parallel_shard(mesh, [ids], [1])
    experimental._enable_context_parallel_dispatcher()
    yield
    experimental._disable_context_parallel_dispatcher()


def every_model_refuses() -> None:
    mesh, ids = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), random_tokens(2, T)
    models = {name: build for name, build in (MODELS | RETROFITTED).items() if "no shift" not in name}
    for name, build in models.items():
        model = build()
        model(ids)  # whole sequences are right before, between and after
        part = ids.clone()
        with context_parallel(mesh, buffers=[part], buffer_seq_dims=[1]), refused("context parallelism (torch."):
            assert part.shape == (2, T // 2)
            model(part)
        with module_wrapper(mesh, ids), refused("context parallelism (torch."):
            model(ids)
        with configured(ParallelismConfig(sp_size=2)), refused("Ulysses sequence parallelism"):
            model(ids)
        model(ids)
        print(f"passed: {name}", flush=True)
    with configured(ParallelismConfig(sp_size=2)):
        tiny_model(shift_targets=())(ids)  # it shifts nothing


def trainer_is_refused(folder: Path) -> None:
    """transformers' Trainer with accelerate's context parallelism raises an error before the first step."""
    model = shifted("Qwen3", torch.float32).train()
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(8, T)]
    config = ParallelismConfig(cp_size=2)
    config._validate_accelerator = lambda accelerator: None  # accelerate supports it on GPUs only
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = TrainingArguments(
        str(folder / "out"),
        parallelism_config=config,
        per_device_train_batch_size=2,
        max_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)  # type: ignore[arg-type]
    with refused("context parallelism"):
        trainer.train()
    assert trainer.state.global_step == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def main(rendezvous: str, folder: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    every_model_refuses()
    trainer_is_refused(Path(folder))
    print("passed", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # skip teardown: gloo's threads of several groups do not always end cleanly
