"""Checkpoints of torchtitan: on other numbers of processes, in transformers, after a kill."""

from __future__ import annotations

import itertools
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from ..worker_processes import fork_workers
from . import checkpoint_worker
from .tiny import LENGTH, tiny_trainer_config

from kvshift.integrations.titan.hf_export import export_checkpoint  # isort: skip  # imports torchtitan


def address() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}


def start(processes: int, folder: Path, what: str, **axes: Any) -> None:
    fork_workers(processes, checkpoint_worker.main, folder, what, axes, **address())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """By two processes, tensor-parallel."""
    folder = tmp_path_factory.mktemp("saved")
    start(2, folder, "save", tensor_parallel_degree=2)
    return folder


@pytest.fixture(scope="module")
def loaded(saved: Path) -> Path:
    """By one process, which kept its logits."""
    start(1, saved, "load")
    return saved


def test_a_checkpoint_of_tensor_parallelism_loads_on_fsdp_and_context_parallelism(saved: Path):
    start(4, saved, "load", context_parallel_degree=2, context_parallel_load_balancer="headtail")


def test_a_checkpoint_becomes_a_model_of_transformers(loaded: Path, tmp_path):
    config = tiny_trainer_config(str(tmp_path))
    model = export_checkpoint(config, loaded / "checkpoint/step-2", tmp_path / "hf").eval()
    kept = torch.load(loaded / "logits.pt", weights_only=True)
    with torch.no_grad():
        packed = model(input_ids=kept["tokens"], position_ids=kept["positions"], use_cache=False).logits
        torch.testing.assert_close(packed, kept["logits"], rtol=0, atol=1e-5)
        for row, positions in enumerate(kept["positions"]):
            bounds = [*(positions == 0).nonzero().flatten().tolist(), LENGTH]
            for first, end in itertools.pairwise(bounds):
                alone = model(input_ids=kept["tokens"][row : row + 1, first:end], use_cache=False).logits[0]
                torch.testing.assert_close(alone, kept["logits"][row, first:end], rtol=0, atol=1e-5)


def test_the_adapter_goes_both_ways(loaded: Path, tmp_path):
    spec = tiny_trainer_config(str(tmp_path)).model_spec
    adapter = spec.state_dict_adapter(spec.model, None)
    state = torch.load(loaded / "weights.pt", weights_only=True)
    converted = adapter.to_hf(dict(state))
    assert converted["model.layers.1.self_attn.shift.alpha"].shape == (2, 2)
    assert len(converted) == 2 * 11 + 3
    back = adapter.from_hf(dict(converted))
    assert set(back) == set(state)
    assert all(torch.equal(back[name], x) for name, x in state.items())


def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_last_whole_checkpoint(tmp_path):
    fork_workers(1, checkpoint_worker.main, tmp_path, "killed", {}, exit_code=-signal.SIGKILL, **address())
    second = tmp_path / "checkpoint/step-2"
    assert list(second.glob("*.distcp")), "nothing of the second checkpoint was written"
    assert not (second / ".metadata").exists()
    start(1, tmp_path, "resumed")
