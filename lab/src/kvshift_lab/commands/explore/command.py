"""`kvshift explore`: a static page that runs one or two models in the reader's browser.

OUT/index.html, *.css, *.js          the page; it requests only files of this folder
OUT/facts.json                       facts about the models that the page shows: sizes, coefficients, head scores
OUT/tokenizer.json                   the tokenizer of the models
OUT/models/N/model.onnx              the program of `explorer_model.py`; large weights are in model.onnx.data
OUT/runtime/                         ONNX Runtime for WebAssembly
"""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import psutil
from transformers.utils import logging

import kvshift
from kvshift.models.retrofit import FAMILIES
from kvshift_lab.commands.explore.explorer_model import ExplorerModel, check_explorer_program, write_explorer_program
from kvshift_lab.commands.explore.options import ExploreConfig
from kvshift_lab.commands.explore.page_server import serve_page
from kvshift_lab.commands.explore.page_tokenizer import check_in_node, tokenizer_json
from kvshift_lab.commands.explore.web_runtime import copy_runtime, runtime_folder
from kvshift_lab.commands.export.comparison import encode_prompts
from kvshift_lab.commands.export.programs import require_fixed_rotary, require_packages
from kvshift_lab.core.atomic import new_folder, write_json
from kvshift_lab.core.errors import LabError, RunFailedError
from kvshift_lab.core.messages import log
from kvshift_lab.run.callbacks import coefficients
from kvshift_lab.run.head_scores import RepeatConfig, measure_heads, sequences_for
from kvshift_lab.run.loading import MODEL_FILE_ERRORS, check_tokenizer, load_tokenizer, load_weights
from kvshift_lab.run.model_files import locate

_log = partial(log, command="explore")

MOST_TOKENS = 128
"""Maximum number of tokens that the page computes: every head of every layer has T x T probabilities."""
_LARGE = 100e6  # bytes of weights from which on the required memory is printed
_MOST = 1.9 * 2**30  # bytes of weights; WebAssembly addresses 4 GiB, and weights are there twice while they are loaded
_SHIFTED = ("One layer without shift", "One layer with KV shift")  # names of the models in the explanation
_COPIES = 4  # copies of the weights in memory while a program is traced and compared
TEXTS = (
    "The old lighthouse keeper Ada Finch lit the lamp at dusk. At dawn, Ada Finch",
    "one two three four five six. one two three four",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n    return width *",
)
LETTERS = ("k d r a b m t e a", "x y z w x", "p q r s t u v p q r s")
"""Example texts for models of words and of letters; the first one is the initial text."""


def explore(config: ExploreConfig) -> None:
    """Write the page to `config.out`, and serve it with `config.open`.

    Each program is first compared with its model. The folder is created only if it is complete and computes the same.

    Raises:
        LabError: The options, a model, its tokenizer or the folder is invalid, or a package is missing (exit code 2).
        RunFailedError: A program computes other results than its model, or it cannot be written (exit code 3).
    """
    config.check()
    config.check_paths()
    if config.models:
        _make(config)
    if config.open:
        serve_page(config.out, config.port, _log)


def _make(config: ExploreConfig) -> None:
    require_packages("onnx")
    logging.disable_progress_bar()
    places = [locate(name, _log) for name in config.models]
    tokenizers = [load_tokenizer(place) for _, place in places]
    texts = [tokenizer_json(tokenizer, name) for tokenizer, name in zip(tokenizers, config.models, strict=True)]
    if any(text != texts[0] for text in texts):
        raise LabError(f"models: {config.models[0]} and {config.models[1]} have different tokenizers")
    models = [_load(name, folder, tokenizers[0]) for name, (folder, _) in zip(config.models, places, strict=True)]
    if config.explain:
        _require_explained(models)
    _require_memory(models)
    runtime = runtime_folder(_log)
    with new_folder(config.out) as part:
        described = []
        for number, (name, model) in enumerate(zip(config.models, models, strict=True)):
            home = part / "models" / str(number)
            home.mkdir(parents=True)
            described.append(_describe(name, model, tokenizers[0]))
            _write_program(name, model, tokenizers[0], home / "model.onnx")
            described[-1]["files"] = {path.name: path.stat().st_size for path in sorted(home.iterdir())}
        write_json(part / "facts.json", _facts(config, described))
        (part / "tokenizer.json").write_text(texts[0], encoding="utf-8")
        copy_runtime(runtime, part / "runtime")
        look = files("kvshift_lab.analysis") / "look.css"
        with as_file(files("kvshift_lab.commands.explore") / "page") as page, as_file(look) as style:
            shutil.copytree(page, part, dirs_exist_ok=True)
            shutil.copy(style, part)
        check_in_node(part)
    size = sum(path.stat().st_size for path in config.out.rglob("*") if path.is_file())
    _log(f"{config.out} holds the page, {size / 1e6:.1f} MB; `kvshift explore --out {config.out} --open` shows it")


def _load(name: str, folder: str, tokenizer: Any) -> Any:
    """Load a model in float32, the precision of the WebAssembly runtime."""
    model = load_weights(folder, dtype="float32", device="cpu", attn_implementation="eager")
    known = {kind for family in FAMILIES for pair in family.models.items() for kind in pair if kind.can_generate()}
    if type(model) not in known:
        names = ", ".join(sorted(kind.__name__ for kind in known))
        raise LabError(f"model: {name} is a {type(model).__name__}, which cannot be exported; these can: {names}")
    require_fixed_rotary(model.config)
    check_tokenizer(tokenizer, model.get_input_embeddings().num_embeddings)
    return model


def _require_explained(models: list[Any]) -> None:
    """Raise a LabError unless the explanation fits the models: one layer each, without and with shift."""
    layers = [model.config.get_text_config().num_hidden_layers for model in models]
    shifted = [bool(coefficients(model)) for model in models]
    if layers != [1, 1] or shifted != [False, True]:
        raise LabError(
            "explain needs two models of one layer, the first without shift and the second with it; got "
            + " and ".join(
                f"{n} layer{'s' * (n != 1)} {('without', 'with')[s]} shift"
                for n, s in zip(layers, shifted, strict=True)
            )
        )


def _require_memory(models: list[Any]) -> None:
    """Print the memory that large models need, here and in the browser; raise a LabError if it is not available."""
    sizes = [sum(p.numel() * p.element_size() for p in model.parameters()) for model in models]
    if sum(sizes) < _LARGE:
        return
    here, free = _COPIES * max(sizes), psutil.virtual_memory().available
    _log(
        f"the weights take {sum(sizes) / 1e9:.1f} GB in float32; writing the page needs about {here / 1e9:.1f} GB more "
        f"({free / 1e9:.1f} GB are free), and showing it about {3 * sum(sizes) / 1e9:.1f} GB in the browser"
    )
    if sum(sizes) > _MOST:
        raise LabError(
            f"models: the weights must take at most {_MOST / 1e9:.1f} GB in float32, got {sum(sizes) / 1e9:.1f} GB: "
            "WebAssembly addresses 4 GiB, and loading needs the weights twice"
        )
    if here > free:
        raise LabError(f"models: not enough memory: about {here / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free")


def _write_program(name: str, model: Any, tokenizer: Any, path: Path) -> None:
    prompts = encode_prompts(tokenizer, model.config, name)
    explorer = ExplorerModel(model)
    try:
        write_explorer_program(explorer, path)
    except MODEL_FILE_ERRORS as error:
        raise RunFailedError(f"model: the program of {name} cannot be written: {error}") from error
    largest = check_explorer_program(explorer, path, [ids[:MOST_TOKENS] for ids in prompts])
    _log(f"on {len(prompts)} prompts, logits and attention of the exported {name} differ by at most {largest:.1e}")


def _describe(name: str, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Return facts about a model that the page shows before running it, and sequences on which it measures heads."""
    text = model.config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None) or MOST_TOKENS
    words = sorted(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))
    repeats = RepeatConfig(
        rows=4, length=min(24, len(words), positions // 2), lowest_token=words[0], highest_token=words[-1]
    )
    measured = measure_heads(model, repeats)
    return {
        "name": Path(name).resolve().name if Path(name).exists() else name,
        "type": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": text.num_hidden_layers,
        "heads": text.num_attention_heads,
        "tokens": min(positions, MOST_TOKENS),
        "coefficients": measured.coefficients,
        "window": measured.window,
        "scores": [dataclasses.asdict(head) for head in measured.heads],
        "accuracy": measured.behaviour["second"]["accuracy"],
        "repeats": {"length": measured.length, "rows": sequences_for(model, repeats, measured.window).tolist()},
    }


def _facts(config: ExploreConfig, models: list[dict[str, Any]]) -> dict[str, Any]:
    texts = LETTERS if config.explain else TEXTS
    if config.explain:
        models = [model | {"name": _SHIFTED[bool(model["coefficients"])]} for model in models]
    return {
        "version": kvshift.__version__,
        "explain": config.explain,
        "text": texts[0] if config.text is None else config.text,
        "examples": texts,
        "models": models,
    }
