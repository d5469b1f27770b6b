"""Options of `kvshift bench`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from kvshift_lab.core.errors import require
from kvshift_lab.core.options import MACHINE_SPECIFIC, NO_EFFECT_ON_RESULTS

Part = Literal["op", "layer", "train", "prefill", "decode", "memory", "sweep"]
PARTS: tuple[Part, ...] = get_args(Part)
PresetName = Literal["smoke", "laptop", "paper"]


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Options of the benchmark: the parts to measure, their size, and the folder of the results.

    Running the same command again measures only the missing cases.
    """

    parts: tuple[Part, ...] = field(default=PARTS, metadata=NO_EFFECT_ON_RESULTS)
    """Parts to measure. op: the operator. layer: an attention layer. train, prefill, decode: whole models. memory:
    bytes saved for the backward pass. sweep: cost as a function of T, B, G, D and dtype."""
    cases: tuple[str, ...] = field(default=(), metadata=NO_EFFECT_ON_RESULTS)
    """Measure only the cases whose names contain all of these texts."""
    device: Literal["auto", "cpu", "cuda"] = field(default="auto", metadata=MACHINE_SPECIFIC)
    """Device to measure on. auto: CUDA if there is a GPU."""
    preset: PresetName = "laptop"
    """Size of the measurements. smoke: seconds, to check that everything runs. laptop: minutes on two cores. paper:
    the paper's sizes, for a GPU."""
    rounds: int | None = None
    """Number of measurements of each implementation. None: the preset's number."""
    layers: int | None = None
    """Number of layers of the 2.9B model in the preset paper. None: as many as fit in the device's memory."""
    compile: bool = True
    """Also measure torch.compile (never in smoke); on a CPU it needs a C++ compiler."""
    system_malloc: bool = field(default=False, metadata=MACHINE_SPECIFIC)
    """Use the C library's allocator with its default settings. Otherwise it is set to retain freed memory, as PyTorch's
    guide for CPUs advises, because allocating new pages costs more than the measured operations."""
    out: Path | None = field(default=None, metadata=MACHINE_SPECIFIC)
    """Folder for the rows, the table and the plot. None: results/bench/HARDWARE."""

    def check(self) -> None:
        """Raise a LabError if a field is invalid; it names the field, its value and the allowed values."""
        presets = get_args(PresetName)
        require(self.preset in presets, "preset", self.preset, f"one of {', '.join(presets)}")
        known = bool(self.parts) and set(self.parts) <= set(PARTS)
        require(known, "parts", [*self.parts], f"some of {', '.join(PARTS)}")
        for name in ("rounds", "layers"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, value, "1 or more")
        require(self.device in ("auto", "cpu", "cuda"), "device", self.device, "auto, cpu or cuda")
