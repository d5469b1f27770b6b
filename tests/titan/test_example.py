"""The module of examples/titan_qwen3 has the configurations that it promises."""

from __future__ import annotations

import runpy
from pathlib import Path

from . import on_cpu  # noqa: F401  # before torchtitan

EXAMPLE = Path(__file__).parents[2] / "examples/titan_qwen3/config_registry.py"


def test_the_example_has_models_with_the_shift():
    functions = runpy.run_path(str(EXAMPLE))
    for name, targets, window in (("small", ("k",), 2), ("large", ("k", "v"), 3)):
        layers = functions[name]().model_spec.model.layers
        assert {(layer.attention.shift.options.targets, layer.attention.shift.options.window) for layer in layers} == {
            (targets, window)
        }
