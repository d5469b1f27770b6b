"""Trainers of torchtitan with tiny two-layer models, on packed rows that every rank can regenerate."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvshift import ShiftOptions

from tests.titan.on_cpu import with_sdpa  # isort: skip  # before torchtitan

from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models import qwen3
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.models.qwen3.config_registry import qwen3_debugmodel

from kvshift.integrations.titan.llama_models import llama_model
from kvshift.integrations.titan.with_shift import with_kv_shift

ROWS, LENGTH, VOCABULARY = 8, 256, 128
TINY_LLAMA: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
}
_PAPER = ShiftOptions()
_CHECKPOINTING = {None: lambda: None, "full": FullAC.Config, "selective": SelectiveAC.Config}


def packed_rows(step: int, length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, labels and positions, (ROWS, length) each; packs end before, at and after edges of chunks."""
    rng = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCABULARY, (ROWS, length + 1), generator=rng)
    half, quarter, eighth = length // 2, length // 4, length // 8
    packs = [
        [length],
        [half, half],
        [half - 1, 1, half],
        [quarter, quarter + 1, length - 2 * quarter - 1],
        [quarter - 1, 1, 1, length - quarter - 1],
        [3, half - 3, 1, half - 1],
        [eighth + 1, half - eighth, half - 1],
        [1] * 5 + [length - 5],
    ]
    chosen = [packs[(row + step) % len(packs)] for row in range(ROWS)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in pack]) for pack in chosen])
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), positions


class NoTokenizer(BaseTokenizer):
    """A tokenizer that does nothing, because rows already consist of tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any = None, *, tokenizer_path: str | None = None) -> None:
        super().__init__()
        self.eos_id = 0

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        return []

    def decode(self, *args: Any, **kwargs: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY


class PackedRows(BaseDataLoader):
    """A loader of the `packed_rows` of each step, divided among data-parallel ranks."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(
        self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, seq_len: int, **unused: Any
    ) -> None:
        self.world, self.rank, self.at_once, self.length, self.step = (
            dp_world_size,
            dp_rank,
            local_batch_size,
            seq_len,
            0,
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        while True:
            self.step += 1
            share = ROWS // self.world
            for start in range(self.rank * share, (self.rank + 1) * share, self.at_once):
                tokens, labels, positions = (
                    x[start : start + self.at_once] for x in packed_rows(self.step - 1, self.length)
                )
                yield {"input": tokens.clone(), "positions": positions.clone()}, labels.clone()

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict.get("step", 0)


class RecordedRows(PackedRows):
    """A loader of the rows that `kvshift train` was trained on, for one process."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackedRows.Config):
        pass

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for step in recorded_steps()["steps"]:
            tokens, positions, labels = (torch.tensor(step[name]) for name in ("input_ids", "position_ids", "labels"))
            # transformers compares the output at t with the label at t + 1, torchtitan with the label at t.
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
            yield {"input": tokens, "positions": positions}, labels


def recorded_steps() -> dict[str, Any]:
    """Return 50 recorded steps of `kvshift train`; see `lab/tests/run/fifty_steps.py`."""
    return json.loads(Path(__file__).with_name("fifty_steps.json").read_text())


def recorded_trainer_config(folder: str) -> Any:
    """Return a configuration with the model and the settings of the recorded steps; norms have no weight decay."""
    recorded = recorded_steps()
    optimizer, (rows, length) = recorded["optimizer"], torch.tensor(recorded["steps"][0]["input_ids"]).shape
    config = tiny_trainer_config(folder, dtype="float32", length=length, model=recorded["model"])
    config.dataloader = RecordedRows.Config()
    config.training.local_batch_size, config.training.steps = rows, len(recorded["steps"])
    config.training.max_norm = optimizer["clip_norm"]
    (every,) = default_adamw(optimizer["learning_rate"], weight_decay=optimizer["weight_decay"]).param_groups
    norms = dataclasses.replace(every, pattern="norm", optimizer_kwargs=every.optimizer_kwargs | {"weight_decay": 0.0})
    config.optimizer = OptimizersContainer.Config(param_groups=[norms, every])
    config.lr_scheduler = LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0)
    return config


def _tiny_qwen(debug_model: Any) -> Any:
    """Return torchtitan's debug model, tied and with QK-norm, in the sizes of the tiny Llama but with larger heads."""
    width, heads, head_size = TINY_LLAMA["hidden_size"], TINY_LLAMA["num_attention_heads"], 16
    rope = dataclasses.replace(debug_model.layers[0].attention.rope, dim=head_size, max_seq_len=512)
    layers = qwen3._build_qwen3_layers(
        fuse_qkv=True, n_layers=2, dim=width, n_heads=heads, n_kv_heads=heads // 2, head_dim=head_size,
        hidden_dim=TINY_LLAMA["intermediate_size"], attn_backend="flex", rope=rope,
    )  # fmt: skip
    sizes = {"num_embeddings": VOCABULARY, "embedding_dim": width}
    return dataclasses.replace(
        debug_model,
        dim=width,
        vocab_size=VOCABULARY,
        norm=dataclasses.replace(debug_model.norm, normalized_shape=width),
        tok_embeddings=dataclasses.replace(debug_model.tok_embeddings, **sizes),
        lm_head=dataclasses.replace(debug_model.lm_head, in_features=width, out_features=VOCABULARY),
        layers=layers,
    )


def tiny_trainer_config(
    folder: str,
    *,
    family: str = "llama3",
    model: Mapping[str, Any] = TINY_LLAMA,
    dtype: str = "float64",
    length: int = LENGTH,
    options: ShiftOptions = _PAPER,
    checkpointing: str | None = None,
    compile_model: bool = False,
    **parallelism: Any,
) -> Any:
    """Return a configuration for all processes; those that no other parallelism uses are data-parallel."""
    config = {"llama3": llama3_debugmodel, "qwen3": qwen3_debugmodel}[family]()
    config.model_spec.model = llama_model(**model) if family == "llama3" else _tiny_qwen(config.model_spec.model)
    config = with_kv_shift(with_sdpa(config), options)
    config.dump_folder = folder
    config.loss = CrossEntropyLoss.Config(global_vocab_size=config.model_spec.model.vocab_size)
    config.tokenizer, config.dataloader = NoTokenizer.Config(), PackedRows.Config()
    config.validator.enable = False
    config.training = dataclasses.replace(
        config.training, seq_len=length, dtype=dtype, disable_cuda_graphs=True, mixed_precision_param=dtype,
        mixed_precision_reduce=dtype,
    )  # fmt: skip
    config.activation_checkpoint = _CHECKPOINTING[checkpointing]()
    config.compile.enable = compile_model
    config.compile.components, config.compile.backend = ["model"], "aot_eager"
    mesh = config.parallelism
    mesh.spmd_backend = "partial_dtensor"  # the only backend that runs several processes with torch 2.13
    for name, value in parallelism.items():
        setattr(mesh, name, value)
    others = mesh.tensor_parallel_degree * mesh.context_parallel_degree * mesh.pipeline_parallel_degree
    mesh.data_parallel_shard_degree = int(os.environ.get("WORLD_SIZE", "1")) // others
    config.training.local_batch_size = ROWS // mesh.data_parallel_shard_degree
    return config
