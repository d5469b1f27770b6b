"""Checkpoints of torchtitan are loaded by other numbers of processes, by transformers and after a kill."""

from __future__ import annotations

import itertools
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

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


def assert_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], x) for name, x in expected.items())


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder with a checkpoint of two tensor-parallel processes."""
    folder = tmp_path_factory.mktemp("saved")
    start(2, folder, "save", tensor_parallel_degree=2)
    return folder


@pytest.fixture(scope="module")
def loaded(saved: Path) -> Path:
    """The same folder after one process has loaded the checkpoint and saved its logits."""
    start(1, saved, "load")
    return saved


def test_a_checkpoint_of_tensor_parallelism_loads_on_fsdp_and_context_parallelism(saved: Path):
    start(4, saved, "load", context_parallel_degree=2, context_parallel_load_balancer="headtail")


@pytest.fixture(scope="module", params=["llama3", "qwen3"])
def family(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family: str, request, tmp_path_factory) -> Path:
    """A folder with step-2, its weights and its logits. Those of Llama 3 are trained, those of Qwen 3 random."""
    if family == "llama3":
        return request.getfixturevalue("loaded")
    folder = tmp_path_factory.mktemp("drawn")
    start(1, folder, "save_drawn", family=family)
    return folder


@pytest.fixture(scope="module")
def exported(family: str, checkpoint: Path) -> Path:
    """The same weights as a folder of transformers."""
    config = tiny_trainer_config(str(checkpoint), family=family)
    export_checkpoint(config, checkpoint / "checkpoint/step-2", checkpoint / "hf")
    return checkpoint / "hf"


def test_a_checkpoint_becomes_a_model_of_transformers(family: str, checkpoint: Path, exported: Path):
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()
    assert model.config.model_type == {"llama3": "kvshift_llama", "qwen3": "kvshift_qwen3"}[family]
    kept = torch.load(checkpoint / "logits.pt", weights_only=True)
    close = {"rtol": 0, "atol": 1e-5 * kept["logits"].abs().max().item()}  # the maxima are 0.4 and 8
    with torch.no_grad():
        packed = model(input_ids=kept["tokens"], position_ids=kept["positions"], use_cache=False).logits
        torch.testing.assert_close(packed, kept["logits"], **close)
        for row, positions in enumerate(kept["positions"]):
            bounds = [*(positions == 0).nonzero().flatten().tolist(), LENGTH]
            for first, end in itertools.pairwise(bounds):
                alone = model(input_ids=kept["tokens"][row : row + 1, first:end], use_cache=False).logits[0]
                torch.testing.assert_close(alone, kept["logits"][row, first:end], **close)


def test_the_adapter_goes_both_ways(family: str, checkpoint: Path, exported: Path, tmp_path):
    """The round trip is exact, and the exported folder holds the converted weights."""
    spec = tiny_trainer_config(str(tmp_path), family=family).model_spec
    adapter = spec.state_dict_adapter(spec.model, None)
    state = torch.load(checkpoint / "weights.pt", weights_only=True)
    converted = adapter.to_hf(dict(state))
    assert converted["model.layers.1.self_attn.shift.alpha"].shape == (2, 2)
    assert len(converted) == {"llama3": 2 * 11 + 3, "qwen3": 2 * 13 + 2}[family]  # Qwen 3 has QK-norms and a tied head
    assert_same_bits(load_file(exported / "model.safetensors"), converted)
    assert_same_bits(adapter.from_hf(dict(converted)), state)


@pytest.mark.parametrize(("processes", "axes"), [(1, {}), (2, {}), (2, {"tensor_parallel_degree": 2})])
def test_a_run_starts_from_a_folder_of_transformers(
    family: str, checkpoint: Path, exported: Path, processes: int, axes: dict[str, Any], tmp_path
):
    start(processes, tmp_path, "start_in_hf", initial=exported, family=family, **axes)
    kept = torch.load(tmp_path / "start.pt", weights_only=True)
    expected = torch.load(checkpoint / "weights.pt", weights_only=True)
    assert_same_bits(kept["started"], expected)
    assert not any(torch.equal(kept["drawn"][name], x) for name, x in expected.items())


def test_a_run_that_is_killed_while_it_saves_goes_on_from_the_last_whole_checkpoint(tmp_path):
    fork_workers(1, checkpoint_worker.main, tmp_path, "killed", {}, exit_code=-signal.SIGKILL, **address())
    second = tmp_path / "checkpoint/step-2"
    assert list(second.glob("*.distcp")), "nothing of the second checkpoint was written"
    assert not (second / ".metadata").exists()
    start(1, tmp_path, "resumed")
