"""What `kvshift serve` is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import tyro

__all__ = ["ServeOptions"]


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Which model is served. The rest is vLLM's business.

    Starts `vllm serve` with kvshift's plugin: a server of the OpenAI API, by default on port 8000. docs/serving.md says
    which models and which of vLLM's options it takes; `kvshift serve CHECKPOINT --help` lists these options.
    """

    checkpoint: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT")]
    """A run folder, a model folder, or a model on the hub; also the name that clients call the model by."""
    vllm_options: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[VLLM-OPTIONS ...]")] = ()
    """All that follows goes to vLLM as it is, such as --port 8001."""
