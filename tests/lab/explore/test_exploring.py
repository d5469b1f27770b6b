"""`kvshift explore`: what is refused before anything is written, and the program that a page runs."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, OPTConfig, OPTForCausalLM

from kvshift.cli import main
from kvshift.lab.core.errors import LabError, RunFailedError
from kvshift.lab.data.tokenizers import train_bpe
from kvshift.lab.explore import exploring, watched_program, web_runtime
from kvshift.lab.explore.page_server import page_server
from kvshift.lab.explore.watched_program import WatchedModel, check_watched, write_watched
from kvshift.lab.runs.loading import load_weights

from ...models.llama.tiny import tiny_model
from ..generation_cases import save_model, tokenizer


def with_tokenizer(folder: Path, **options: Any) -> Path:
    tokenizer().save_pretrained(folder)
    return save_model(folder, **options)


def refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: Any, code: int = 2) -> str:
    """The message of a call that writes nothing."""
    out = tmp_path / "page"
    assert main(["explore", *map(str, arguments), "--out", str(out)]) == code
    assert not out.exists()
    assert [path for path in tmp_path.iterdir() if path.name.startswith(".page")] == []
    return capsys.readouterr().err


def test_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = save_model(tmp_path / "model")
    assert f"{model} has no tokenizer" in refused(capsys, tmp_path, model)


def test_a_tokenizer_that_the_page_cannot_compute(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = with_tokenizer(tmp_path / "model")
    path = model / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"dropout": null', '"dropout": 0.5'), encoding="utf-8")
    assert f"that of {model} has a BPE with dropout" in refused(capsys, tmp_path, model)


def test_a_model_that_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tokenizer().save_pretrained(tmp_path / "model")
    sizes = {
        "hidden_size": 16,
        "ffn_dim": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "word_embed_proj_dim": 16,
    }
    OPTForCausalLM(OPTConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path / "model")
    message = refused(capsys, tmp_path, tmp_path / "model")
    assert "is a OPTForCausalLM, which cannot be exported; these can: " in message
    assert "KVShiftLlamaForCausalLM" in message


def test_models_with_different_tokenizers(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one, other = with_tokenizer(tmp_path / "one"), save_model(tmp_path / "other")
    train_bpe(iter(["other words"]), 270).save_pretrained(other)
    assert f"{one} and {other} have different tokenizers" in refused(capsys, tmp_path, one, other)


def test_more_than_a_page_can_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    model = with_tokenizer(tmp_path / "model")
    monkeypatch.setattr(exploring, "_LARGE", 1e3)
    monkeypatch.setattr(exploring, "_MOST", 1e4)
    message = refused(capsys, tmp_path, model)
    assert "in the browser" in message.splitlines()[0]  # said before it is refused
    assert "more than a page can hold" in message


def test_too_little_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    model = with_tokenizer(tmp_path / "model")
    monkeypatch.setattr(exploring, "_LARGE", 1e3)
    monkeypatch.setattr(exploring, "_COPIES", 1e12)
    assert "there is too little memory" in refused(capsys, tmp_path, model)


def test_the_explanation_needs_its_two_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = with_tokenizer(tmp_path / "one", num_hidden_layers=1)
    assert "give two models" in refused(capsys, tmp_path, one, "--explain")
    message = refused(capsys, tmp_path, one, one, "--explain")
    assert "got 1 layers with shift and 1 layers with shift" in message


def test_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "models must be one or two" in refused(capsys, tmp_path, "a", "b", "c")
    assert "port must be between" in refused(capsys, tmp_path, "a", "--port", "70000")
    assert "give one or two, or --open and a folder that holds a page" in refused(capsys, tmp_path, "--open")
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "mine").touch()
    assert main(["explore", "a", "--out", str(tmp_path / "page")]) == 2
    assert "out must be a folder that is not there yet, or is empty" in capsys.readouterr().err


def attentive_model(**options: Any) -> Any:
    """One that returns probabilities."""
    model = tiny_model(**options)
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize("constraint", ["free", "gate", "clamp"])
def test_coefficients_are_arguments(constraint: str):
    """With its own coefficients a model computes what it did; with others, what a model of those does."""
    model = attentive_model(shift_constraint=constraint)
    ids = torch.randint(3, 61, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(ids, output_attentions=True, use_cache=False)
        watched = WatchedModel(model)
        own = watched.coefficients()
        for found in (watched(ids), watched(ids, own)):
            assert torch.equal(found["logits"], before.logits)
            assert len(found["attention"]) == len(before.attentions) == 2
            assert all(map(torch.equal, found["attention"].values(), before.attentions))
        identity = {n: {name: torch.tensor([[1.0, 0.0]]).expand_as(x) for name, x in c.items()} for n, c in own.items()}
        unshifted = watched(ids, identity)["logits"]
        assert not torch.equal(unshifted, before.logits)
        vanilla = attentive_model(shift_targets=())
        assert vanilla.load_state_dict(model.state_dict(), strict=False).missing_keys == []
        torch.testing.assert_close(vanilla(ids).logits, unshifted)


def test_a_model_without_shift(tmp_path: Path):
    model = load_weights(save_model(tmp_path / "model", LlamaForCausalLM), attn_implementation="eager")
    watched = WatchedModel(model)
    assert watched.coefficients() == {}
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert watched(ids)["attention"]["1"].shape == (1, 5, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_the_program_computes_what_the_model_does(inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A small one with its weights, and a large one, which is not simplified, with its weights beside it."""
    monkeypatch.setattr(watched_program, "_INSIDE", 1e9 if inside else 0)
    watched = WatchedModel(attentive_model(num_hidden_layers=1))
    write_watched(watched, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").exists() == (not inside)
    prompts = [torch.arange(3, 3 + length) for length in (1, 7)]
    assert check_watched(watched, tmp_path / "model.onnx", prompts) < 1e-4
    with torch.no_grad():
        watched.model.lm_head.weight.neg_()
    with pytest.raises(RunFailedError, match="by the program"):
        check_watched(watched, tmp_path / "model.onnx", prompts)


class TestRuntime:
    @pytest.fixture
    def archive(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """The address of an archive that stands for that of the registry; the cache is empty."""
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(web_runtime, "FILES", {"a.mjs": hashlib.sha256(b"code").hexdigest()})
        path = tmp_path / "runtime.tgz"
        with tarfile.open(path, "w:gz") as file:
            for name, content in {"package/other": b"x", "package/dist/a.mjs": b"code"}.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                file.addfile(member, io.BytesIO(content))
        return path.as_uri()

    def test_downloaded_once(self, archive: str, tmp_path: Path):
        said: list[str] = []
        for _ in range(2):
            folder = web_runtime.runtime_folder(said.append, archive)
        assert len(said) == 1
        assert archive in said[0]
        web_runtime.copy_runtime(folder, tmp_path / "copy")
        assert (tmp_path / "copy" / "a.mjs").read_bytes() == b"code"

    def test_offline(self, archive: str, tmp_path: Path):
        with pytest.raises(LabError, match=r"is not in .* and could not be downloaded from file:.*npm pack"):
            web_runtime.runtime_folder(lambda text: None, (tmp_path / "nowhere.tgz").as_uri())

    def test_other_bytes(self, archive: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        folder = web_runtime.runtime_folder(lambda text: None, archive)
        (folder / "a.mjs").write_bytes(b"other")
        with pytest.raises(LabError, match=r"a\.mjs has the SHA-256"):
            web_runtime.copy_runtime(folder, tmp_path / "copy")
        (folder / "a.mjs").unlink()
        monkeypatch.setattr(web_runtime, "FILES", {"a.mjs": "0"})
        with pytest.raises(LabError, match=r"a\.mjs has the SHA-256"):
            web_runtime.runtime_folder(lambda text: None, archive)
        assert not (folder / "a.mjs").exists()

    def test_a_file_that_is_not_there(self, archive: str, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(web_runtime, "FILES", {"b.wasm": "0"})
        with pytest.raises(LabError, match=r"has no b\.wasm"):
            web_runtime.runtime_folder(lambda text: None, archive)


def test_the_server(tmp_path: Path):
    """On the loopback address, with the types that browsers insist on."""
    for name in ("a.js", "a.mjs", "a.wasm"):
        (tmp_path / name).write_bytes(b"x")
    with page_server(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert server.server_address[0] == "127.0.0.1"
        for name, kind in {"a.js": "text/javascript", "a.mjs": "text/javascript", "a.wasm": "application/wasm"}.items():
            with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/{name}") as answer:
                assert answer.headers["Content-Type"] == kind
        with pytest.raises(LabError, match=f"port: {server.server_port} cannot be used"):
            page_server(tmp_path, server.server_port)
        server.shutdown()
