"""Sequences and questions with models and tokenizers of transformers."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from kvshift.lab.data.tokenizers import train_bpe
from kvshift.lab.tasks.igsm import IGSMConfig, IGSMTask

from ..cases import check_shape, seeded
from .test_task import SMALL, TASKS


def test_a_tokenizer_from_a_folder(tmp_path: Path):
    words_task = IGSMTask(IGSMConfig(**SMALL))
    texts = (words_task.encoder.decode(row) for row in words_task.batch(seeded(12), 20).input_ids)
    train_bpe(texts, 600).save_pretrained(tmp_path)
    task = IGSMTask(IGSMConfig(**{**SMALL, "length": 409}, tokenizer=str(tmp_path)))
    batch = task.batch(seeded(13), 5)
    check_shape(task, batch, 5)
    assert task.end_token == 0
    for question in task.questions(seeded(14), 3):
        (encoded,) = task.encoder.encode([question.truth])
        assert question.prompt.tolist() == encoded.prompt
        assert task.judge(question, torch.tensor(encoded.solution[:-1])) == {"paper": True, "strict": True}
    values = batch.slices == 1
    assert all(re.fullmatch(r" ?\d+", task.encoder.decode(token)) for token in batch.input_ids[values])


def test_the_loss_of_a_model_is_that_of_the_output_before_each_label():
    """GPT-2 of transformers, on sequences whose labels are those of solutions."""
    task = IGSMTask(IGSMConfig(**TASKS["solutions"]))
    batch = task.batch(seeded(15), 3)
    torch.manual_seed(0)
    described = GPT2Config(
        vocab_size=task.vocab_size,
        n_positions=task.length,
        n_embd=8,
        n_layer=1,
        n_head=2,
        bos_token_id=task.end_token,
        eos_token_id=task.end_token,
    )
    found = GPT2LMHeadModel(described).eval()(input_ids=batch.input_ids, labels=batch.labels)
    labelled = batch.labels[:, 1:] != -100
    assert (labelled == (batch.slices[:, 1:] >= 0)).all()
    expected = F.cross_entropy(found.logits[:, :-1][labelled], batch.labels[:, 1:][labelled])
    torch.testing.assert_close(found.loss, expected)
