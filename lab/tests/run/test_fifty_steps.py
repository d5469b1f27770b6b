"""The losses that torchtitan is compared with are those that `kvshift train` gives today."""

from __future__ import annotations

import json

import torch

from .fifty_steps import LENGTH, RECORDED, ROWS, STEPS, fifty_steps


def test_the_recorded_steps_are_those_of_kvshift_train(tmp_path):
    found, recorded = fifty_steps(tmp_path), json.loads(RECORDED.read_text())
    losses, expected = (torch.tensor(run.pop("losses")) for run in (found, recorded))
    assert found == recorded, "python -m lab.tests.run.fifty_steps writes them anew"
    assert len(losses) == STEPS
    assert {(len(step["input_ids"]), len(step["input_ids"][0])) for step in found["steps"]} == {(ROWS, LENGTH)}
    assert any(0 in row[1:] for step in found["steps"] for row in step["position_ids"]), "no row has two documents"
    torch.testing.assert_close(losses, expected, rtol=0, atol=5e-5)
