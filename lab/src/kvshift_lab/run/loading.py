"""Load the model and the tokenizer of a run folder, a model folder, or a name on the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

# Imported because they register their model types with the Auto classes:
import kvshift.models.baichuan_m1
import kvshift.models.retrofit  # noqa: F401
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.core import messages
from kvshift_lab.core.atomic import read_json
from kvshift_lab.core.errors import LabError
from kvshift_lab.data.tokenizers import vocab_size_of
from kvshift_lab.run.finished import Run
from kvshift_lab.run.model_files import locate, require_ids
from kvshift_lab.variants.by_name import VARIANTS, find_variant
from kvshift_lab.variants.model_config import DType

for _name in VARIANTS:  # the modules of variants also register their model types
    find_variant(_name)

MODEL_FILE_ERRORS = (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError)
# Also the errors that transformers raises for values of a wrong kind in a config.json (0 heads, layer_types: 5):
MODEL_CONFIG_ERRORS = (*MODEL_FILE_ERRORS, TypeError, AttributeError, ArithmeticError, LookupError)


class LoadedModel(NamedTuple):
    """A model in evaluation mode, its tokenizer, and the folder or hub name from which the model was loaded."""

    model: Any
    tokenizer: Any
    source: str


def load_model(name: str, *, dtype: DType = "auto", device: str = "auto", log: Callable[[str], Any]) -> LoadedModel:
    """Load any causal language model that transformers knows, from safetensors.

    Args:
        name: a run folder, a model folder, or a model on the hub.
        dtype: dtype of the weights. auto: as saved. Shift coefficients are always float32.
        device: a torch device. auto: the accelerator if there is one, otherwise the CPU.
        log: reports which checkpoint is used for an unfinished run.

    Raises:
        LabError: the model does not exist or is incomplete, or its tokenizer does not fit.
    """
    loaded = load_as_saved(name, dtype=dtype, device=device, log=log)
    saved = loaded.model.generation_config
    ids = {name: getattr(saved, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    loaded.model.generation_config = GenerationConfig(**ids)  # drops a saved temperature, penalties etc.
    return loaded


def load_as_saved(name: str, *, dtype: DType, device: str, log: Callable[[str], Any]) -> LoadedModel:
    """Load a model like `load_model`, with its saved generation config."""
    find_device(device)  # report a missing device before a large model is read
    folder, tokenizer_folder = locate(name, log)
    tokenizer = load_tokenizer(tokenizer_folder)
    model = load_weights(folder, dtype=dtype, device=device)
    check_tokenizer(tokenizer, model.get_input_embeddings().num_embeddings)
    return LoadedModel(model, tokenizer, folder)


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Raise a LabError if the tokenizer has ids that are not less than the model's `vocab_size`."""
    require_ids(tokenizer.name_or_path or "", vocab_size_of(tokenizer) - 1, vocab_size)


def num_appended_tokens(tokenizer: Any, text: str) -> int:
    """Return how many tokens the tokenizer puts behind a text, such as one that ends it."""
    ids, bare = (list(tokenizer(text, add_special_tokens=special)["input_ids"]) for special in (True, False))
    ends = range(len(ids), len(bare) - 1, -1) if bare else ()
    return next((len(ids) - end for end in ends if ids[end - len(bare) : end] == bare), 0)


def load_tokenizer(folder: str | Path) -> Any:
    """Load the tokenizer in a folder, as found by `model_files.locate`, or of a name on the hub."""
    with _named_errors(folder):
        return AutoTokenizer.from_pretrained(folder)


def load_config(folder: str | Path) -> Any:
    """Load the configuration of the model in a folder, as found by `model_files.locate`, or of a name on the hub."""
    with _named_errors(folder):
        return AutoConfig.from_pretrained(folder)


def load_weights(folder: str | Path, *, dtype: DType = "auto", device: str = "auto", **kwargs: Any) -> Any:
    """Load a causal language model in evaluation mode, without a tokenizer.

    Args:
        folder: a model folder, as found by `locate` or `model_folder` of `model_files`, or a name on the hub.
        dtype, device: as in `load_model`.
        kwargs: arguments of `from_pretrained`, such as attn_implementation. With trust_remote_code, the code in the
            folder is used even if its model type is registered by this package.
    """
    place = find_device(device)
    with _named_errors(folder), without_report():
        loader = AutoModelForCausalLM if not kwargs.get("trust_remote_code") else _remote_class(folder)
        loaded: Any = loader.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported as an error below, with the name of the weight
            **kwargs,
        )
    model, report = loaded
    if missing := report["missing_keys"]:
        raise LabError(f"model: {folder} lacks {len(missing)} weights, such as {min(missing)}")
    if mismatched := sorted(report["mismatched_keys"]):
        name, saved, expected = mismatched[0]
        raise LabError(f"model: {folder}: {name} has the shape {[*saved]}, expected {[*expected]} (config.json)")
    if unused := report["unexpected_keys"]:
        name = type(model).__name__
        messages.log(f"{folder} has {len(unused)} weights that {name} does not use, such as {min(unused)}")
    if (name := first_non_finite_parameter(model)) is not None:
        raise LabError(f"model: {folder}: {name} has numbers that are not finite, as after a diverged run")
    return model.to(place).eval()


def first_non_finite_parameter(model: torch.nn.Module) -> str | None:
    """Return the name of the first parameter with a non-finite number, or None.

    Parameters in float8, for which PyTorch has no `isfinite`, and on the device "meta" are not checked.
    """
    named = ((name, each) for name, each in model.named_parameters() if each.itemsize > 1 and not each.is_meta)
    return next((name for name, each in named if not torch.isfinite(each).all()), None)


@contextmanager
def without_report() -> Iterator[None]:
    """Suppress transformers' progress bar and loading report, whose contents `from_pretrained` also returns."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _remote_class(folder: str | Path) -> Any:
    """Return the class to load a model with the code in its folder.

    For a folder of `kvshift export`, the Auto class would choose the class that this package has registered.
    """
    config, _ = PreTrainedConfig.get_config_dict(folder)
    place = config.get("auto_map", {}).get("AutoModelForCausalLM")
    ours = str(config.get("model_type")).startswith("kvshift_")
    return get_class_from_dynamic_module(place, str(folder)) if place and ours else AutoModelForCausalLM


def find_device(name: str) -> torch.device:
    """Return the device of that name; for auto, the accelerator if there is one, otherwise the CPU."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise LabError(f"device must be auto, cpu, or an accelerator of this machine; got {name!r}") from error
    return device


@contextmanager
def _named_errors(folder: str | Path) -> Iterator[None]:
    """Convert errors of reading a model to a LabError that names its folder or its name on the hub."""
    try:
        yield
    except MODEL_CONFIG_ERRORS as error:
        what = "could not be loaded" if Path(folder).is_dir() else "could not be loaded from the hub"
        raise LabError(f"model: {folder} {what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    if isinstance(error, StrictDataclassError):  # the reason is in the last line, not the first
        return " ".join(str(error).split())
    line = str(error).strip().split("\n")[0]
    if isinstance(error, MODEL_FILE_ERRORS):
        return line or type(error).__name__
    return f"a value in its config.json is invalid ({type(error).__name__}: {line})"


def load_trained(run: Run) -> Any:
    """Load the final model of a run on text in float32, with the class that was used in training."""
    folder = run.folder / "model"
    values = read_json(folder / "config.json")
    with without_report():
        if values["model_type"] not in (LlamaConfig.model_type, KVShiftLlamaConfig.model_type):
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        values |= {"shift_targets": run.config["model"]["shift_targets"], "model_type": KVShiftLlamaConfig.model_type}
        config = KVShiftLlamaConfig.from_dict(values)
        return KVShiftLlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
