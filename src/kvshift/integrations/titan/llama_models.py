"""torchtitan's Llama 3 in sizes given by the fields of `KVShiftLlamaConfig`, such as the paper's."""

from __future__ import annotations

from functools import partial

from torch import nn
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.config_utils import get_attention_config, make_ffn_config, make_gqa_config
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock

from kvshift.models.paper_sizes import SIZES


def llama_model(
    *,
    hidden_size: int,
    num_hidden_layers: int,
    num_attention_heads: int,
    num_key_value_heads: int,
    intermediate_size: int,
    vocab_size: int,
    max_position_embeddings: int,
    rms_norm_eps: float,
    rope_theta: float,
) -> Llama3Model.Config:
    """Return torchtitan's configuration of a Llama, untied and without biases. `with_kv_shift` adds the shift.

    Weights are initialised as in `KVShiftLlamaForCausalLM`: normal, with a standard deviation of 0.02.
    """
    normal = {"weight": partial(nn.init.normal_, std=0.02)}

    def norm() -> RMSNorm.Config:
        return RMSNorm.Config(normalized_shape=hidden_size, eps=rms_norm_eps, param_init={"weight": nn.init.ones_})

    def layer() -> Llama3TransformerBlock.Config:
        attention = make_gqa_config(
            dim=hidden_size,
            n_heads=num_attention_heads,
            n_kv_heads=num_key_value_heads,
            wqkv_param_init=normal,
            wo_param_init=normal,
            inner_attention=get_attention_config("flex"),
            fuse_qkv=True,
            rope=ComplexRoPE.Config(
                dim=hidden_size // num_attention_heads,
                max_seq_len=max_position_embeddings,
                theta=rope_theta,
                scaling="none",
            ),
        )
        return Llama3TransformerBlock.Config(
            attention_norm=norm(),
            ffn_norm=norm(),
            attention=attention,
            feed_forward=make_ffn_config(
                dim=hidden_size, hidden_dim=intermediate_size, w1_param_init=normal, w2w3_param_init=normal
            ),
        )

    return Llama3Model.Config(
        dim=hidden_size,
        vocab_size=vocab_size,
        tok_embeddings=Embedding.Config(num_embeddings=vocab_size, embedding_dim=hidden_size, param_init=normal),
        norm=norm(),
        lm_head=Linear.Config(in_features=hidden_size, out_features=vocab_size, param_init=normal),
        layers=[layer() for _ in range(num_hidden_layers)],
    )


def paper_model(size: str) -> Llama3Model.Config:
    """Return the configuration, still without shift, of a model of Table 16.

    Args:
        size: "1.5B", "2.9B", "6.7B", "13B" or "19B".
    """
    fields = {name: value for name, value in SIZES[size].items() if name != "rope_parameters"}
    return llama_model(**fields, rope_theta=SIZES[size]["rope_parameters"]["rope_theta"])
