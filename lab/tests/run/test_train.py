"""The files that a run leaves, its command, and options that are refused before anything is written."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from math import inf as INF
from math import nan as NAN
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab import cli
from kvshift_lab.core.errors import LabError
from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.packing import collate
from kvshift_lab.data.text import load_text_data
from kvshift_lab.run.train import train
from kvshift_lab.run.train_config import OptimizerConfig, TrainConfig
from kvshift_lab.run.trainer import sequence_losses, summarize

from ..run_cases import LENGTH, assert_same_run, metrics, result, tiny


def test_lines(finished):
    lines = metrics(finished, times=True)
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, 13))
    assert [line["step"] for line in lines if line["kind"] == "eval"] == [5, 10, 12]
    for line in lines:
        if line["kind"] == "train":
            assert line.keys() == {
                *("kind", "step", "tokens", "loss", "learning_rate", "grad_norm", "step_seconds", "seconds")
            }
            assert line["tokens"] == line["step"] * 4 * LENGTH
            assert 0 < line["step_seconds"] < line["seconds"]
        if line["kind"] == "eval":
            assert line.keys() == {"kind", "step", "tokens", "loss", "loss_stderr", "perplexity", "rows"}
            assert line["perplexity"] == pytest.approx(math.exp(line["loss"]))
            assert line["rows"] == 11
    layers = [line for line in lines if line["kind"] == "coefficients"]
    assert [(line["step"], line["layer"]) for line in layers] == [(s, n) for s in (5, 10, 12) for n in (0, 1)]
    assert all(np.shape(line[name]) == (2, 2) for line in layers for name in ("alpha", "beta"))


def test_coefficients_are_those_of_the_model(finished):
    model = KVShiftLlamaForCausalLM.from_pretrained(finished / "model")
    for line in metrics(finished, "coefficients")[-2:]:
        shift = model.model.layers[line["layer"]].self_attn.shift
        assert (line["alpha"], line["beta"]) == (shift.alpha.tolist(), shift.beta.tolist())


def test_coefficients_in_force_and_of_queries(corpus, tmp_path):
    train(tiny(corpus, tmp_path, model={"shift_constraint": "gate", "shift_targets": ("q", "v")}, steps=1))
    for line in metrics(tmp_path, "coefficients"):
        assert line.keys() == {"kind", "step", "layer", "beta", "gamma"}
        for now, before in line["beta"] + line["gamma"]:
            assert 0 < now < 1
            assert now + before == pytest.approx(1)


def test_result_is_that_of_the_saved_model(finished, corpus):
    """The losses of each sequence are recomputed with model and tokenizer as a user loads them."""
    values = result(finished)
    model = KVShiftLlamaForCausalLM.from_pretrained(finished / "model").eval()
    assert model.config.use_cache
    tokenizer = AutoTokenizer.from_pretrained(finished / "model")
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert not list(finished.rglob("model/*.bin"))
    data = load_text_data(tiny(corpus, finished).data, seed=0, tokenizer_folder=finished / "tokenizer")
    assert len(tokenizer) == len(data.tokenizer) == model.config.vocab_size == 281
    for number in range(11):
        row = collate([data.validation[number]])
        with torch.no_grad():
            loss = model(**row).loss.item()
        assert values["eval_losses_per_row"][number] == pytest.approx(loss, rel=1e-5)
    assert values["eval_tokens_per_row"] == [LENGTH - 1] * 11
    assert values["eval_loss"] == pytest.approx(np.mean(values["eval_losses_per_row"]))
    stderr = np.std(values["eval_losses_per_row"], ddof=1) / math.sqrt(11)
    assert values["eval_loss_stderr"] == pytest.approx(stderr)
    assert values["steps"] == 12
    assert values["tokens"] == 12 * 4 * LENGTH
    assert values["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert values["shift_parameters"] == 2 * 2 * 2 * 2
    assert values["train_loss"] == metrics(finished, "train")[-1]["loss"]
    assert json.loads((finished / "result.json").read_text())["peak_memory_bytes"] > 2**20


def test_losses_of_sequences_by_hand():
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.125, 0.5, 0.375], [1.0, 1.0, 1.0]]]))
    labels = torch.tensor([[0, 1, 0]])
    sums, tokens = sequence_losses(logits, labels)
    assert sums.dtype == torch.float64
    assert sums.tolist() == pytest.approx([math.log(4) + math.log(8)])
    assert tokens.tolist() == [2]
    sums, tokens = sequence_losses(logits, torch.tensor([[0, 1, -100]]))
    assert sums.tolist() == pytest.approx([math.log(4)])
    assert tokens.tolist() == [1]


def test_summary_by_hand():
    even = summarize(np.array([2.0, 6.0, 4.0]), np.array([2, 2, 2]))  # the means are 1, 3, 2
    assert even == pytest.approx({"loss": 2.0, "loss_stderr": 1 / math.sqrt(3), "perplexity": math.exp(2), "rows": 3})
    uneven = summarize(np.array([3.0, 5.0]), np.array([1, 3]))
    assert uneven["loss"] == 2.0
    assert uneven["loss_stderr"] == pytest.approx(math.sqrt(2) / (2 * math.sqrt(2)))  # the residuals are 1 and -1
    assert "loss_stderr" not in summarize(np.array([3.0]), np.array([2]))


def test_environment(finished):
    values = json.loads((finished / "environment.json").read_text())
    assert values["versions"]["torch"].startswith(torch.__version__.split("+")[0])
    assert values["hardware"]["memory_bytes"] > 2**28
    assert values["hardware"]["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert values["started"].endswith("+00:00")
    assert "continued" not in values


def test_config_file_of_another_model(finished, corpus, tmp_path):
    """The config.json of a saved model defines a model, and options beside it change single fields."""
    config = finished / "model" / "config.json"
    train(tiny(corpus, tmp_path, model={"config": config, "hidden_size": None, "qk_norm": True}, steps=1))
    model = KVShiftLlamaForCausalLM.from_pretrained(tmp_path / "model")
    assert (model.config.hidden_size, model.config.qk_norm) == (24, True)


def test_tensorboard(corpus, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny(corpus, tmp_path, report_to=("tensorboard",), steps=3, eval_every=2))
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [2, 3]
    ours = [line["loss"] for line in metrics(tmp_path, "train")]
    assert [event.value for event in events.Scalars("train/loss")] == pytest.approx(ours)


def test_a_run_without_a_checkpoint_begins_again_in_tensorboard_too(corpus, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny(corpus, tmp_path, report_to=("tensorboard",), steps=3)
    train(config)
    for path in tmp_path.iterdir():
        if path.name not in ("config.json", "environment.json", "tokenizer", "tensorboard"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    train(config)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]


def test_a_tokenizer_whose_ids_have_a_gap(finished, corpus, tmp_path):
    folder = shutil.copytree(finished / "tokenizer", tmp_path / "tokenizer")
    values = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = values["model"]["vocab"]
    vocabulary["a"] = 999
    (folder / "tokenizer.json").write_text(json.dumps(values))
    train(tiny(corpus, tmp_path / "run", data={"tokenizer": str(folder)}, steps=1))
    model = KVShiftLlamaForCausalLM.from_pretrained(tmp_path / "run" / "model")
    assert model.config.vocab_size == 1000


def test_command_line(corpus, finished, tmp_path):
    """Command-line options give the same run."""
    out = tmp_path / "run"
    command = f"train --out {out} --data.corpus {corpus} --data.vocab-size 281 --data.sequence-length {LENGTH} "
    command += "--model.hidden-size 24 --model.num-attention-heads 2 --steps 12 --batch-size 4 --eval-rows 11 "
    command += "--eval-every 5 --save-every 4 --log-every 1 --device cpu --report-to"
    assert cli.main(command.split()) == 0
    assert result(out) == result(finished)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_run_after_its_step(corpus, tmp_path, number, code):
    """Ctrl-C, or SIGTERM as from a scheduler, gives one line, its exit code and a complete checkpoint."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "kvshift_lab", "train", "--out", str(out), "--data.corpus", str(corpus)]
    command += f"--data.vocab-size 281 --data.sequence-length {LENGTH} --steps 100000 --log-every 1".split()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        deadline = time.monotonic() + 100
        while time.monotonic() < deadline and process.poll() is None:
            if (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size:
                break
            time.sleep(0.05)
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    finally:
        process.kill()
    assert process.returncode == code, said
    assert "Traceback" not in said
    step = metrics(out, "train")[-1]["step"]
    assert f"kvshift train: stopped after step {step}; checkpoint-{step} is complete" in said
    assert (out / f"checkpoint-{step}" / "complete").exists()


def test_the_record_of_a_run_is_a_file_of_its_options(finished, tmp_path, capsys):
    record = str(finished / "config.json")
    assert cli.main(["train", "--config", record, "--out", str(tmp_path / "again")]) == 0
    assert_same_run(tmp_path / "again", finished)
    capsys.readouterr()
    assert cli.main(["compare", "--config", record, "--out", str(finished)]) == 2
    assert f"out: {finished} holds a run of kvshift train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"seed": -1}, "seed must be between 0 and"),
        ({"eval_rows": 0}, "eval_rows must be 1 or more, or None, got 0"),
        ({"tokens_per_step": 149}, "tokens_per_step must be a multiple of 148 .* got 149"),
        ({"device": "cuda"}, "device is cuda, but PyTorch sees no GPU here"),
        ({"report_to": ("abacus",)}, r"report_to must name installed trackers \(.*tensorboard.*\), got 'abacus'"),
        ({"model": {"size": "3B"}}, "model.size must be one of 0.2B, .*19B, got '3B'"),
        ({"model": {"size": "1.5B", "config": Path("x.json")}}, "cannot both be given"),
        ({"model": {"config": Path("x.json")}}, "model.config: x.json cannot be read as JSON"),
        ({"model": {"hidden_size": 25}}, r"model.hidden_size must be a multiple of num_attention_heads \(2\), got 25"),
        ({"model": {"hidden_size": 2**40}}, r"model.hidden_size must be a whole number .*, got 1099511627776"),
        ({"model": {"hidden_size": 6, "num_attention_heads": 2}}, r"must be even, for the rotary embedding; got 6 / 2"),
        ({"model": {"num_attention_heads": 4, "num_key_value_heads": 3}}, "num_key_value_heads"),
        ({"model": {"shift_window": 1}}, "shift_window must be an integer of at least 2, got 1"),
        ({"model": {"shift_constraint": "gate", "shift_init": "identity"}}, "shift_init"),
        ({"model": {"variant": "smeared"}}, r"model\.variant: there is no variant 'smeared'; did you mean smear\?"),
        ({"model": {"vocab_size": 280}}, "model.vocab_size must be at least 281, .* of the tokenizer, got 280"),
        ({"data": {"streaming": True}, "data_workers": 2}, "data_workers must be 0 or 1 with data.streaming, got 2"),
        ({"data": {"vocab_size": 300, "tokenizer": "t"}}, "vocab_size is 300, but has no effect with data.tokenizer t"),
        *(
            ({"data": {"validation_fraction": 0.2, name: value}}, f"is 0.2, but has no effect with data.{name} {value}")
            for name, value in (("validation", "v.txt"), ("streaming", True))
        ),
    ],
    ids=str,
)
def test_options_that_cannot_be(corpus, tmp_path, change, said, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LabError, match=said) as caught:
        train(tiny(corpus, tmp_path / "run", **change))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run" / "config.json").exists()


def test_the_record_of_a_run_that_was_started_from_a_model_can_be_repeated():
    """It names the tokenizer of that model, beside the vocabulary that was given and had no effect."""
    TrainConfig(out=Path(), init_from="m", data=DataConfig(tokenizer="m", vocab_size=300)).check()


POSITIVE, NOT_NEGATIVE = ("learning_rate", "epsilon"), ("clip_norm", "weight_decay", "shift_lr_multiplier")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"learning_rate": 0.0}, "optimizer.learning_rate must be more than 0"),
        *(({name: INF}, f"optimizer.{name} must be more than 0 and finite, got inf") for name in POSITIVE),
        *(({name: INF}, f"optimizer.{name} must be 0 or more, and finite, got inf") for name in NOT_NEGATIVE),
        ({"clip_norm": NAN}, "optimizer.clip_norm must be 0 or more, and finite, got nan"),
        ({"beta2": 1.0}, "optimizer.beta2 must be at least 0, less than 1, got 1.0"),
        ({"schedule": "wsd", "warmup_steps": 11}, "optimizer.warmup_steps must be at most 10, before the decay"),
        ({"schedule": "wsd", "decay_fraction": 1.0}, "optimizer.warmup_steps must be at most 0, .*, got 1"),
        ({"min_lr_ratio": 2.0}, "optimizer.min_lr_ratio must be between 0 and 1"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay must be 0 or more"),
        ({"min_lr_ratio": 0.1}, "optimizer.min_lr_ratio is 0.1, but schedule constant has no decay"),
        ({"schedule": "cosine", "decay_fraction": 0.5}, "optimizer.decay_fraction is 0.5, but schedule cosine"),
    ],
    ids=str,
)
def test_optimizers_that_cannot_be(change, said):
    with pytest.raises(LabError, match=said):
        TrainConfig(out=Path(), steps=12, optimizer=OptimizerConfig(**change)).check()
