"""The presets of the benchmark and the sizes that each measures.

Shapes are (B, T, G, D): batch, positions, KV heads, head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kvshift_lab.benchmarks.bench_config import PresetName

Shape = tuple[int, int, int, int]

# About a million parameters per layer: two cores train it in under a second per step.
_SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
_WIDER = {**_SMALL, "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8}
_TINY = {**_SMALL, "vocab_size": 61, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2}


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """The size of an attention layer and of its input."""

    batch: int
    length: int
    embed_dim: int
    heads: int
    kv_heads: int
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The size of a language model and of its input.

    Attributes:
        size: a name in `kvshift.models.llama.SIZES`; None: `fields` alone.
        fields: fields of the configuration, which override those of `size`.
        batch, length: number of sequences and their length, in a training step and in a prefill.
        tokens: number of tokens to decode after a prompt of 16.
        fit_memory: whether to reduce the number of layers to fit in the memory of the device.
    """

    name: str
    size: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    batch: int
    length: int
    tokens: int
    dtype: torch.dtype = torch.float32
    fit_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Shapes that change one axis of `base` at a time."""

    base: Shape
    axes: Mapping[str, tuple[int, ...]]
    dtypes: tuple[torch.dtype, ...]


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The sizes of all parts.

    Attributes:
        rounds: number of rounds of operator, layer and sweep.
        model_rounds: number of rounds of training, prefill and decoding.
        compile: whether torch.compile is measured.
        memory: (name in SIZES, tokens) of each decoder layer whose memory is measured.
    """

    rounds: int
    model_rounds: int
    compile: bool
    shapes: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    layers: tuple[LayerSize, ...]
    models: tuple[ModelSize, ...]
    memory: tuple[tuple[str, int], ...]
    sweep: Sweep


PRESETS: Mapping[PresetName, Preset] = {
    "smoke": Preset(
        rounds=3,
        model_rounds=2,
        compile=False,
        shapes=((2, 67, 3, 16),),
        dtypes=(torch.float32, torch.bfloat16),
        layers=(LayerSize(batch=2, length=67, embed_dim=48, heads=6, kv_heads=3),),
        models=(ModelSize(name="tiny Llama", fields=_TINY, batch=2, length=37, tokens=5),),
        memory=(("0.2B", 512),),
        sweep=Sweep(
            base=(2, 64, 2, 16),
            axes={"T": (64, 128, 256), "B": (1, 2, 4), "G": (1, 2, 4), "D": (8, 16, 32)},
            dtypes=(torch.float32,),
        ),
    ),
    "laptop": Preset(
        rounds=30,
        model_rounds=30,
        compile=True,
        shapes=((4, 2048, 4, 128), (8, 1024, 16, 64)),
        dtypes=(torch.float32, torch.bfloat16),
        layers=(
            LayerSize(batch=4, length=512, embed_dim=512, heads=8, kv_heads=4),
            LayerSize(batch=4, length=512, embed_dim=512, heads=8, kv_heads=4, dtype=torch.bfloat16),
        ),
        models=(
            ModelSize(name="small Llama", fields=_SMALL, batch=8, length=512, tokens=64),
            ModelSize(name="wider Llama", fields=_WIDER, batch=4, length=512, tokens=64),
        ),
        memory=(("0.2B", 4096), ("2.9B", 4096)),
        sweep=Sweep(
            base=(1, 4096, 4, 64),
            axes={
                "T": (512, 2048, 8192, 32_768, 131_072),
                "B": (1, 2, 4, 8, 16),
                "G": (1, 2, 4, 8, 16),
                "D": (32, 64, 128, 256),
            },
            dtypes=(torch.float32, torch.bfloat16),
        ),
    ),
    "paper": Preset(
        rounds=50,
        model_rounds=20,
        compile=True,
        shapes=((8, 4096, 4, 128), (16, 2048, 16, 64)),
        dtypes=(torch.bfloat16,),
        layers=(
            LayerSize(batch=4, length=4096, embed_dim=2560, heads=20, kv_heads=4, dtype=torch.bfloat16),
            LayerSize(batch=8, length=4096, embed_dim=768, heads=12, kv_heads=4, dtype=torch.bfloat16),
        ),
        models=(
            ModelSize(name="2.9B", size="2.9B", batch=2, length=4096, tokens=64, dtype=torch.bfloat16, fit_memory=True),
            ModelSize(name="0.2B", size="0.2B", batch=8, length=4096, tokens=64, dtype=torch.bfloat16),
        ),
        memory=(("0.2B", 4096), ("2.9B", 4096)),
        sweep=Sweep(
            base=(4, 4096, 4, 128),
            axes={
                "T": (512, 2048, 8192, 32_768, 131_072),
                "B": (1, 4, 16, 64),
                "G": (1, 4, 16, 64),
                "D": (32, 64, 128, 256),
            },
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
        ),
    ),
}
