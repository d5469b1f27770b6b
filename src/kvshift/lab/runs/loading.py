"""From what a user names to a model that answers: a run folder, a folder of a model, or a name on the hub."""

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

# Imported for its model types, which it registers with the Auto classes:
import kvshift.models.baichuan_m1
import kvshift.models.retrofit  # noqa: F401
from kvshift.lab.core import messages
from kvshift.lab.core.atomic import read_json
from kvshift.lab.core.errors import LabError
from kvshift.lab.runs.model_files import locate, require_ids
from kvshift.lab.runs.run import Run
from kvshift.lab.variants.by_name import VARIANTS, find_variant, variant_of
from kvshift.lab.variants.model_config import DType
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM

for _name in VARIANTS:  # whose model types they register likewise
    find_variant(_name)

UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError, StrictDataclassError)
# As well, what transformers' own code meets in a config.json with values of a wrong kind (0 heads, layer_types: 5):
MISFITS = (*UNREADABLE, TypeError, AttributeError, ArithmeticError, LookupError)


class Loaded(NamedTuple):
    """A model in evaluation mode and the tokenizer that fits it; `source` is the folder or name it came from."""

    model: Any
    tokenizer: Any
    source: str


def load_model(name: str, *, dtype: DType = "auto", device: str = "auto", say: Callable[[str], Any]) -> Loaded:
    """Load any causal language model that transformers knows, from safetensors.

    Args:
        name: a run folder, a model folder, or a model on the hub.
        dtype: of the weights; auto: as they were saved. Shift coefficients stay float32.
        device: a torch device; auto: the accelerator where there is one, else the CPU.
        say: is told which checkpoint stands for a run that has not ended.

    Raises:
        LabError: there is no such model, it is not whole, or its tokenizer does not fit.
    """
    loaded = load_as_saved(name, dtype=dtype, device=device, say=say)
    saved = loaded.model.generation_config
    ids = {name: getattr(saved, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    loaded.model.generation_config = GenerationConfig(**ids)  # some bring a temperature and penalties of their own
    return loaded


def load_as_saved(name: str, *, dtype: DType, device: str, say: Callable[[str], Any]) -> Loaded:
    """As `load_model`, with the generation config that was saved."""
    find_device(device)  # a device that is not there is said before a large model is read
    folder, tokenizer_folder = locate(name, say)
    tokenizer = load_tokenizer(tokenizer_folder)
    model = load_weights(folder, dtype=dtype, device=device)
    check_tokenizer(tokenizer, model.get_input_embeddings().num_embeddings)
    return Loaded(model, tokenizer, folder)


def check_tokenizer(tokenizer: Any, vocab_size: int) -> None:
    """Raise `LabError` if the tokenizer makes ids that a model of `vocab_size` does not have."""
    require_ids(tokenizer.name_or_path or "", max(tokenizer.get_vocab().values()), vocab_size)


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in a folder, as `model_files.locate` finds it, or of a name on the hub."""
    try:
        return AutoTokenizer.from_pretrained(folder)
    except MISFITS as error:
        raise LabError(_unreadable(str(folder), error)) from error


def load_config(folder: str | Path) -> Any:
    """The configuration of a model in a folder, as `model_files.locate` finds it, or of a name on the hub."""
    try:
        return AutoConfig.from_pretrained(folder)
    except MISFITS as error:
        raise LabError(_unreadable(str(folder), error)) from error


def load_weights(folder: str | Path, *, dtype: DType = "auto", device: str = "auto", **kwargs: Any) -> Any:
    """The causal language model in a folder, or of a name on the hub, in evaluation mode; no tokenizer is asked for.

    Args:
        folder: as `locate` or `model_folder` of `model_files` finds it.
        dtype, device: as in `load_model`.
        kwargs: for `from_pretrained`, such as attn_implementation; with trust_remote_code, the code in the folder is
            run, though a model type of this package's is registered.
    """
    place = find_device(device)
    try:
        loader = AutoModelForCausalLM if not kwargs.get("trust_remote_code") else _remote_class(folder)
        with _without_report():
            loaded: Any = loader.from_pretrained(
                folder,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, by name
                **kwargs,
            )
    except MISFITS as error:
        raise LabError(_unreadable(str(folder), error)) from error
    model, report = loaded
    if missing := report["missing_keys"]:
        raise LabError(f"model: {folder} lacks {len(missing)} weights, {min(missing)} the first")
    if mismatched := sorted(report["mismatched_keys"]):
        name, saved, expected = mismatched[0]
        raise LabError(f"model: {folder}: {name} has the shape {[*saved]}, expected {[*expected]} by its config.json")
    if unused := report["unexpected_keys"]:
        name = type(model).__name__
        messages.say(f"{folder} has {len(unused)} weights that {name} does not use, {min(unused)} the first")
    if (name := not_finite(model)) is not None:
        raise LabError(f"model: {folder}: {name} has numbers that are not finite, as a run that diverged leaves them")
    return model.to(place).eval()


def not_finite(model: torch.nn.Module) -> str | None:
    """The name of the first parameter with a number that is not finite, or None.

    Of float8, which PyTorch cannot look at, and on the device "meta" none is found.
    """
    named = ((name, each) for name, each in model.named_parameters() if each.itemsize > 1 and not each.is_meta)
    return next((name for name, each in named if not torch.isfinite(each).all()), None)


@contextmanager
def _without_report() -> Iterator[None]:
    """No bar and no table on stderr while transformers loads; what is in the table is in its loading info."""
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
    """What loads a model by code of its own; the Auto class takes ours for a folder of `kvshift export`."""
    config, _ = PreTrainedConfig.get_config_dict(folder)
    place = config.get("auto_map", {}).get("AutoModelForCausalLM")
    ours = str(config.get("model_type")).startswith("kvshift_")
    return get_class_from_dynamic_module(place, str(folder)) if place and ours else AutoModelForCausalLM


def find_device(name: str) -> torch.device:
    """The device of a name; auto: the accelerator where there is one, else the CPU."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise LabError(f"device must be auto, cpu, or an accelerator of this machine; got {name!r}") from error
    return device


def _unreadable(folder: str, error: Exception) -> str:
    what = "could not be loaded" if Path(folder).is_dir() else "could not be loaded from the hub"
    return f"model: {folder} {what}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    if isinstance(error, StrictDataclassError):  # the first line names a function of transformers, the last says why
        return " ".join(str(error).split())
    line = str(error).strip().split("\n")[0]
    if isinstance(error, UNREADABLE):
        return line or type(error).__name__
    return f"a value in its config.json does not fit ({type(error).__name__}: {line})"


def load_trained(run: Run) -> Any:
    """The final model of a run of text in float32, as the class that it was trained as."""
    folder = run.folder / "model"
    values = read_json(folder / "config.json")
    if values["model_type"] not in (LlamaConfig.model_type, KVShiftLlamaConfig.model_type):
        find_variant(variant_of(run.config["model"]))  # which tells transformers of its classes
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    values |= {"shift_targets": run.config["model"]["shift_targets"], "model_type": KVShiftLlamaConfig.model_type}
    config = KVShiftLlamaConfig.from_dict(values)
    return KVShiftLlamaForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
