"""Train the two models of the page that explains KV shift, and draw its picture.

    python docs/induction/make.py      in the root of the repository; some minutes on a CPU

Both have one layer and learn what those of `kvshift reproduce fig01a --preset laptop` learn, from the same sequences and
at the learning rates that were best there, but for all of `STEPS`: there a run ends once it has learned. Tokens are
letters and digits, so that a reader can type them.

docs/induction/without, docs/induction/with    the models and their tokenizer
docs/figures/induction.svg                     what both answer, drawn from what they compute
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import string
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvshift.lab.core.messages import say
from kvshift.lab.runs.loading import load_weights
from kvshift.lab.training.task_training import train_task
from kvshift.recipes import fig01a
from kvshift.recipes.models import model_label

STEPS = 1500
FOLDERS = {"vanilla": "without", "kv-shift": "with"}
RECORDS = Path("results/induction/laptop.jsonl")
HERE = Path("docs/induction")


def letters(lowest_id: int, vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are single characters, with or without spaces between them."""
    known = string.ascii_letters + string.digits + "+/"
    vocabulary = {"<unk>": 0} | {letter: lowest_id + i for i, letter in enumerate(known[: vocab_size - lowest_id])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    split = pre_tokenizers.Split(Regex("."), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def best_rate(label: str) -> float:
    """The learning rate of the recorded runs of a model, which the recipe chose."""
    records = map(json.loads, RECORDS.read_text(encoding="utf-8").splitlines())
    return next(r["options"]["optimizer"]["learning_rate"] for r in records if r["label"] == label)


def train(variant: str) -> None:
    """Train one model and put it where the page finds it."""
    label = model_label(1, variant)
    (job,) = (job for job in fig01a.jobs("laptop", [0]) if job.label == label)
    config: Any = job.config
    optimizer = dataclasses.replace(config.optimizer, learning_rate=best_rate(label))
    out = Path("build/induction") / FOLDERS[variant]
    config = dataclasses.replace(config, out=out, optimizer=optimizer, steps=STEPS, stop_at=None)
    result = train_task(config)
    say(f"{label}: {result['evaluation']['accuracy']}")
    folder = HERE / FOLDERS[variant]
    shutil.rmtree(folder, ignore_errors=True)
    load_weights(out / "model").save_pretrained(folder)
    letters(config.task.lowest_id, config.task.vocab_size).save_pretrained(folder)


if __name__ == "__main__":
    for name in FOLDERS:
        train(name)
