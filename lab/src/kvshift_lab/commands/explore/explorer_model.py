"""A model as one program that takes the coefficients of its shift and returns the attention of every head.

    inputs:   input_ids (1, T)
              coefficients.L.alpha, coefficients.L.beta (G, W), coefficients.L.gamma (H, W), if layer L shifts them
    outputs:  logits (1, T, V)
              attention.L (1, H, T, T): probabilities of layer L, [query, shifted key]

Shapes: T positions, H query heads, G KV heads, V vocabulary, W window.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from kvshift import KVShift
from kvshift_lab.commands.export.comparison import largest_difference
from kvshift_lab.commands.export.programs import flatten_names, load_program, write_program
from kvshift_lab.core.errors import RunFailedError

_INSIDE = 100e6  # maximum size in bytes of weights that are stored in the program itself
_COEFFICIENTS = {"k": "alpha", "v": "beta", "q": "gamma"}


class ExplorerModel(nn.Module):
    """A causal language model that takes its shift coefficients as arguments.

    Args:
        model: A model in evaluation mode, with attn_implementation "eager", the only one that returns probabilities. It
            is modified: constrained coefficients are replaced by free ones with the same values.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        named = model.named_modules()
        self.shifts = [(name, layer) for name, layer in named if isinstance(layer, KVShift) and layer.targets]
        for _, layer in self.shifts:
            _free(layer)

    def coefficients(self) -> dict[str, dict[str, Tensor]]:
        """Return the model's coefficients by layer and name, in the format of `forward`."""
        return {
            str(number): {name: parameter.detach() for name, parameter in layer.named_parameters(recurse=False)}
            for number, (_, layer) in enumerate(self.shifts)
        }

    def forward(
        self, input_ids: Tensor, coefficients: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> dict[str, Any]:
        """Return logits and attention for ids (1, T), by default with the model's own coefficients."""
        given = {
            f"{self.shifts[int(number)][0]}.{name}": values
            for number, layer in (coefficients or {}).items()
            for name, values in layer.items()
        }
        options = {"input_ids": input_ids, "use_cache": False, "output_attentions": True}
        output = torch.func.functional_call(self.model, given, kwargs=options)
        return {"logits": output.logits, "attention": {str(i): layer for i, layer in enumerate(output.attentions)}}


@torch.no_grad()
def _free(layer: KVShift) -> None:
    values = layer.coefficients()
    layer.options = replace(layer.options, constraint="free")
    for target, value in values.items():
        layer.register_parameter(_COEFFICIENTS[target], nn.Parameter(value.detach().clone()))


def write_explorer_program(explorer: ExplorerModel, path: Path) -> None:
    """Trace the model and write an `.onnx` program; large weights are written to `.onnx.data` beside it."""
    import onnx_ir

    coefficients = explorer.coefficients()
    inputs: dict[str, Any] = {"input_ids": torch.ones(1, 5, dtype=torch.long)}
    shapes: dict[str, Any] = {"input_ids": {1: Dim("length", min=1)}}
    if coefficients:
        inputs["coefficients"] = coefficients
        shapes["coefficients"] = {number: {name: {} for name in layer} for number, layer in coefficients.items()}
    large = sum(parameter.nbytes for parameter in explorer.parameters()) > _INSIDE
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        traced = Path(place) / path.name
        write_program(explorer.requires_grad_(False).eval(), inputs, shapes, traced, simplify=not large)
        program = onnx_ir.load(traced)
        for node in program.graph.all_nodes():
            node.metadata_props.clear()  # source locations, which take most of a small program
        if large:
            onnx_ir.save(program, path, external_data=f"{path.name}.data")
        else:
            onnx_ir.save(onnx_ir.external_data.load_to_model(program), path)


@torch.no_grad()
def check_explorer_program(explorer: ExplorerModel, path: Path, prompts: list[Tensor]) -> float:
    """Compare the program with the model, with the model's own coefficients and with others.

    Args:
        explorer: The model.
        path: Path of the program.
        prompts: Prompts (T,) of any lengths.

    Returns:
        The largest difference of logits and attention.

    Raises:
        RunFailedError: The program does not run, or its results differ.
    """
    own = explorer.coefficients()
    others = {number: {name: x.flip(1) for name, x in layer.items()} for number, layer in own.items()}
    expected, found = {}, {}
    try:
        program = load_program(path)
        for i, prompt in enumerate(prompts):
            for which, coefficients in (("", own), ("other ", others)) if own else (("", {}),):
                ids = prompt.unsqueeze(0)
                given = {f"coefficients.{name}": values for name, values in flatten_names(coefficients).items()}
                for into, outputs in (
                    (expected, flatten_names(explorer(ids, coefficients))),
                    (found, program({"input_ids": ids, **given})),
                ):
                    into[f"{i} {which}logits"] = outputs["logits"]
                    into[f"{i} {which}attention"] = torch.stack([x for n, x in outputs.items() if n != "logits"])
    except Exception as error:  # ONNX Runtime's exceptions have no common base class
        raise RunFailedError(f"the exported program does not run: {str(error).strip().splitlines()[0]}") from error
    return largest_difference(expected, found, "in the exported program")
