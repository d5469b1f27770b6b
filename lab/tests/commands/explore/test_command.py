"""`kvshift explore`: errors that come before anything is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import OPTConfig, OPTForCausalLM

from kvshift_lab.cli import main
from kvshift_lab.commands.explore import command
from kvshift_lab.data.tokenizers import train_bpe

from ...generation_cases import save_model, tokenizer


def with_tokenizer(folder: Path, **options: Any) -> Path:
    tokenizer().save_pretrained(folder)
    return save_model(folder, **options)


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: Any, code: int = 2) -> str:
    """Return the message of a call that fails and writes nothing."""
    out = tmp_path / "page"
    assert main(["explore", *map(str, arguments), "--out", str(out)]) == code
    assert not out.exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".page")] == []
    return capsys.readouterr().err


def test_a_tokenizer_that_the_page_cannot_compute(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = with_tokenizer(tmp_path / "model")
    path = model / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"dropout": null', '"dropout": 0.5'), encoding="utf-8")
    assert f"the one of {model} has a BPE with dropout" in refused(capsys, tmp_path, model)


def test_a_model_that_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer().save_pretrained(tmp_path / "model")
    sizes = {"vocab_size": 300, "hidden_size": 16, "ffn_dim": 16, "word_embed_proj_dim": 16}
    OPTForCausalLM(OPTConfig(num_hidden_layers=1, num_attention_heads=2, **sizes)).save_pretrained(tmp_path / "model")
    message = refused(capsys, tmp_path, tmp_path / "model")
    assert "is a OPTForCausalLM, which cannot be exported; these can: " in message
    assert "KVShiftLlamaForCausalLM" in message


def test_models_with_different_tokenizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, other = with_tokenizer(tmp_path / "one"), save_model(tmp_path / "other")
    train_bpe(iter(["other words"]), 270).save_pretrained(other)
    assert f"{one} and {other} have different tokenizers" in refused(capsys, tmp_path, one, other)


@pytest.mark.parametrize(
    ("limit", "value", "message"),
    [("_MOST", 1e4, "the weights must take at most"), ("_COPIES", 1e12, "not enough memory")],
)
def test_more_than_a_page_or_this_machine_can_hold(
    limit: str, value: float, message: str, tmp_path: Path, capsys, monkeypatch
):
    model = with_tokenizer(tmp_path / "model")
    monkeypatch.setattr(command, "_LARGE", 1e3)
    monkeypatch.setattr(command, limit, value)
    assert message in refused(capsys, tmp_path, model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b", "c"], "models must be one or two"),
        (["a", "--port", "70000"], "port must be between"),
        (["a", "--port", "8000"], "port has no effect without open"),
        (["--open", "--text", "to be"], "text has no effect without models"),
        (["--open"], "give one or two, or --open with the folder of an existing page"),
    ],
)
def test_options(arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert message in refused(capsys, tmp_path, *arguments)


def test_the_explanation_needs_its_two_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = with_tokenizer(tmp_path / "one", num_hidden_layers=1)
    assert "explain needs two models" in refused(capsys, tmp_path, one, "--explain")
    message = refused(capsys, tmp_path, one, one, "--explain")
    assert "got 1 layer with shift and 1 layer with shift" in message
