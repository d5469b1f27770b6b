"""The program that a page runs: coefficients are inputs, and the attention of every head is an output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvshift_lab.commands.explore import explorer_model
from kvshift_lab.commands.explore.explorer_model import ExplorerModel, check_explorer_program, write_explorer_program
from kvshift_lab.core.errors import RunFailedError
from kvshift_lab.run.loading import load_weights
from tests.models.llama.tiny import tiny_model

from ...generation_cases import save_model


def attentive_model(**options: Any) -> Any:
    """Return a model that outputs attention probabilities."""
    model = tiny_model(**options)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("constraint", ["free", "gate", "clamp"])
def test_coefficients_are_arguments(constraint: str):
    """With its own coefficients a model is unchanged; with others, it computes the same as a model that has them."""
    model = attentive_model(shift_constraint=constraint)
    ids = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(ids, output_attentions=True, use_cache=False)
        watched = ExplorerModel(model)
        own = watched.coefficients()
        for found in (watched(ids), watched(ids, own)):
            assert torch.equal(found["logits"], before.logits)
            assert len(found["attention"]) == len(before.attentions) == 2
            assert all(map(torch.equal, found["attention"].values(), before.attentions))
        identity = {n: {name: torch.tensor([[1.0, 0.0]]).expand_as(x) for name, x in c.items()} for n, c in own.items()}
        unshifted = watched(ids, identity)["logits"]
        assert not torch.equal(unshifted, before.logits)
        vanilla = attentive_model(shift_targets=())
        assert vanilla.load_state_dict(model.state_dict(), strict=False).missing_keys == []
        torch.testing.assert_close(vanilla(ids).logits, unshifted)


def test_a_model_without_shift(tmp_path: Path):
    model = load_weights(save_model(tmp_path / "model", LlamaForCausalLM), attn_implementation="eager")
    watched = ExplorerModel(model)
    assert watched.coefficients() == {}
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert watched(ids)["attention"]["1"].shape == (1, 5, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_the_program_computes_what_the_model_does(inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A small program contains its weights; a large one is not simplified, and has its weights in a second file."""
    monkeypatch.setattr(explorer_model, "_INSIDE", 1e9 if inside else 0)
    watched = ExplorerModel(attentive_model(num_hidden_layers=1))
    write_explorer_program(watched, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").exists() == (not inside)
    prompts = [torch.arange(3, 3 + length) for length in (1, 7)]
    assert check_explorer_program(watched, tmp_path / "model.onnx", prompts) < 1e-4
    with torch.no_grad():
        watched.model.lm_head.weight.neg_()
    with pytest.raises(RunFailedError, match="in the exported program"):
        check_explorer_program(watched, tmp_path / "model.onnx", prompts)
