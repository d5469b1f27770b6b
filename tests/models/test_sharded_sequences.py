"""In two processes that get parts of sequences, every model with a shift raises an error that names the reason."""

import pytest

from ..worker_processes import run_workers


@pytest.mark.slow
def test_every_model_refuses(tmp_path):
    arguments = ["-W", "ignore", "-m", "tests.models.sharded_sequences_worker"]
    arguments += [str(tmp_path / "rendezvous"), str(tmp_path)]
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}  # accelerate requires it; nothing is opened there
    outputs = run_workers(2, arguments, **address)
    assert all(output.splitlines()[-1] == "passed" for output in outputs), "\n".join(outputs)
