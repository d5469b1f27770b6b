"""50 steps of torchtitan have the losses of `kvshift train`, given the same weights, rows and AdamW settings."""

from __future__ import annotations

import json

import torch

from ..worker_processes import fork_workers
from . import checkpoint_worker
from .test_checkpoints import address
from .tiny import recorded_steps


def test_50_steps_have_the_losses_of_kvshift_train(tmp_path):
    fork_workers(1, checkpoint_worker.main, tmp_path, "losses", {}, **address())
    found = json.loads((tmp_path / "losses.json").read_text())
    assert len(found) == 50
    # Half of the tolerance of 1e-4 between the two; lab/tests/run/test_fifty_steps.py checks the other half.
    torch.testing.assert_close(found, recorded_steps()["losses"], rtol=0, atol=5e-5)
