"""What `kvshift bench` is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from kvshift.lab.errors import LabError

__all__ = ["PARTS", "BenchConfig", "Part", "PresetName"]

Part = Literal["op", "layer", "train", "prefill", "decode", "memory", "sweep"]
PARTS: tuple[Part, ...] = get_args(Part)
PresetName = Literal["smoke", "laptop", "paper"]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What is measured, how large, and where the rows go.

    The same command, given again, measures the cases that are missing.
    """

    parts: tuple[Part, ...] = PARTS
    """op: the operator. layer: an attention layer. train, prefill, decode: whole models. memory: bytes kept for
    backward. sweep: cost against T, B, G, D and dtype."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a GPU."""
    preset: PresetName = "laptop"
    """smoke: seconds, to see that it works. laptop: minutes on two cores. paper: the paper's sizes, for a GPU."""
    rounds: int | None = None
    """How many measurements of each implementation; None: the preset's."""
    layers: int | None = None
    """Layers of the paper preset's 2.9B shape; None: as many as the memory of the device holds."""
    compile: bool = True
    """Whether torch.compile takes part (never in smoke); on a CPU it needs a C++ compiler."""
    system_malloc: bool = False
    """Leave the C library's allocator as it is. Otherwise it keeps freed memory, as PyTorch's guide for CPUs advises:
    new pages cost more than what is measured."""
    out: Path | None = None
    """Folder of rows, table and plot; None: results/bench/HARDWARE."""

    def check(self) -> None:
        """Raise a LabError that names the field, its value, and what it may be."""
        if self.preset not in get_args(PresetName):
            raise LabError(f"preset must be one of {', '.join(get_args(PresetName))}, got {self.preset!r}")
        unknown = [part for part in self.parts if part not in PARTS]
        if unknown or not self.parts:
            raise LabError(f"parts must name some of {', '.join(PARTS)}, got {list(self.parts)!r}")
        for name in ("rounds", "layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LabError(f"{name} must be 1 or more, got {value}")
        if self.device not in ("auto", "cpu", "cuda"):
            raise LabError(f"device must be auto, cpu or cuda, got {self.device!r}")
