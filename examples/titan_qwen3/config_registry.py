"""Pre-train your own model with KV shift in torchtitan: a module whose functions `--config` names (docs/torchtitan.md).

pip install '.[titan]'
PYTHONPATH=examples torchrun --nproc-per-node 8 -m torchtitan.train --module titan_qwen3 --config small \
    --parallelism.spmd_backend partial_dtensor --dump_folder outputs/small
"""

from torchtitan.models.qwen3.config_registry import qwen3_1_7b, qwen3_debugmodel
from torchtitan.trainer import Trainer

from kvshift import ShiftOptions
from kvshift.integrations.titan.with_shift import with_kv_shift


def small() -> Trainer.Config:
    """Return torchtitan's small Qwen 3, with its sample data, and a shift of keys alone."""
    config = with_kv_shift(qwen3_debugmodel(), ShiftOptions(targets=("k",)))
    config.training.steps = 100
    return config


def large() -> Trainer.Config:
    """Return Qwen 3 1.7B, with keys and values mixed with the last two."""
    return with_kv_shift(qwen3_1_7b(), ShiftOptions(window=3))
