"""Export of a model as two programs over tensors: "prefill" for prompts, "decode" for the tokens after them.

The exporters of transformers trace both. Inputs and outputs are named tensors. The past consists of the cached keys and
values and of the raw rows of the shift, which are needed to continue a sequence.

    prefill: input_ids (B, T), attention_mask (B, T)
    decode:  input_ids (B, 1), attention_mask (B, N + 1), past_key_values.* of N tokens
    both:    logits (B, T, V), present.* to pass as past_key_values.* to the next call

    *.L.key, *.L.value                  (B, G, N, D)      of layer L, shifted and rotated
    *.L.shift_key, *.L.shift_value      (B, W - 1, G, D)  raw, the newest last
    *.L.shift_query                     (B, W - 1, H, D)  only if queries are shifted

Each row is one sequence, optionally padded on the left. Positions count from its first token.

Shapes: B batch, T positions, N positions of the past, H query heads, G KV heads, D head size, V vocabulary, W window.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.export import Dim
from transformers.cache_utils import DynamicCache

from kvshift import ShiftState
from kvshift.models.extending import CACHE, ShiftDynamicLayer, create_masks
from kvshift_lab.commands.export.comparison import largest_difference, left_padded
from kvshift_lab.core.errors import LabError, RunFailedError, install_command, require_importable

Format = Literal["onnx", "pt2"]
Program = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Maps inputs by name to outputs by name."""

_PACKAGES = {"onnx": ("onnx", "onnx_ir", "onnxscript", "onnxruntime"), "pt2": ()}
_PARTS = {"shift_key": "k", "shift_value": "v", "shift_query": "q"}  # fields of ShiftState


def require_packages(form: Format) -> None:
    """Raise a LabError with install instructions if a package that the format needs is missing."""
    require_importable(f"format {form}", _PACKAGES[form], install_command("export"))


def require_fixed_rotary(config: Any) -> None:
    """Raise a LabError if the angles of the model depend on the length of a sequence; a program would fix them."""
    rope = getattr(config, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):  # in Gemma 3 there is one for each type of layer
        kind = one.get("rope_type") if isinstance(one, dict) else None
        if kind in ("dynamic", "longrope"):
            raise LabError(
                f"model: programs cannot have rope_type {kind!r}, whose angles depend on the sequence length"
            )


class _NamedTensorModel(nn.Module):
    """A wrapper of a model that takes and returns the cache as named tensors."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, past_key_values: dict[str, dict[str, Tensor]] | None = None
    ) -> dict[str, Any]:
        config = self.model.config
        cache = _cache(config, past_key_values)
        embeds = self.model.get_input_embeddings()(input_ids)
        # Create the masks here without position_ids, from which documents would be inferred: a row is one sequence.
        masks = create_masks(config, embeds, attention_mask, cache, None)
        position_ids = (attention_mask.cumsum(1) - 1).clamp(min=0)[:, -input_ids.shape[1] :]
        logits = self.model(
            input_ids=input_ids, attention_mask=masks, position_ids=position_ids, use_cache=True, **{CACHE: cache}
        ).logits
        return {"logits": logits, "present": {str(i): _tensors(layer) for i, layer in enumerate(cache.layers)}}


def _cache(config: Any, past: Mapping[str, Mapping[str, Tensor]] | None) -> DynamicCache:
    """Create a cache from the past. Sliding-window layers keep all of it; their masks limit what attention sees."""
    window = config.shift_window if config.shift_targets else 1
    cache = DynamicCache()
    layers: list[Any] = [ShiftDynamicLayer(window) for _ in range(config.num_hidden_layers)]
    cache.layers = layers
    cache.layer_class_to_replicate = None
    for i, tensors in (past or {}).items():
        layer = layers[int(i)]
        layer.keys, layer.values = tensors["key"], tensors["value"]
        layer.dtype, layer.device, layer.is_initialized = layer.keys.dtype, layer.keys.device, True
        if "shift_key" in tensors:
            k, v, q = (tensors.get(name) for name in _PARTS)
            layer.shift_state = ShiftState(k, v, window - 1, q)  # type: ignore[arg-type]
    return cache


def _tensors(layer: Any) -> dict[str, Tensor]:
    found = {"key": layer.keys, "value": layer.values}
    state = layer.shift_state
    if state is not None:
        found |= {name: getattr(state, part) for name, part in _PARTS.items() if getattr(state, part) is not None}
    return found


def write_programs(model: Any, folder: Path, form: Format) -> None:
    """Trace a model and write `prefill` and `decode` to a folder.

    Args:
        model: A model in evaluation mode, on the CPU.
        form: Format of the files: `.onnx`, with the weights in `.onnx.data` beside it, or `.pt2`.
    """
    module = _NamedTensorModel(model).requires_grad_(False).eval()
    ids, mask = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    batch, length, before = Dim("batch", min=1), Dim("length", min=1), Dim("past", min=1)
    given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    shapes: dict[str, Any] = {name: {0: batch, 1: length} for name in given}
    with torch.no_grad(), _quietly():
        past = module(**given)["present"]
    write_program(module, given, shapes, folder / f"prefill.{form}")
    given = {"input_ids": ids[:, :1], "attention_mask": torch.nn.functional.pad(mask, (0, 1), value=1)}
    shapes = {"input_ids": {0: batch}, "attention_mask": {0: batch, 1: before + 1}}
    # The number of rows in the shift state is fixed by its window.
    sizes = {name: {0: batch, 2: before} for name in ("key", "value")} | {name: {0: batch} for name in _PARTS}
    shapes["past_key_values"] = {i: {name: sizes[name] for name in layer} for i, layer in past.items()}
    given["past_key_values"] = past
    write_program(module, given, shapes, folder / f"decode.{form}")


def write_program(
    module: Any, inputs: dict[str, Any], shapes: dict[str, Any], path: Path, *, simplify: bool = True
) -> None:
    """Trace a module that takes and returns named tensors, and write it in the format of the path's suffix.

    Args:
        module: A module in evaluation mode, on the CPU.
        inputs: Example inputs for tracing, by argument. Keys of nested dicts become names with dots.
        shapes: The dynamic sizes of the inputs, in the format of `torch.export`.
        path: Path of the program, `.onnx` (with the weights in `.onnx.data` beside it) or `.pt2`.
        simplify: Optimize an ONNX program, to a third of its size without weights. This takes two thirds of the export
            time for 30 layers, and ONNX Runtime applies equivalent optimizations when it loads a program.
    """
    # Without the second option, torch.export assumes that every size is at least 2.
    options: dict[str, Any] = {"dynamic_shapes": shapes, "prefer_deferred_runtime_asserts_over_guards": True}
    with torch.no_grad(), _quietly():
        if path.suffix == ".pt2":
            from transformers.exporters.configs import DynamoConfig
            from transformers.exporters.exporter_dynamo import DynamoExporter

            torch.export.save(_program(DynamoExporter().export(module, inputs, DynamoConfig(**options))), path)
            return
        import onnx_ir
        from transformers.exporters.configs import OnnxConfig
        from transformers.exporters.exporter_onnx import OnnxExporter

        program = _program(OnnxExporter().export(module, inputs, OnnxConfig(**options, optimize=simplify)))
        onnx_ir.save(getattr(program, "model", program), path, external_data=f"{path.name}.data")


def _program(exported: Any) -> Any:
    return getattr(exported, "program", exported)  # transformers 5.16 returned the program itself


@contextmanager
def _quietly() -> Iterator[None]:
    """Suppress what the exporters print and log: warnings about untested versions, and progress."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporters use deprecated functions of torch
            yield
    finally:
        logging.disable(disabled)


def nest_names(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Convert tensors with dotted names to nested dicts, the inputs of a `.pt2` program."""
    found: dict[str, Any] = {}
    for name, tensor in tensors.items():
        *outer, last = name.split(".")
        place = found
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = tensor
    return found


def flatten_names(tensors: Mapping[str, Any], before: str = "") -> dict[str, Tensor]:
    """Convert nested dicts to tensors with dotted names, the inverse of `nest_names`."""
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        found |= {before + name: value} if isinstance(value, Tensor) else flatten_names(value, f"{before}{name}.")
    return found


def load_program(path: Path) -> Program:
    """Load a program that `write_programs` wrote, as a callable."""
    if path.suffix == ".pt2":
        module = torch.export.load(path).module()

        def run_module(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
            return flatten_names(module(**nest_names(inputs)))

        return run_module

    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only: the warnings are about constants that it does not fold
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return {name: torch.from_numpy(array) for name, array in zip(names, found, strict=True)}

    return run


def greedy(prefill: Program, decode: Program, ids: Tensor, mask: Tensor, new_tokens: int) -> Tensor:
    """Continue each row with `new_tokens` greedy tokens; returns prompts and continuations (B, T + new_tokens)."""
    outputs = prefill({"input_ids": ids, "attention_mask": mask})
    found = [ids]
    for step in range(new_tokens):
        found.append(outputs["logits"][:, -1:].argmax(-1))
        if step + 1 < new_tokens:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            past = {name.replace("present", "past_key_values"): x for name, x in outputs.items() if name != "logits"}
            outputs = decode({"input_ids": found[-1], "attention_mask": mask, **past})
    return torch.cat(found, dim=1)


def check_programs(folder: Path, form: Format, prompts: list[Tensor], expected: dict[str, Tensor]) -> float:
    """Compare the programs with the results of `compute`, on single prompts and on a left-padded batch.

    Returns:
        The largest difference of logits. The tokens are equal.

    Raises:
        RunFailedError: The programs do not run, or their results differ.
    """
    padded, mask = left_padded(prompts)
    found = {}
    try:
        prefill, decode = (load_program(folder / f"{name}.{form}") for name in ("prefill", "decode"))
        for i, prompt in enumerate(prompts):
            ids, ones = prompt.unsqueeze(0), torch.ones(1, len(prompt), dtype=torch.long)
            found[f"{i} logits"] = prefill({"input_ids": ids, "attention_mask": ones})["logits"]
            found[f"{i} tokens"] = greedy(prefill, decode, ids, ones, expected[f"{i} tokens"].shape[1] - len(prompt))
        new_tokens = expected["padded tokens"].shape[1] - padded.shape[1]
        found["padded tokens"] = greedy(prefill, decode, padded, mask, new_tokens)
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        raise RunFailedError(f"the exported programs do not run: {str(error).strip().splitlines()[0]}") from error
    return largest_difference(expected, found, "in the exported programs")
