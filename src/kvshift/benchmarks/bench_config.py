"""Options of `kvshift bench`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from kvshift.lab.core.errors import require
from kvshift.lab.core.options import FREE, MACHINE

Part = Literal["op", "layer", "train", "prefill", "decode", "memory", "sweep"]
PARTS: tuple[Part, ...] = get_args(Part)
PresetName = Literal["smoke", "laptop", "paper"]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """What to measure, at which size, and the folder of the results.

    The same command, given again, measures only the missing cases.
    """

    parts: tuple[Part, ...] = field(default=PARTS, metadata=FREE)
    """op: the operator. layer: an attention layer. train, prefill, decode: whole models. memory: bytes saved for the
    backward pass. sweep: cost against T, B, G, D and dtype."""
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata=MACHINE)
    """Device to measure on. auto: CUDA if there is a GPU."""
    preset: PresetName = "laptop"
    """smoke: seconds, to see that it works. laptop: minutes on two cores. paper: the paper's sizes, for a GPU."""
    rounds: int | None = None
    """Measurements of each implementation. None: as many as the preset has."""
    layers: int | None = None
    """Layers of the 2.9B shape in the preset paper. None: as many as fit in the memory of the device."""
    compile: bool = True
    """Also measure torch.compile (never in smoke); on a CPU it needs a C++ compiler."""
    system_malloc: bool = field(default=False, metadata=MACHINE)
    """Use the C library's allocator with its default settings. Otherwise it retains freed memory, as PyTorch's guide
    for CPUs advises, because allocating new pages costs more than the measured operations."""
    out: Path | None = field(default=None, metadata=MACHINE)
    """Folder of the rows, the table and the plot. None: results/bench/HARDWARE."""

    def check(self) -> None:
        """Raise a LabError that names the field, its value, and what it may be."""
        presets = get_args(PresetName)
        require(self.preset in presets, "preset", self.preset, f"one of {', '.join(presets)}")
        known = bool(self.parts) and set(self.parts) <= set(PARTS)
        require(known, "parts", [*self.parts], f"some of {', '.join(PARTS)}")
        for name in ("rounds", "layers"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "1 or more")
        require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "auto, cpu or cuda")
