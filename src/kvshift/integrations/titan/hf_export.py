r"""Export of a torchtitan checkpoint to a transformers model folder, for `kvshift generate`, `eval` and `vllm serve`.

python -m kvshift.integrations.titan.hf_export --config paper_1_5b --checkpoint outputs/checkpoint/step-1000 --out model
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.nn.attention.flex_attention import and_masks, create_block_mask, create_mask
from torchtitan.models.common.attention import (
    FlexAttention,
    VarlenAttention,
    get_causal_mask_mod,
    get_document_mask_mod,
)
from torchtitan.models.common.rope import RoPE
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from kvshift.integrations.titan.hf_config import check_tensors, hf_config

_DOCUMENTS = ((64,), (1, 30, 33))  # lengths of those in the rows on which logits are compared
_TOLERANCE = 1e-4  # of the largest logit; both compute in float32


def export_checkpoint(config: Trainer.Config, checkpoint: str | Path, out: str | Path) -> PreTrainedModel:
    """Write the model of a checkpoint in float32. Any number of processes may have saved the checkpoint.

    The folder is written beside `out`, loaded, and renamed once its logits are those of torchtitan's model.

    Args:
        config: the configuration of the run, made by `with_kv_shift`.
        checkpoint: a folder "step-N" of torch.distributed.checkpoint.
        out: the new folder. (The tokenizer is not copied into it.)

    Returns:
        The exported model, loaded from `out`.

    Raises:
        ValueError: transformers has no equal of this model, the checkpoint does not have its weights, or the logits
            differ. The message names what differs; no folder is written.
        FileExistsError: `out` exists.
    """
    spec: Any = config.model_spec
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"out must be a new folder, got {out}, which exists")
    target = hf_config(spec.model)
    with torch.device("meta"):
        names = spec.model.build().state_dict()
    state = {name: torch.empty(x.shape, dtype=torch.float32) for name, x in names.items()}
    _refuse_unread(checkpoint, state)
    load(state, checkpoint_id=str(checkpoint), no_dist=True)
    expected = _logits(spec.model, state)
    converted = spec.state_dict_adapter(spec.model, None).to_hf(state)
    check_tensors(target, {name: list(x.shape) for name, x in converted.items()}, str(checkpoint))
    with torch.device("meta"):
        exported = AutoModelForCausalLM.from_config(target, dtype=torch.float32)
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        exported.save_pretrained(partial, state_dict=converted)
        del state, converted
        written = AutoModelForCausalLM.from_pretrained(partial, dtype=torch.float32).eval()
        _compare_logits(written, expected)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    written.name_or_path = written.config.name_or_path = str(out)
    return written


def _refuse_unread(checkpoint: str | Path, state: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if the model in the checkpoint has tensors that this one has not, or not in this shape."""
    saved: Any = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    roots = {name.partition(".")[0] for name in state}
    shapes = {name: tuple(x.size) for name, x in saved.items() if name.partition(".")[0] in roots}
    expected = {name: tuple(x.shape) for name, x in state.items()}
    different = sorted(name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name))
    if different:
        said = [f"{name} must be {expected.get(name, 'left out')}, got {shapes.get(name)}" for name in different[:3]]
        raise ValueError(f"{checkpoint} must have the tensors of config: {'; '.join(said)}")


def _rows(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return random tokens and their positions in packed documents."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in lengths]) for lengths in _DOCUMENTS])
    return torch.randint(vocabulary, positions.shape, generator=torch.Generator().manual_seed(0)), positions


@torch.no_grad()
def _logits(config: Any, state: Mapping[str, Tensor]) -> Tensor:
    """Return the logits of torchtitan's model on `_rows`, with SDPA in place of its kernels for GPUs."""
    config = deepcopy(config)
    tokens, positions = _rows(config.vocab_size)
    for layer in config.layers:
        attention = layer.attention
        attention.rope = replace(attention.rope, max_seq_len=tokens.shape[1])
        if type(attention.inner_attention) in (FlexAttention.Config, VarlenAttention.Config):
            attention.inner_attention = _MaskedSDPA.Config()
    with torch.device("meta"):
        model = config.build()
    model.load_state_dict(state, assign=True)
    for module in model.modules():
        if isinstance(module, RoPE):
            module._init_self_buffers(buffer_device=torch.device("cpu"))
    causal = and_masks(get_causal_mask_mod(), get_document_mask_mod(positions))
    mask = create_block_mask(causal, len(tokens), None, tokens.shape[1], tokens.shape[1], device="cpu")
    return model.eval()(tokens, positions=positions, attention_masks=mask)


@torch.no_grad()
def _compare_logits(written: PreTrainedModel, expected: Tensor) -> None:
    tokens, positions = _rows(written.config.vocab_size)
    found = written(input_ids=tokens, position_ids=positions, use_cache=False).logits
    difference, limit = (found - expected).abs().max().item(), _TOLERANCE * expected.abs().max().item()
    if not difference <= limit:  # also if they are not finite
        raise ValueError(
            f"the exported model must have the logits of torchtitan's, up to {limit:.1e}; they differ by "
            f"{difference:.1e}"
        )


class _MaskedSDPA(Module):
    """torchtitan's inner attention, (batch, tokens, heads, head size), computed by SDPA with a dense mask."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """It has no options."""

    def __init__(self, config: Config) -> None:
        super().__init__()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, attention_masks: Any, scale: float | None, enable_gqa: bool
    ) -> Tensor:
        mask = create_mask(attention_masks.mask_mod, len(q), None, q.shape[1], k.shape[1], device=str(q.device))
        heads = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=enable_gqa).transpose(
            1, 2
        )


def main() -> None:
    """Export a checkpoint, with options from the command line."""
    parser = argparse.ArgumentParser(description="Convert a checkpoint of torchtitan to a folder of transformers.")
    parser.add_argument("--module", default="kvshift.integrations.titan", help="--module of torchtitan")
    parser.add_argument("--config", required=True, help="--config of torchtitan")
    parser.add_argument("--checkpoint", required=True, type=Path, help="checkpoint folder, step-N")
    parser.add_argument("--out", required=True, type=Path, help="folder to write")
    given = parser.parse_args()
    config = getattr(import_module(f"{given.module}.config_registry"), given.config)()
    export_checkpoint(config, given.checkpoint, given.out)


if __name__ == "__main__":
    main()
