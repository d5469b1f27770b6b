"""The commands on a folder in the released layout, with a tokenizer beside the weights."""

from __future__ import annotations

import json

import pytest

from kvshift_lab.cli import main
from kvshift_lab.core.errors import LabError
from kvshift_lab.run.train import train
from kvshift_lab.run.train_config import TrainConfig
from tests.models.baichuan_m1 import reference
from tests.models.baichuan_m1.tiny import checkpoint, config_with, write

from .generation_cases import tokenizer

CONFIG = config_with(vocab_size=277, bos_token_id=0, eos_token_id=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("model"), checkpoint(CONFIG), CONFIG, shards=2)
    tokenizer().save_pretrained(folder)
    return folder


def test_generate(folder, tmp_path, capsys):
    """Each of three prompts gets the continuation that the formulas give it."""
    prompts = ["to be", "or not to be, that is the question: whether", "t"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    options = ["--max-new-tokens", "5", "--temperature", "0"]
    assert main(["generate", str(folder), "--prompts", str(tmp_path / "prompts.txt"), *options]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    weights = checkpoint(CONFIG)
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = tokenizer()(prompt)["input_ids"]
        for _ in range(5):
            tokens.append(int(reference.logits(weights, CONFIG, tokens)[-1].argmax()))
            if tokens[-1] == 0:
                break
        before = len(tokenizer().decode(tokenizer()(prompt)["input_ids"]))
        assert answer["text"] == tokenizer().decode(tokens, skip_special_tokens=True)[before:]


def test_eval(folder, tmp_path):
    """The mean loss of two documents of different lengths is that of the formulas."""
    documents = ["to be or not to be", "that is the question: whether"]
    text = tmp_path / "held_out.jsonl"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents), encoding="utf-8")
    assert main(["eval", str(folder), str(text), "--output", str(tmp_path / "eval.json")]) == 0
    (found,) = json.loads((tmp_path / "eval.json").read_text(encoding="utf-8"))["models"]
    weights, losses = checkpoint(CONFIG), []
    for document in documents:
        tokens = tokenizer()(document)["input_ids"]
        scores = reference.logits(weights, CONFIG, tokens).log_softmax(-1)
        losses += [-float(scores[place, token]) for place, token in enumerate(tokens[1:])]
    assert found["tokens"] == len(losses)
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-4)


def test_training_from_it_is_refused_by_name(folder, tmp_path):
    with pytest.raises(LabError, match="has model_type 'baichuan_m1'; expected llama, kvshift_llama"):
        train(TrainConfig(init_from=str(folder), out=tmp_path / "run"))
