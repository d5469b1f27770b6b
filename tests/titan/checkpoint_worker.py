"""One process of a torchtitan run that saves or loads checkpoints, is killed or trains; see `test_checkpoints.py`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.tensor import DTensor

from tests.titan.parity_worker import drawn_weights, give_weights, whole
from tests.titan.start_weights import start_weights
from tests.titan.tiny import LENGTH, packed_rows, recorded_trainer_config, tiny_trainer_config


def trainer_config(folder: Path, steps: int, **given: Any) -> Any:
    config = tiny_trainer_config(str(folder), dtype="float32", **given)
    config.training.steps = steps
    config.checkpoint.enable, config.checkpoint.interval = True, 1
    return config


def trainer_of(folder: Path, steps: int, **given: Any) -> Any:
    return trainer_config(folder, steps, **given).build()


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: whole(x) for part in trainer.model_parts for name, x in part.state_dict().items()}


def save(folder: Path, **given: Any) -> None:
    """Train two steps and save the weights after them."""
    trainer = trainer_of(folder, 2, **given)
    trainer.train()
    state = weights(trainer)
    if dist.get_rank() == 0:
        torch.save(state, folder / "weights.pt")
    dist.barrier()
    trainer.close()


def load(folder: Path, **given: Any) -> None:
    """Check that these processes load the weights of `save`; a single process also saves the logits of packed rows."""
    trainer = trainer_of(folder, 4, **given)
    assert trainer.checkpointer.load(step=2)
    assert trainer.step == 2
    expected = torch.load(folder / "weights.pt", weights_only=True)
    state = weights(trainer)
    assert set(state) == set(expected)
    assert all(torch.equal(x, expected[name]) for name, x in state.items())
    if dist.get_world_size() == 1:
        keep_logits(trainer, folder)
    dist.barrier()
    trainer.close()


def keep_logits(trainer: Any, folder: Path) -> None:
    """Save packed rows and their logits."""
    (model,) = trainer.model_parts
    tokens, _, positions = packed_rows(9)
    with torch.no_grad():
        logits = model(tokens, positions=positions, attention_masks=model.get_attention_masks(positions))
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    torch.save({"tokens": tokens, "positions": positions, "logits": logits}, folder / "logits.pt")


def save_drawn(folder: Path, **given: Any) -> None:
    """Save random weights, including norms and coefficients, as a checkpoint of step 2, and their logits."""
    trainer = trainer_of(folder, 2, **given)
    give_weights(trainer, drawn_weights(trainer))
    trainer.checkpointer.save(2)
    torch.save(weights(trainer), folder / "weights.pt")
    keep_logits(trainer, folder)
    trainer.close()


def start_in_hf(folder: Path, initial: Path, **given: Any) -> None:
    """Start a run from `initial`, a folder of transformers; save the weights before loading and at the first step."""
    config = trainer_config(folder, 1, **given)
    config.checkpoint.initial_load_in_hf, config.checkpoint.initial_load_path = True, str(initial)
    trainer = config.build()
    kept = {"drawn": weights(trainer)}
    stock = trainer.forward_backward_step

    def step(**kwargs: Any) -> Any:
        kept["started"] = weights(trainer)
        return stock(**kwargs)

    trainer.forward_backward_step = step
    trainer.train()
    if dist.get_rank() == 0:
        torch.save(kept, folder / "start.pt")
    dist.barrier()
    trainer.close()


def killed(folder: Path, **given: Any) -> None:
    """Kill the run while the second checkpoint is written: the weights are in files, but its metadata is missing."""
    stock, finished = FileSystemWriter.finish, []

    def finish(self: Any, *args: Any, **kwargs: Any) -> None:
        if finished:
            os.kill(os.getpid(), signal.SIGKILL)
        finished.append(True)
        stock(self, *args, **kwargs)

    FileSystemWriter.finish = finish
    trainer_of(folder, 3, **given).train()
    raise AssertionError("not killed")


def resumed(folder: Path, **given: Any) -> None:
    """Resume from the first checkpoint, the last complete one, and train to the end."""
    trainer = trainer_of(folder, 3, **given)
    assert trainer.checkpointer.load()
    assert trainer.step == 1, trainer.step
    trainer.close()
    trainer = trainer_of(folder, 3, **given)
    trainer.train()
    assert trainer.step == 3
    trainer.close()


def losses(folder: Path) -> None:
    """Save the losses of torchtitan on the recorded steps of `kvshift train`."""
    trainer = recorded_trainer_config(str(folder)).build()
    adapter = trainer.config.model_spec.state_dict_adapter(trainer.model_config, None)
    shapes = {name: x.shape for name, x in adapter.to_hf(weights(trainer)).items()}
    give_weights(trainer, adapter.from_hf(start_weights(shapes)))
    found: list[float] = []
    stock = trainer.forward_backward_step

    def record(**kwargs: Any) -> Any:
        loss = stock(**kwargs)
        found.append(float(whole(loss)))
        return loss

    trainer.forward_backward_step = record
    trainer.train()
    trainer.close()
    (folder / "losses.json").write_text(json.dumps(found))


def main(folder: Path, what: str, axes: Mapping[str, Any]) -> None:
    assert LENGTH % 256 == 0  # required by context parallelism of degree 2
    globals()[what](folder, **axes)
    if dist.is_initialized():
        dist.destroy_process_group()
