"""TRL's supervised fine-tuning with packing: each document's loss equals its loss alone."""

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ..llama.checks import logits_of
from .matrix import prompts_of, sft_trainer
from .tiny_families import FAMILIES, shifted, truth_of

pytest.importorskip("trl")

LENGTHS = (5, 11, 1, 8, 2, 7, 3, 9)


def documents_of(batch: dict[str, Tensor]) -> list[slice]:
    starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), batch["input_ids"].shape[1]]
    return [slice(begin, end) for begin, end in pairwise(starts)]


@pytest.mark.parametrize(
    "options", [{"packing": True, "max_length": 16}, {"padding_free": True, "max_length": None}], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_each_documents_loss_is_its_loss_alone(family: str, options: dict, tmp_path: Path):
    model = shifted(family, torch.float32)
    truth = truth_of(model)
    trainer = sft_trainer(model, prompts_of(LENGTHS), tmp_path, per_device_train_batch_size=2, **options)
    seen = []
    for batch in trainer.get_train_dataloader():
        documents = documents_of(batch)
        assert "attention_mask" not in batch
        with torch.no_grad():
            logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits
        losses, targets = [], 0
        for document in documents:
            ids = batch["input_ids"][:, document]
            alone = logits_of(truth, ids)[0, :-1]
            packed = logits[0, document][:-1]
            for scores in (alone, packed):
                losses.append(torch.nn.functional.cross_entropy(scores, ids[0, 1:], reduction="sum"))
            torch.testing.assert_close(losses[-1], losses[-2], rtol=1e-5, atol=1e-5)
            targets += ids.shape[1] - 1
            seen.append(ids.shape[1])
        loss = trainer.compute_loss(model, dict(batch))
        torch.testing.assert_close(loss.detach(), sum(losses[::2]) / targets, rtol=1e-5, atol=1e-5)
    assert sorted(seen) == sorted(LENGTHS)


@pytest.mark.slow
def test_the_example_trains_and_saves(tmp_path: Path):
    example = Path(__file__).parents[3] / "examples" / "sft.py"
    run = subprocess.run(
        [sys.executable, example, tmp_path / "out"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].endswith("and loaded again: KVShiftLlamaForCausalLM")
