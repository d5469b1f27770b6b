"""Options that cannot be are refused by name, before anything is written that would stand in the way of better ones."""

from dataclasses import replace
from math import inf as INF
from math import nan as NAN
from pathlib import Path

import pytest

from kvshift.lab.core.errors import LabError
from kvshift.lab.training.train import train

from ..run_cases import tiny

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps": 0}, "steps must be 1 or more, got 0"),
        ({"seed": -1}, "seed must be between 0 and"),
        ({"eval_rows": 0}, "eval_rows must be 1 or more, or None, got 0"),
        ({"tokens_per_step": 149}, "tokens_per_step is 149, which is no whole multiple of 148"),
        ({"device": "cuda"}, "device is cuda, but PyTorch sees no GPU here"),
        ({"report_to": ("abacus",)}, "report_to names 'abacus'; trackers installed here: .*tensorboard"),
        ({"model": {"size": "3B"}}, "model.size must be one of 0.2B, .*19B, got '3B'"),
        ({"model": {"size": "1.5B", "config": Path("x.json")}}, "cannot both be given"),
        ({"model": {"config": Path("x.json")}}, "model.config: x.json cannot be read as JSON"),
        (
            {"model": {"hidden_size": 25, "num_attention_heads": 2}},
            r"model.hidden_size must be a multiple of num_attention_heads \(2\), got 25",
        ),
        *(
            ({"model": {name: 0}}, rf"model.{name} must be a whole number from 1 to 2\*\*31 - 1, got 0")
            for name in SIZES
        ),
        ({"model": {"hidden_size": -8}}, r"model.hidden_size must be a whole number .*, got -8"),
        ({"model": {"hidden_size": 2**40}}, r"model.hidden_size must be a whole number .*, got 1099511627776"),
        *(
            ({"model": {"rope_theta": t}}, "model.rope_theta must be more than 0 and finite")
            for t in (-1.0, 0.0, INF, NAN)
        ),
        ({"model": {"hidden_size": 6, "num_attention_heads": 2}}, r"must be even, for the rotary embedding; got 6 / 2"),
        ({"model": {"num_attention_heads": 4, "num_key_value_heads": 3}}, "num_key_value_heads"),
        ({"model": {"shift_window": 1}}, "shift_window must be an integer of at least 2, got 1"),
        ({"model": {"shift_constraint": "gate", "shift_init": "identity"}}, "shift_init"),
    ],
    ids=str,
)
def test_options_that_cannot_be(corpus, tmp_path, change, said, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LabError, match=said) as caught:
        train(tiny(corpus, tmp_path / "run", **change))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize(("name", "kind"), [("cp", "context parallelism"), ("sp", "Ulysses sequence parallelism")])
def test_parts_of_sequences(corpus, tmp_path, name: str, kind: str, monkeypatch):
    """As `accelerate launch --use_parallelism_config true --parallelism_config_cp_size 2` sets the environment."""
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "2")
    said = rf"parallelism_config_{name}_size is 2 \({kind}\), expected 1: .*the token before.*fsdp2.yaml"
    with pytest.raises(LabError, match=said) as caught:
        train(tiny(corpus, tmp_path / "run"))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"learning_rate": 0.0}, "optimizer.learning_rate must be more than 0"),
        ({"learning_rate": INF}, "optimizer.learning_rate must be more than 0 and finite, got inf"),
        ({"epsilon": INF}, "optimizer.epsilon must be more than 0 and finite, got inf"),
        ({"clip_norm": INF}, "optimizer.clip_norm must be 0 or more, and finite, got inf"),
        ({"clip_norm": NAN}, "optimizer.clip_norm must be 0 or more, and finite, got nan"),
        ({"weight_decay": INF}, "optimizer.weight_decay must be 0 or more, and finite, got inf"),
        ({"shift_lr_multiplier": INF}, "optimizer.shift_lr_multiplier must be 0 or more, and finite, got inf"),
        ({"beta2": 1.0}, "optimizer.beta2 must be at least 0, less than 1, got 1.0"),
        ({"schedule": "wsd", "warmup_steps": 11}, "optimizer.warmup_steps must be 10 at most, before the decay"),
        ({"min_lr_ratio": 2.0}, "optimizer.min_lr_ratio must be between 0 and 1"),
        ({"weight_decay": -1.0}, "optimizer.weight_decay must be 0 or more"),
    ],
    ids=str,
)
def test_optimizers_that_cannot_be(corpus, tmp_path, change, said):
    config = tiny(corpus, tmp_path / "run")
    with pytest.raises(LabError, match=said):
        train(replace(config, optimizer=replace(config.optimizer, **change)))


def test_vocabulary_smaller_than_the_tokenizer(corpus, tmp_path):
    with pytest.raises(LabError, match=r"model.vocab_size is 280, but the tokenizer has 281 tokens"):
        train(tiny(corpus, tmp_path / "run", model={"vocab_size": 280}))


def test_several_workers_cannot_share_a_stream(corpus, tmp_path):
    with pytest.raises(LabError, match=r"data_workers must be 0 or 1 with data\.streaming, got 2"):
        train(tiny(corpus, tmp_path / "run", data={"streaming": True}, data_workers=2))
