"""Where a model is found, and which folders and files are refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift_lab.cli import main
from kvshift_lab.core.errors import LabError
from kvshift_lab.data.tokenizers import train_bpe
from kvshift_lab.run import model_files
from kvshift_lab.run.loading import first_non_finite_parameter, load_model
from kvshift_lab.run.model_files import locate

from ..generation_cases import TEXT, tokenizer

SHIFT = "model.layers.1.self_attn.shift.alpha"


@pytest.fixture
def run_folder(model_folder: Path, tmp_path: Path) -> Path:
    """A stopped run in the layout of `kvshift train`, whose checkpoints have no tokenizer."""
    run = tmp_path / "run"
    (run / "tokenizer").mkdir(parents=True)
    tokenizer().save_pretrained(run / "tokenizer")
    (run / "config.json").write_text(json.dumps({"steps": 3, "model": {"size": None}}))
    for step in (9, 100, 20):
        checkpoint = run / f"checkpoint-{step}"
        shutil.copytree(model_folder, checkpoint, ignore=shutil.ignore_patterns("*token*"))
        (checkpoint / "complete").touch()
    return run


def said(name: Path) -> tuple[tuple[str, str], list[str]]:
    notes: list[str] = []
    return locate(str(name), notes.append), notes


def test_a_run_stands_for_its_newest_checkpoint_and_then_its_model(run_folder: Path, model_folder: Path) -> None:
    tokens = str(run_folder / "tokenizer")
    where, notes = said(run_folder)
    assert where == (str(run_folder / "checkpoint-100"), tokens)
    assert notes == [f"{run_folder} has no final model yet: using checkpoint-100"]
    (run_folder / "checkpoint-100" / "complete").unlink()  # still being written
    assert said(run_folder)[0][0] == str(run_folder / "checkpoint-20")
    assert said(run_folder / "checkpoint-20")[0] == (str(run_folder / "checkpoint-20"), tokens)
    shutil.copytree(model_folder, run_folder / "model")
    assert said(run_folder) == ((str(run_folder / "model"), str(run_folder / "model")), [])


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("*/complete", "none of its 3 checkpoints is complete"),
        ("tokenizer/*", "checkpoint-100 has no tokenizer, and .*tokenizer has none either"),
    ],
)
def test_a_run_without_a_part_is_refused(lost: str, message: str, run_folder: Path) -> None:
    for path in run_folder.glob(lost):
        path.unlink()
    with pytest.raises(LabError, match=message):
        said(run_folder)


def test_the_folder_of_a_model_that_has_no_tokenizer(run_folder: Path) -> None:
    """Commands that only inspect a model need no tokenizer."""
    shutil.rmtree(run_folder / "tokenizer")
    notes: list[str] = []
    assert model_files.model_folder(run_folder, notes.append) == run_folder / "checkpoint-100"
    assert notes == [f"{run_folder} has no final model yet: using checkpoint-100"]
    assert model_files.model_folder(str(run_folder / "checkpoint-9"), notes.append) == run_folder / "checkpoint-9"
    assert len(notes) == 1
    with pytest.raises(LabError, match="model: there is no folder nobody/nothing"):
        model_files.model_folder("nobody/nothing", notes.append)


def test_a_truncated_checkpoint_is_not_loaded(run_folder: Path) -> None:
    weights = run_folder / "checkpoint-100" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(LabError, match="checkpoint-100 could not be loaded"):
        load_model(str(weights.parent), log=print)


@pytest.mark.parametrize("command", ["check", "generate", "eval", "analyze", "retrofit"])
def test_no_command_shows_bars_or_tables_of_loading(command: str, tmp_path: Path, capfd, monkeypatch) -> None:
    """Transformers' progress bar and its table of unused weights are not shown."""
    monkeypatch.setattr(
        "kvshift_lab.commands.analyze.command.write_head_report", lambda out, metrics: out
    )  # takes seconds
    shape = {"hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 1, "num_attention_heads": 2}
    folder, text = tmp_path / "model", tmp_path / "text.txt"
    text.write_text("\n".join(TEXT))
    words = tokenizer()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(words), **shape))
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"more.weight": torch.zeros(3)}, folder / "model.safetensors", {"format": "pt"})
    capfd.readouterr()
    options = {
        "check": ["--properties", "causality"],
        "generate": ["--prompt", "the", "--max-new-tokens", "2"],
        "eval": [str(text)],
        "analyze": ["--out", str(tmp_path / "analysis"), "--length", "5", "--rows", "2"],
        "retrofit": [str(tmp_path / "shifted")],
    }
    assert main([command, str(folder), *options[command]]) == 0
    first, *others = capfd.readouterr().err.splitlines()
    assert first == f"{folder} has 1 weights that LlamaForCausalLM does not use, such as more.weight"
    assert all(line.startswith(f"kvshift {command}: ") for line in others)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": torch.zeros(3)}, r"model\.norm\.weight has the shape \[3\], expected \[\d+\]"),
        ({"model.norm.weight": torch.full((40,), torch.nan)}, r"model\.norm\.weight has numbers that are not finite"),
        ({"model.norm.weight": torch.full((40,), torch.inf)}, r"model\.norm\.weight has numbers that are not finite"),
        ({SHIFT: None}, rf"lacks 1 weights, such as {re.escape(SHIFT)}"),
    ],
    ids=["another size", "nan", "infinite", "lacking"],
)
def test_weights_that_do_not_fit_are_named(change: dict, said: str, model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "other")
    weights = load_file(folder / "model.safetensors") | change
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LabError, match=said):
        load_model(str(folder), device="cpu", log=print)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"num_attention_heads": 13}, r"ValueError: The hidden size \(\d+\) is not a multiple of the number of"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"num_attention_heads": 0}, "a value in its config.json is invalid .ZeroDivisionError"),
        # Before 5.24, transformers' own validation refuses these.
        ({"layer_types": 5}, "(a value in its config.json is invalid .TypeError|'int' object is not iterable)"),
        ({"id2label": []}, "(a value in its config.json is invalid .AttributeError|Field 'id2label' with value)"),
        ({"dtype": "float33"}, "a value in its config.json is invalid .AttributeError: .*float33"),
    ],
    ids=["heads", "type", "no heads", "layers", "labels", "dtype"],
)
def test_a_configuration_that_transformers_refuses(changes: dict, why: str, model_folder: Path, tmp_path: Path) -> None:
    """These errors have their own class, and give the reason in their last line."""
    folder = shutil.copytree(model_folder, tmp_path / "refused")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(LabError, match=rf"refused could not be loaded: .*{why}"):
        load_model(str(folder), device="cpu", log=lambda note: None)


def test_a_pickled_checkpoint_is_not_loaded(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    torch.save(KVShiftLlamaForCausalLM.from_pretrained(model_folder).state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(LabError, match="could not be loaded"):
        load_model(str(folder), log=print)


def test_a_tokenizer_of_another_model(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "other")
    train_bpe(iter([*TEXT, "quite a few more words for a larger vocabulary of tokens"]), 300).save_pretrained(folder)
    with pytest.raises(LabError, match=r"tokenizer .* its ids go up to \d+, the model's up to 276"):
        load_model(str(folder), log=print)


def test_no_model_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"is neither a model \(no config\.json with a model_type\) nor a run"):
        said(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match="is a file; expected"):
        said(tmp_path / "file")


@pytest.mark.parametrize("place", ["", "model"])
def test_a_configuration_that_is_not_json(place: str, tmp_path: Path) -> None:
    """The message names the error in the file."""
    (tmp_path / place).mkdir(exist_ok=True)
    for text, why in (
        ("{'a': 5}", r"is not JSON: Expecting .*line 1"),
        ("[5]", "must contain a JSON object, got list"),
    ):
        (tmp_path / place / "config.json").write_text(text)
        with pytest.raises(LabError, match=f"^model: {tmp_path / place / 'config.json'} {why}"):
            said(tmp_path)


@pytest.mark.parametrize("name", ["gpu", "cuda:99"])
def test_wrong_device(name: str, model_folder: Path) -> None:
    with pytest.raises(LabError, match=f"device must be auto, cpu, or an accelerator .*; got '{name}'"):
        load_model(str(model_folder), device=name, log=print)


def test_a_bfloat16_model_keeps_its_coefficients(model_folder: Path) -> None:
    model, *_ = load_model(str(model_folder), dtype="bfloat16", log=print)
    dtypes = {".shift." in name: parameter.dtype for name, parameter in model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_numbers_of_quantized_weights_are_not_looked_at(dtype: torch.dtype) -> None:
    model = torch.nn.Linear(2, 2)
    model.weight = torch.nn.Parameter(torch.ones(2, 2).to(dtype), requires_grad=False)
    assert first_non_finite_parameter(model) is None
    with torch.no_grad():
        model.bias[0] = torch.nan
    assert first_non_finite_parameter(model) == "bias"
    assert first_non_finite_parameter(model.to("meta")) is None
