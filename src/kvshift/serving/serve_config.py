"""Options of `kvshift serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """The model to serve, and options of vLLM.

    Starts `vllm serve` with kvshift's plugin: a server of the OpenAI API, by default on port 8000. docs/serving.md says
    which models and which of vLLM's options it supports; `kvshift serve CHECKPOINT --help` lists these options.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A run folder, a model folder, or a model on the hub; clients use it as the name of the model."""
    vllm_options: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[VLLM-OPTIONS ...]")] = ()
    """All further arguments are passed to vLLM unchanged, such as --port 8001."""
