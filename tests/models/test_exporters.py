"""transformers.exporters exports a prompt and a token after it; the programs compute what the model computes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from .llama.tiny import random_tokens
from .registry import MODELS, RETROFITTED

dynamo = pytest.importorskip("transformers.exporters.exporter_dynamo")
utils = pytest.importorskip("transformers.exporters.utils")

NAMES = ["Llama, queries too, window 4", "GPT-2", "Baichuan-M1", *RETROFITTED]


def parts_of(model: Any) -> dict[str, tuple[Any, dict[str, Any]]]:
    ids = random_tokens(2, 6)
    return utils.decompose_for_generation(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


def export(part: Any, inputs: dict[str, Any]) -> Any:
    exported = dynamo.DynamoExporter().export(part, copy.deepcopy(inputs), config=dynamo.DynamoConfig(dynamic=False))
    return getattr(exported, "program", exported).module()


def tensors(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the inputs without flags, which a program does not take."""
    return {name: value for name, value in copy.deepcopy(inputs).items() if name not in ("use_cache", "return_dict")}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if i else []) for i, name in enumerate(NAMES)]
)
def test_prompt_and_next_token(name):
    parts = parts_of((MODELS | RETROFITTED)[name](torch.float32))
    assert list(parts) == ["prefill", "decode"]
    for part, inputs in parts.values():
        expected = utils.get_leaf_tensors(part(**copy.deepcopy(inputs)))
        found = utils.get_leaf_tensors(export(part, inputs)(**tensors(inputs)))
        assert sorted(found) == sorted(expected)
        for leaf, value in expected.items():
            kept = found[leaf]
            if leaf.endswith((".keys", ".values")):  # a program keeps more than an attention window, as of stock models
                kept = kept[:, :, -value.shape[2] :]
            torch.testing.assert_close(kept, value, msg=lambda text, leaf=leaf: f"{leaf}: {text}")


def test_a_program_refuses_documents_that_its_cache_would_not_keep_apart():
    part, inputs = parts_of(MODELS["Llama"](torch.float32))["prefill"]
    program = export(part, inputs)
    restarting = torch.tensor([[0, 1, 2, 0, 1, 2]]).expand(2, -1)
    with pytest.raises(RuntimeError, match="position_ids must not restart within a row"):
        program(**tensors(inputs) | {"position_ids": restarting})
