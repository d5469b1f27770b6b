r"""Export of a torchtitan checkpoint to a transformers model folder, for `kvshift generate`, `eval` and `serve`.

python -m kvshift.integrations.titan.hf_export --config paper_1_5b --checkpoint outputs/checkpoint/step-1000 --out model
"""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torchtitan.models.common.rope import RoPE
from torchtitan.models.llama3.model import Llama3Model
from torchtitan.trainer import Trainer
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from kvshift.models import llama, retrofit  # noqa: F401  # imported to register their configurations
from kvshift.models.llama import KVShiftLlamaConfig
from kvshift.models.retrofit.families import QWEN3


def export_checkpoint(config: Trainer.Config, checkpoint: str | Path, out: str | Path) -> PreTrainedModel:
    """Write the model of a checkpoint in float32. Any number of processes may have saved the checkpoint.

    Args:
        config: the configuration of the run, made by `with_kv_shift`.
        checkpoint: a folder "step-N" of torch.distributed.checkpoint.
        out: the new folder. (The tokenizer is not copied into it.)

    Returns:
        The exported model, loaded from `out`.

    Raises:
        ValueError: the checkpoint does not have the weights of this model.
    """
    spec: Any = config.model_spec
    with torch.device("meta"):
        model = spec.model.build()
    state = {name: torch.empty(x.shape, dtype=torch.float32) for name, x in model.state_dict().items()}
    load(state, checkpoint_id=str(checkpoint), no_dist=True)
    converted = spec.state_dict_adapter(spec.model, None).to_hf(state)
    with torch.device("meta"):
        exported = AutoModelForCausalLM.from_config(hf_config(config), dtype=torch.float32)
    missing = {name for name, _ in exported.named_parameters()} ^ set(converted)
    if missing:
        raise ValueError(
            f"{checkpoint} does not match the transformers model; names in only one of them: {sorted(missing)[:5]}"
        )
    exported.save_pretrained(out, state_dict=converted)
    return AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)


def hf_config(config: Trainer.Config) -> Any:
    """Return the configuration of the same model in transformers, of type `kvshift_llama` or `kvshift_qwen3`."""
    model: Any = config.model_spec.model  # type: ignore[union-attr]
    layer = model.layers[0]
    attention = layer.attention
    fields: dict[str, Any] = {
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": layer.feed_forward.w1.out_features,
        "num_hidden_layers": len(model.layers),
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "head_dim": attention.head_dim or model.dim // attention.n_heads,
        "max_position_embeddings": attention.rope.max_seq_len,
        "rms_norm_eps": model.norm.eps,
        "rope_parameters": _rope_parameters(attention.rope),
        "tie_word_embeddings": model.enable_weight_tying,
        **attention.shift.options.as_fields(),
    }
    return KVShiftLlamaConfig(**fields) if isinstance(model, Llama3Model.Config) else QWEN3.config(**fields)


def _rope_parameters(rope: RoPE.Config) -> dict[str, Any]:
    if rope.scaling == "none":
        return {"rope_type": "default", "rope_theta": rope.theta}
    if rope.scaling != "llama":
        raise ValueError(f"rope.scaling must be none or llama to be written for transformers, got {rope.scaling!r}")
    return {
        "rope_type": "llama3",
        "rope_theta": rope.theta,
        "factor": rope.scaling_factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }


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
