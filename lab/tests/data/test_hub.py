"""Paths are distinguished from names on the hub, which is queried once for a name and never for a path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import RepositoryNotFoundError
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvshift_lab.core.errors import LabError
from kvshift_lab.data import hub
from kvshift_lab.data.config import DataConfig
from kvshift_lab.data.tokenizers import make_tokenizer


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names that the hub is queried for, in vain. Loaders that would query it repeatedly must not be called."""
    names: list[str] = []

    def model_info(self: HfApi, name: str, *, timeout: float) -> Any:
        assert timeout <= 10
        names.append(name)
        raise ConnectionError("[Errno -3] Temporary failure in name resolution")

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("transformers asks for each file, and retries")

    monkeypatch.setattr(HfApi, "model_info", model_info)
    for auto in (AutoModelForCausalLM, AutoTokenizer):
        monkeypatch.setattr(auto, "from_pretrained", never)
    monkeypatch.chdir(tmp_path)
    return names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt2", True),
        ("owner/name", True),
        ("HuggingFaceTB/SmolLM2-135M", True),
        ("run", False),  # exists
        ("runs/absent", False),  # its parent folder exists
        ("runs/absent/deeper", False),
        ("owner/name/deeper", False),
        ("./owner", False),
        ("~/owner", False),
        ("/owner", False),
        ("owner/", False),
        ("my run", False),
    ],
)
def test_a_path_or_a_name_on_the_hub(
    name: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "runs"):
        Path(folder).mkdir()
    assert hub.is_hub_name(name) == expected


def test_a_run_that_is_not_there_is_said_without_asking_the_hub(asked: list[str]) -> None:
    Path("runs").mkdir()
    with pytest.raises(LabError, match=r"^tokenizer: there is no folder runs/mien$"):
        make_tokenizer(DataConfig(tokenizer="runs/mien"), iter(()), Path("tokenizer"))  # type: ignore[arg-type]
    assert asked == []


def test_the_hub_is_asked_once(asked: list[str]) -> None:
    with pytest.raises(LabError, match=r"^tokenizer: there is no folder nothing here, it is not in the hub's cache"):
        make_tokenizer(DataConfig(tokenizer="nothing"), iter(()), Path("tokenizer"))  # type: ignore[arg-type]
    assert asked == ["nothing"]


class MissingError(RepositoryNotFoundError):
    def __init__(self) -> None:
        Exception.__init__(self, "404")


def test_a_model_that_the_hub_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def model_info(self: HfApi, name: str, *, timeout: float) -> Any:
        raise MissingError

    monkeypatch.setattr(HfApi, "model_info", model_info)
    with pytest.raises(LabError, match="no folder nobody/nothing here, and the hub has no such model, or you"):
        hub.require_on_hub("nobody/nothing", "model")


def test_what_is_in_the_cache_is_not_asked_for(
    asked: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").touch()
    refs = tmp_path / "models--owner--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    hub.require_on_hub("owner/name", "model")
    assert asked == []
