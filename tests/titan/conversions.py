"""Configurations of torchtitan, and folders of transformers, that differ from a plain model in one respect.

Each has an outcome: both sides have the same logits, or the conversion is refused with the given message.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from kvshift import ShiftOptions

from .on_cpu import SDPA  # isort: skip  # before torchtitan
from .tiny import TINY_LLAMA

from torchtitan.config.override import derive  # isort: skip  # after on_cpu
from torchtitan.models.common import ComplexRoPE, CosSinRoPE, RMSNorm
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.config_utils import make_gqa_config
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.qwen3 import qwen3_configs

from kvshift.integrations.titan.shifted_gqa import shifted_attention

Change = Callable[[Any], object]


# Changes of torchtitan's configuration --------------------------------------------------------------------------------


def unchanged(model: Any) -> None:
    pass


def each(change: Change) -> Change:
    """Change every layer."""
    return lambda model: [change(layer) for layer in model.layers]


def last(change: Change) -> Change:
    """Change only the last layer."""
    return lambda model: change(model.layers[-1])


def rope(kind: type | None = None, **fields: Any) -> Change:
    def change(layer: Any) -> None:
        old = layer.attention.rope
        values = {field.name: getattr(old, field.name) for field in dataclasses.fields(old)}
        layer.attention.rope = (kind or type(old))(**values | fields)

    return change


def put(path: str, **fields: Any) -> Change:
    """Replace fields of the configuration at a path, for example put("attention.wo", bias=True)."""

    def change(owner: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, dataclasses.replace(getattr(owner, name), **fields))

    return change


def qk_norm(eps: float | None) -> Change:
    def change(layer: Any) -> None:
        size, ones = layer.attention.rope.dim, {"weight": nn.init.ones_}
        norm = None if eps is None else RMSNorm.Config(normalized_shape=size, eps=eps, param_init=ones)
        layer.attention.qk_norm = norm

    return change


def set_to(path: str, value: Any) -> Change:
    def change(owner: Any) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, value)

    return change


def both(*changes: Change) -> Change:
    return lambda owner: [change(owner) for change in changes]


def attention(**given: Any) -> Change:
    """Build the attention again, with other arguments of torchtitan's function."""

    def change(layer: Any) -> None:
        old = layer.attention
        init = {"weight": nn.init.normal_}
        same = ("dim", "n_heads", "n_kv_heads", "head_dim", "inner_attention", "rope", "qk_norm")
        values = {"wqkv_param_init": init, "wo_param_init": init, "fuse_qkv": True}
        new = make_gqa_config(**{name: getattr(old, name) for name in same} | values | given)
        layer.attention = shifted_attention(new, old.shift.options)

    return change


def shift(**options: Any) -> Change:
    return put("attention.shift", options=ShiftOptions(**options))


def bias(*names: str) -> Change:
    return both(
        *(put(name, bias=True, param_init=dict.fromkeys(("weight", "bias"), nn.init.normal_)) for name in names)
    )


def gated(layer: Any) -> None:
    old = layer.feed_forward
    layer.feed_forward = derive(old, SigmoidGatedFeedForward.Config, gate=dataclasses.replace(old.w1, out_features=1))


class DoubledSDPA(SDPA):
    """An attention of a user's own, which computes something else."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(SDPA.Config):
        pass

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        return super().forward(2 * q, k, v, **given)


class OtherFeedForward(FeedForward):
    """An MLP of a user's own, without parameters of its own."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.w1(x).relu() * self.w3(x))


def other_mlp(layer: Any) -> None:
    layer.feed_forward = derive(layer.feed_forward, OtherFeedForward.Config)


def inner(config: Any) -> Change:
    return set_to("attention.inner_attention", config)


def use_moe(model: Any) -> None:
    moe = qwen3_configs["debugmodel_moe"](attn_backend="flex").layers[0].moe
    for layer in model.layers:
        layer.feed_forward, layer.moe = None, moe


QKV_BIAS, WO_BIAS = bias("attention.qkv_linear.wqkv"), bias("attention.wo")
MLP_BIAS = bias("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
BLOCK_EPS = both(put("attention_norm", eps=1e-2), put("ffn_norm", eps=1e-2))
ALL_BUT_QK_EPS = both(put("norm", eps=1e-2), each(BLOCK_EPS))
NARROW_MLP = both(
    *(put(f"feed_forward.{name}", out_features=48) for name in ("w1", "w3")), put("feed_forward.w2", in_features=48)
)
SCALED = rope(scaling="llama", scaling_factor=4.0, original_max_position_embeddings=64)
COMPLEX, COS_SIN = rope(ComplexRoPE.Config), rope(CosSinRoPE.Config)

# (family, what differs): the change
EXPORTED: dict[tuple[str, str], Change] = {
    ("llama3", "nothing"): unchanged,
    ("llama3", "tied"): set_to("enable_weight_tying", True),
    ("llama3", "three matrices"): each(attention(fuse_qkv=False)),
    ("llama3", "q, k and v shifted, window 3"): each(shift(targets=("q", "k", "v"), window=3)),
    ("llama3", "keys alone shifted"): each(shift(targets=("k",))),
    ("llama3", "no shift"): each(shift(targets=())),
    ("llama3", "gate"): each(shift(constraint="gate")),
    ("llama3", "clamp"): each(shift(constraint="clamp")),
    ("llama3", "scaled RoPE"): each(SCALED),
    ("llama3", "factors of a scaling that is not used"): each(rope(scaling_factor=3.0, truncate=False)),
    ("llama3", "CosSinRoPE"): each(COS_SIN),
    ("llama3", "QK-norm"): each(qk_norm(1e-5)),
    ("llama3", "QK-norm, three matrices"): each(both(qk_norm(1e-5), attention(fuse_qkv=False))),
    ("llama3", "QK-norm, CosSinRoPE"): each(both(qk_norm(1e-5), COS_SIN)),
    ("llama3", "all biases of attention"): each(both(QKV_BIAS, WO_BIAS)),
    ("llama3", "biases of the MLP"): each(MLP_BIAS),
    ("llama3", "as many KV heads as query heads"): each(attention(n_kv_heads=None)),
    ("llama3", "larger heads"): each(both(rope(dim=16), attention(head_dim=16))),
    ("llama3", "FlexAttention"): each(inner(FlexAttention.Config())),
    ("llama3", "VarlenAttention"): each(inner(VarlenAttention.Config())),
    ("qwen3", "nothing"): unchanged,
    ("qwen3", "not tied"): set_to("enable_weight_tying", False),
    ("qwen3", "q, k and v shifted, window 3"): each(shift(targets=("q", "k", "v"), window=3)),
    ("qwen3", "ComplexRoPE"): each(both(COMPLEX, shift(targets=("q", "k", "v")))),
    ("qwen3", "scaled ComplexRoPE"): each(both(COMPLEX, SCALED)),
    ("qwen3", "all biases, ComplexRoPE"): each(both(QKV_BIAS, WO_BIAS, COMPLEX)),
    ("qwen3", "another eps of all norms"): both(ALL_BUT_QK_EPS, each(qk_norm(1e-2))),
}

# (family, what differs): the change, and what the message says
REFUSED: dict[tuple[str, str], tuple[Change, str]] = {
    ("llama3", "a sliding window"): (
        each(inner(VarlenAttention.Config(window_size=(8, 0)))),
        "layers.0.attention.inner_attention.window_size must be (-1, 0), got (8, 0)",
    ),
    ("llama3", "an attention of the user's"): (
        each(inner(DoubledSDPA.Config())),
        "the exported model must have the logits of torchtitan's",
    ),
    ("llama3", "an MLP of the user's"): (
        last(other_mlp),
        "layers.1.feed_forward must be FeedForward.Config, got OtherFeedForward.Config",
    ),
    ("llama3", "a gate of the MLP"): (each(gated), "'layers.0.feed_forward.gate.weight' has no counterpart"),
    ("llama3", "theta of the last layer"): (
        last(rope(theta=5e5)),
        "layers.1.attention.rope.theta must be 10000.0, got 500000.0",
    ),
    ("llama3", "theta of the first layer"): (
        lambda model: rope(theta=5e5)(model.layers[0]),
        "layers.1.attention.rope.theta must be 500000.0, got 10000.0",
    ),
    ("llama3", "scaled RoPE in one layer"): (
        last(SCALED),
        "layers.1.attention.rope.scaling must be 'none', got 'llama'",
    ),
    ("llama3", "fewer positions in one layer"): (
        last(rope(max_seq_len=256)),
        "layers.1.attention.rope.max_seq_len must be 512, got 256",
    ),
    ("llama3", "YaRN"): (
        each(rope(scaling="yarn", rope_factor=4.0)),
        "layers.0.attention.rope.scaling must be 'none', got 'yarn'",
    ),
    ("llama3", "half of each head rotated"): (
        each(rope(dim=4)),
        "layers.0.attention.rope.dim must be 8, got 4",
    ),
    ("llama3", "constraint of one layer"): (
        last(shift(constraint="gate")),
        "layers.1.attention.shift.options.constraint must be 'free', got 'gate'",
    ),
    ("llama3", "clamp in one layer"): (
        last(shift(constraint="clamp")),
        "layers.1.attention.shift.options.constraint must be 'free', got 'clamp'",
    ),
    ("llama3", "window of one layer"): (
        last(shift(window=3)),
        "layers.1.attention.shift.options.window must be 2, got 3",
    ),
    ("llama3", "targets of one layer"): (
        last(shift(targets=("k",))),
        "layers.1.attention.shift.options.targets must be ('k', 'v'), got ('k',)",
    ),
    ("llama3", "eps of block norms"): (
        each(BLOCK_EPS),
        "layers.0.attention_norm.eps must be 1e-05, got 0.01",
    ),
    ("llama3", "eps of the final norm"): (
        put("norm", eps=1e-2),
        "layers.0.attention_norm.eps must be 0.01, got 1e-05",
    ),
    ("llama3", "eps of one norm"): (
        last(put("ffn_norm", eps=1e-2)),
        "layers.1.ffn_norm.eps must be 1e-05, got 0.01",
    ),
    ("llama3", "eps of QK-norm"): (
        each(qk_norm(1e-2)),
        "layers.0.attention.qk_norm.eps must be 1e-05, got 0.01",
    ),
    ("llama3", "QK-norm in one layer"): (
        last(qk_norm(1e-5)),
        "layers.1.attention.qk_norm must be None, got RMSNorm.Config",
    ),
    ("llama3", "norms without weights"): (
        each(put("ffn_norm", elementwise_affine=False)),
        "layers.0.ffn_norm.elementwise_affine must be True, got False",
    ),
    ("llama3", "QKV bias alone"): (
        each(QKV_BIAS),
        "layers.0.attention.qkv_linear.wqkv.bias must be False, got True",
    ),
    ("llama3", "output bias alone"): (
        each(WO_BIAS),
        "layers.0.attention.qkv_linear.wqkv.bias must be True, got False",
    ),
    ("llama3", "one bias of the MLP"): (
        each(bias("feed_forward.w2")),
        "layers.0.feed_forward.w2.bias must be False, got True",
    ),
    ("llama3", "bias of the head"): (bias("lm_head"), "lm_head.bias must be False, got True"),
    ("llama3", "width of one MLP"): (
        last(NARROW_MLP),
        "layers.1.feed_forward.w1.out_features must be 64, got 48",
    ),
    ("llama3", "heads of one layer"): (
        last(attention(n_kv_heads=4)),
        "layers.1.attention.qkv_linear.n_kv_heads must be 2, got 4",
    ),
    ("qwen3", "eps of QK-norm"): (
        each(qk_norm(1e-2)),
        "layers.0.attention.qk_norm.eps must be 1e-06, got 0.01",
    ),
    ("qwen3", "one eps for all but QK-norm"): (
        ALL_BUT_QK_EPS,
        "layers.0.attention.qk_norm.eps must be 0.01, got 1e-06",
    ),
    ("qwen3", "no QK-norm"): (
        each(qk_norm(None)),
        "layers.0.attention.qk_norm must be RMSNorm.Config, got None",
    ),
    ("qwen3", "QKV bias alone"): (
        each(QKV_BIAS),
        "layers.0.attention.qkv_linear.wqkv.bias must be False, got True",
    ),
    ("qwen3", "biases of the MLP"): (
        each(MLP_BIAS),
        "layers.0.feed_forward.w1.bias must be False, got True",
    ),
    ("qwen3", "experts"): (
        use_moe,
        "layers.0.feed_forward must be FeedForward.Config for transformers, got NoneType",
    ),
}


# Folders of transformers ----------------------------------------------------------------------------------------------

LLAMA: dict[str, Any] = {name: value for name, value in TINY_LLAMA.items() if name != "rope_theta"}
LLAMA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 64}

# What differs: fields of the folder's configuration
LOADED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "start values": {"shift_init": "identity", "initializer_range": 0.5},
    "more positions": {"max_position_embeddings": 4096},
    "special tokens": {"eos_token_id": 5, "pad_token_id": 3, "use_cache": False},
}

# What differs: fields of the folder's configuration, and what the message says
NOT_LOADED: dict[str, tuple[dict[str, Any], str]] = {
    "queries shifted": (
        {"shift_targets": ["q", "k", "v"]},
        "shift_targets must be ['k', 'v'], got ['q', 'k', 'v']",
    ),
    "keys alone shifted": ({"shift_targets": ["k"]}, "shift_targets must be ['k', 'v'], got ['k']"),
    "nothing shifted": ({"shift_targets": []}, "shift_targets must be ['k', 'v'], got []"),
    "window": ({"shift_window": 3}, "shift_window must be 2, got 3"),
    "constraint": ({"shift_constraint": "clamp"}, "shift_constraint must be 'free', got 'clamp'"),
    "QK-norm": ({"qk_norm": True}, "qk_norm must be False, got True"),
    "attention bias": ({"attention_bias": True}, "attention_bias must be False, got True"),
    "MLP bias": ({"mlp_bias": True}, "mlp_bias must be False, got True"),
    "a sliding window": ({"sliding_window": 8}, "sliding_window must be None, got 8"),
    "theta": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        "rope_parameters must be {'rope_type': 'default', 'rope_theta': 10000.0}, got {",
    ),
    "scaled RoPE": (
        {"rope_parameters": LLAMA3_ROPE},
        "rope_parameters must be {'rope_type': 'default', 'rope_theta': 10000.0}, got {",
    ),
    "eps": ({"rms_norm_eps": 1e-6}, "rms_norm_eps must be 1e-05, got 1e-06"),
    "more layers": ({"num_hidden_layers": 3}, "num_hidden_layers must be 2, got 3"),
    "fewer layers": ({"num_hidden_layers": 1}, "num_hidden_layers must be 2, got 1"),
    "KV heads": ({"num_key_value_heads": 1}, "num_key_value_heads must be 2, got 1"),
    "more and smaller heads": (
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
        "num_attention_heads must be 4, got 8",
    ),
    "MLP width": ({"intermediate_size": 48}, "intermediate_size must be 64, got 48"),
    "vocabulary": ({"vocab_size": 100}, "vocab_size must be 128, got 100"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    "tied": ({"tie_word_embeddings": True}, "tie_word_embeddings must be False, got True"),
    "dropout": ({"attention_dropout": 0.1}, "attention_dropout must be 0.0, got 0.1"),
}
