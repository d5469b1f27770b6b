"""The converter of a GGUF file accepts only the expected file, writes a complete folder or none, and caches it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvshift_lab.core.errors import LabError
from kvshift_lab.run import smollm2
from kvshift_lab.run.loading import load_model
from kvshift_lab.run.smollm2 import cache_folder, convert

from ..generation_cases import SHAPE, tokenizer


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=277))


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in place of a GGUF, which transformers is made to read as a tiny model marked as quantized."""
    path = tmp_path / "wheel" / "tiny.gguf"
    path.parent.mkdir()
    path.write_bytes(b"the weights")

    def model(folder: Path, *, gguf_file: str, dtype: torch.dtype) -> Any:
        assert (folder / gguf_file, dtype) == (path, torch.float32)
        found: Any = tiny_llama()
        found.is_quantized, found.quantization_method, found.hf_quantizer = True, "gguf", object()
        found.config.quantization_config = {"quant_method": "gguf"}
        return found

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", model)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder, *, gguf_file: tokenizer())
    return path


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_an_ordinary_folder_of_transformers(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "cache" / "model"
    convert(gguf, folder, sha256=digest(gguf))
    monkeypatch.undo()
    model, words, _ = load_model(str(folder), log=lambda text: None)
    assert words.get_vocab() == tokenizer().get_vocab()
    for name, weight in tiny_llama().state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=0)


def test_another_file_is_refused(gguf: Path, tmp_path: Path):
    right = digest(gguf)
    gguf.write_bytes(gguf.read_bytes()[:-1])
    with pytest.raises(LabError, match=rf"tiny.gguf must have the sha256 {right}, got {digest(gguf)} \(10 bytes\)"):
        convert(gguf, tmp_path / "cache" / "model", sha256=right)
    assert not (tmp_path / "cache").exists()


def test_a_conversion_that_is_killed_leaves_no_model(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "cache" / "model"

    def killed(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AutoTokenizer, "from_pretrained", killed)
        with pytest.raises(KeyboardInterrupt):
            convert(gguf, folder, sha256=digest(gguf))
    assert not folder.exists()
    assert any(folder.parent.iterdir()), "half a model was to be left"
    convert(gguf, folder, sha256=digest(gguf))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_the_command_converts_once(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setattr(smollm2, "SHA256", digest(gguf))
    downloads = []
    monkeypatch.setattr(smollm2, "_download", lambda scratch: downloads.append(scratch) or gguf)
    smollm2.main()
    smollm2.main()
    assert capsys.readouterr().out == f"{cache_folder()}\n" * 2
    assert len(downloads) == 1
    assert cache_folder() == tmp_path / "hf" / "kvshift" / "smollm2-135m-instruct"
    assert (cache_folder() / "config.json").exists()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HF_HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/a/kvshift"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/kvshift"),
        ({"HF_HOME": ""}, "/home/me/.cache/kvshift"),
    ],
)
def test_the_folder_of_the_cache(variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/me", **variables}.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected) / "smollm2-135m-instruct"
