"""`kvshift retrofit` writes a folder that loads, computes the same, and is complete or absent."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from kvshift.models.retrofit import load_kv_shift
from kvshift_lab.cli import main
from kvshift_lab.commands.retrofit import command
from kvshift_lab.commands.retrofit.command import retrofit
from kvshift_lab.commands.retrofit.options import RetrofitOptions
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.core.messages import no_log
from kvshift_lab.run.loading import load_model

from ...generation_cases import SHAPE, save_model, tokenizer

IDS = torch.tensor([[3, 41, 5, 199, 20]])


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Qwen2 in several shards, with a chat template and its own generation config."""
    folder = tmp_path_factory.mktemp("qwen2") / "model"
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**{**SHAPE, "vocab_size": 277, "bos_token_id": 0, "eos_token_id": 0}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3)
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=7)
    model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    words: PreTrainedTokenizerFast = tokenizer()
    words.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    words.save_pretrained(folder)
    return folder


def test_a_folder_in_a_folder_out(qwen2: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "deep" / "shifted"
    arguments = [str(qwen2), str(out), "--shift-targets", "q", "k", "v", "--shift-window", "3"]
    assert main(["retrofit", *arguments]) == 0
    said = capsys.readouterr().err
    assert "a KVShiftQwen2ForCausalLM with 90 coefficients" in said
    assert "on 4 prompts with" in said
    assert "bitwise equal" in said
    assert list(out.parent.iterdir()) == [out]

    plain = AutoModelForCausalLM.from_pretrained(qwen2)
    for model in (load_kv_shift(out), load_model(str(out), log=no_log).model):
        assert type(model).__name__ == "KVShiftQwen2ForCausalLM"
        assert (model.config.shift_targets, model.config.shift_window) == (["q", "k", "v"], 3)
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
    settings = load_kv_shift(out).generation_config
    assert (settings.temperature, settings.top_k) == (0.7, 7)
    words, had = AutoTokenizer.from_pretrained(out), AutoTokenizer.from_pretrained(qwen2)
    assert words("to be or not")["input_ids"] == had("to be or not")["input_ids"]
    assert words.chat_template == had.chat_template
    assert main(["generate", str(out), "--prompt", "to be", "--max-new-tokens", "3", "--temperature", "0"]) == 0


def test_an_empty_folder_and_another_dtype(qwen2: Path, tmp_path: Path):
    out = tmp_path / "shifted"
    out.mkdir()
    retrofit(RetrofitOptions(model=str(qwen2), out=out, shift_constraint="clamp", dtype="bfloat16"))
    model = load_kv_shift(out)
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].self_attn.shift.alpha.dtype == torch.float32


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "source" / "model"))


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def cut(folder: Path) -> None:
    shard = first_shard(folder)
    shard.write_bytes(shard.read_bytes()[:-1000])


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tok*"):
        path.unlink()


def other_fields(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def with_shift(folder: Path, window: int = 2) -> None:
    retrofit(RetrofitOptions(model=str(folder), out=folder.with_name("shifted"), shift_window=window))
    shutil.rmtree(folder)
    folder.with_name("shifted").rename(folder)


def short_coefficients(folder: Path) -> None:
    """Leave coefficients of window 2 where the configuration has window 3."""
    with_shift(folder, window=3)
    shard = folder / "model.safetensors"
    weights = load_file(shard)
    save_file(
        {name: x[:, :2].clone() if ".shift." in name else x for name, x in weights.items()}, shard, {"format": "pt"}
    )


SPOILED: dict[str, tuple[Callable[[Path], None], str]] = {
    "no tokenizer": (without_tokenizer, "has no tokenizer"),
    "a shard that was cut off": (cut, "could not be loaded: .*[Hh]eader"),
    "a shard that is missing": (lambda folder: first_shard(folder).unlink(), "could not be loaded: "),
    "weights of another family": (other_fields(model_type="gpt_neox"), r"lacks \d+ weights"),
    "another family": (other_fields(model_type="olmo"), r"OlmoForCausalLM \(model_type 'olmo'\).*CONTRIBUTING.md"),
    "coefficients of another window": (short_coefficients, r"alpha has the shape \[5, 2\], expected \[5, 3\]"),
    "a shift already": (with_shift, "already has a KV shift"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED.keys())
def test_bad_models_are_named_and_nothing_is_left(spoil: Callable, message: str, qwen2: Path, tmp_path: Path):
    folder, out = copy_of(qwen2, tmp_path), tmp_path / "results" / "shifted"
    spoil(folder)
    with pytest.raises(LabError, match=message) as raised:
        retrofit(RetrofitOptions(model=str(folder), out=out))
    assert raised.value.exit_code == 2
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"shift_targets": ()}, "shift_targets must be"), ({"shift_window": 1}, "shift_window must")],
)
def test_options(options: dict, message: str, tmp_path: Path):
    with pytest.raises(LabError, match=message):
        retrofit(RetrofitOptions(model="model", out=tmp_path / "out", **options))


@pytest.mark.parametrize(
    ("coefficient", "message"),
    [
        (0.1, "the logits of prompt 0 differed from the model's by"),
        (1e-6, "with the shift, logits of .* differ by up to"),
    ],
)
def test_a_model_that_computes_something_else_is_not_kept(
    coefficient: float, message: str, qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Not even if rounding errors could explain the difference."""

    def add(model: Any, options: Any) -> None:
        retrofitted(model, options)
        with torch.no_grad():
            model.model.layers[1].self_attn.shift.beta[0, 1] = coefficient

    retrofitted = command.add_kv_shift
    monkeypatch.setattr(command, "add_kv_shift", add)
    with pytest.raises(RunFailedError, match=message):
        retrofit(RetrofitOptions(model=str(qwen2), out=tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


SETTINGS = [
    {"return_dict_in_generate": True},
    {"stop_strings": ["x"]},
    {"num_return_sequences": 2, "do_sample": True},
    {"penalty_alpha": 0.6, "top_k": 4},
    {"cache_implementation": "quantized"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: next(iter(settings)))
def test_saved_generation_settings_are_kept_and_not_used(settings: dict[str, Any], qwen2: Path, tmp_path: Path):
    folder = copy_of(qwen2, tmp_path)
    (folder / "generation_config.json").write_text(json.dumps(settings))
    retrofit(RetrofitOptions(model=str(folder), out=tmp_path / "out"))
    assert settings.items() <= json.loads((tmp_path / "out" / "generation_config.json").read_text()).items()


def few_positions(folder: Path, number: int) -> str:
    """Save a GPT-2 that has this number of positions."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 277, "bos_token_id": 0, "eos_token_id": 0}
    GPT2LMHeadModel(GPT2Config(n_positions=number, **sizes)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def test_prompts_are_cut_to_the_positions_of_the_model(tmp_path: Path, capsys: pytest.CaptureFixture):
    retrofit(RetrofitOptions(model=few_positions(tmp_path / "gpt2", 10), out=tmp_path / "out"))
    assert "on 4 prompts with 8 tokens in total" in capsys.readouterr().err
    with pytest.raises(LabError, match="must have more than 8 positions, got 8"):
        retrofit(RetrofitOptions(model=few_positions(tmp_path / "short", 8), out=tmp_path / "nothing"))


def test_a_folder_that_cannot_be_written_is_not_kept(qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(RunFailedError, match=r"cannot be written to .*: No space left on device"):
        retrofit(RetrofitOptions(model=str(qwen2), out=tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_a_llama_becomes_one_that_the_lab_knows(tmp_path: Path):
    folder = save_model(tmp_path / "plain", cls=LlamaForCausalLM)
    tokenizer().save_pretrained(folder)
    retrofit(RetrofitOptions(model=str(folder), out=tmp_path / "shifted"))
    assert json.loads((tmp_path / "shifted/config.json").read_text())["model_type"] == "kvshift_llama"


def test_a_model_that_computes_what_is_not_finite_is_said_so(
    qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The message blames the model itself, not its copy, which computes the same."""
    load = command.load_as_saved

    def with_large_weights(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        loaded.model.get_output_embeddings().weight.data.fill_(3e38)
        return loaded

    monkeypatch.setattr(command, "load_as_saved", with_large_weights)
    with pytest.raises(RunFailedError, match=r"the logits of .* are not finite"):
        retrofit(RetrofitOptions(model=str(qwen2), out=tmp_path / "out"))
    assert not [*tmp_path.iterdir()]
