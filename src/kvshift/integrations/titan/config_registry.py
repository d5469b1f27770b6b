"""Configurations that torchtitan finds by name: `--module kvshift.integrations.titan --config NAME`."""

from __future__ import annotations

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.llama3 import model_registry
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.trainer import Trainer

from kvshift.integrations.titan.llama_models import paper_model
from kvshift.integrations.titan.with_shift import with_kv_shift
from kvshift.layers.options import ShiftOptions


def llama3_debugmodel(options: ShiftOptions = ShiftOptions()) -> Trainer.Config:
    """Return the configuration of torchtitan's Llama 3 debug model, of 6 layers, with KV shift."""
    return with_kv_shift(llama3.llama3_debugmodel(), options)


def llama3_8b(options: ShiftOptions = ShiftOptions()) -> Trainer.Config:
    """Return the configuration of Llama 3 8B with KV shift."""
    return with_kv_shift(llama3.llama3_8b(), options)


def qwen3_debugmodel(options: ShiftOptions = ShiftOptions()) -> Trainer.Config:
    """Return the configuration of torchtitan's Qwen 3 debug model with KV shift."""
    return with_kv_shift(qwen3.qwen3_debugmodel(), options)


def paper_1_5b(options: ShiftOptions = ShiftOptions()) -> Trainer.Config:
    """Return the configuration of the paper's 1.5B model: 64 GPUs, 1,048,576 tokens per step, 10 billion tokens."""
    return _paper("1.5B", options, rows=8, steps=9_537, warmup=1000, lr=2e-4)


def paper_2_9b(options: ShiftOptions = ShiftOptions()) -> Trainer.Config:
    """Return the configuration of the paper's 2.9B model: 512 GPUs, 16,777,216 tokens per step, 500 billion tokens."""
    return _paper("2.9B", options, rows=8, steps=29_803, warmup=600, lr=8e-4)


def paper_6_7b(options: ShiftOptions = ShiftOptions()) -> Trainer.Config:
    """Return the configuration of the paper's 6.7B model: 64 GPUs, 1,048,576 tokens per step, 10 billion tokens."""
    return _paper("6.7B", options, rows=8, steps=9_537, warmup=1000, lr=2e-4)


def paper_13b(options: ShiftOptions = ShiftOptions()) -> Trainer.Config:
    """Return the configuration of the paper's 13B model: 128 GPUs, 2,097,152 tokens per step, 10 billion tokens."""
    return _paper("13B", options, rows=8, steps=4_769, warmup=1000, lr=2e-4)


def paper_19b(options: ShiftOptions = ShiftOptions()) -> Trainer.Config:
    """Return the configuration of the paper's 19B model: 240 GPUs, 2,949,120 tokens per step, 200 billion tokens."""
    return _paper("19B", options, rows=1, steps=67_817, warmup=3000, lr=2e-4)


def _paper(size: str, options: ShiftOptions, *, rows: int, steps: int, warmup: int, lr: float) -> Trainer.Config:
    """Return a configuration of Table 16: FSDP over all GPUs, AdamW, a constant learning rate after the warm-up.

    The paper's text and tokenizer are not public: c4 replaces the text, and `--hf_assets_path` must name a tokenizer
    whose vocabulary is not larger than the model's.
    """
    spec = model_registry("debugmodel")
    spec.model = paper_model(size)
    config = Trainer.Config(
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size)),
        hf_assets_path="./assets/hf/tokenizer",
        model_spec=spec,
        optimizer=default_adamw(lr=lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=warmup, decay_ratio=0.0),
        training=TrainingConfig(local_batch_size=rows, seq_len=spec.model.max_seq_len, steps=steps),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        checkpoint=CheckpointManager.Config(enable=True, interval=1000),
        activation_checkpoint=FullAC.Config(),
    )
    spec.flavor = size
    return with_kv_shift(config, options)
