"""What a Llama with KV shift costs, from its configuration alone: parameters, FLOPs, memory.

Letters: B sequences of a batch, T tokens in a sequence, L layers, H query heads, G KV heads, D head size, E model
width, F MLP width, V vocabulary, W window; c bytes of a number in a matrix product (2 with bfloat16, 4 with float32).

The formulas follow the models of `kvshift.models.llama` under `transformers.Trainer`, and the tests hold them against
the models themselves. With bfloat16 that is autocast: weights, gradients, optimizer and residual stream stay float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from kvshift.models.llama import KVShiftLlamaConfig

Precision = Literal["bf16", "fp32"]
Sharding = Literal["none", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """The fields of a `KVShiftLlamaConfig` that decide what its model costs: what is needed of it without torch."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    shift_targets: Sequence[str] = ("k", "v")
    shift_window: int = 2
    shift_constraint: str = "free"


Llama: TypeAlias = "KVShiftLlamaConfig | LlamaShape"


@dataclass(frozen=True)
class Parameters:
    """How many numbers a model learns.

    Attributes:
        total: all of them; tied embeddings once.
        embedding: of the embedding and, where it is not tied, the head.
        shift: coefficients of the shift.
        layer: of one layer, coefficients included.
        multiplied: in the matrices that every token is multiplied with, the head included, tied or not.
    """

    total: int
    embedding: int
    shift: int
    layer: int
    multiplied: int


def count_parameters(config: Llama) -> Parameters:
    """The parameters of `KVShiftLlamaForCausalLM(config)`.

    A layer has 2EHD + 2EGD in attention, 3EF in the MLP, 2E in its norms; W numbers for each head and target of the
    shift (1 with the gate); biases and QK-norm where the configuration asks for them.
    """
    width, mlp, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads, kv_heads, size = _heads(config)
    query, key = heads * size, kv_heads * size
    matrices = 2 * width * query + 2 * width * key + 3 * width * mlp
    columns = 1 if config.shift_constraint == "gate" else config.shift_window
    shift = columns * sum(_shifted_heads(config))
    layer = matrices + 2 * width + shift
    layer += (query + 2 * key + width) if config.attention_bias else 0
    layer += (2 * mlp + width) if config.mlp_bias else 0
    layer += 2 * size if config.qk_norm else 0
    head = config.vocab_size * width
    embedding = head if config.tie_word_embeddings else 2 * head
    return Parameters(
        total=embedding + layers * layer + width,
        embedding=embedding,
        shift=layers * shift,
        layer=layer,
        multiplied=layers * matrices + head,
    )


@dataclass(frozen=True)
class Flops:
    """Floating-point operations for each token, forward and backward; a multiplication and an addition are two.

    Attributes:
        matrices: products with weights.
        attention: scores and weighted sums.
        shift: the operator.
        recomputed: the part of the first two that gradient checkpointing does once more.
    """

    matrices: float
    attention: float
    shift: float
    recomputed: float

    @property
    def model(self) -> float:
        """What the model needs, nothing done twice: the number that a utilization (MFU) refers to."""
        return self.matrices + self.attention + self.shift


def training_flops(config: Llama, sequence_length: int, *, causal: bool = True) -> Flops:
    """FLOPs of training for each token; the backward pass is twice the forward, once for inputs, once for weights.

        matrices   6 * (parameters in matrices, head included)
        attention  12 L H D K, K the keys that a query sees on average: (T + 1) / 2, or less with a sliding window
        shift      L * sum over targets of (6W - 2) * heads * D: 2W - 1 forward, 2W - 1 to its input, 2W to its numbers

    Args:
        sequence_length: T.
        causal: False counts all T keys for every query, as `torch.utils.flop_counter` and kernels without a causal
            path do.
    """
    layers, (heads, _, size) = config.num_hidden_layers, _heads(config)
    keys = _mean_keys(sequence_length, config.sliding_window) if causal else float(sequence_length)
    head = config.vocab_size * config.hidden_size
    multiplied = count_parameters(config).multiplied
    attention = 12 * layers * heads * size * keys
    shift = layers * (6 * config.shift_window - 2) * sum(_shifted_heads(config)) * size
    # The forward pass is a third. The head is not recomputed; nor is the last product of a layer, whose result the
    # backward pass does not ask for: torch's checkpoint stops before it.
    last = layers * config.hidden_size * config.intermediate_size
    return Flops(6.0 * multiplied, attention, float(shift), 2.0 * (multiplied - head - last) + attention / 3)


@dataclass(frozen=True)
class CacheSize:
    """Memory of decoding one sequence.

    Attributes:
        per_token: bytes for each token that the cache holds: shifted keys and values.
        per_sequence: bytes however long it is: the raw keys and values of the last W - 1 tokens.
    """

    per_token: int
    per_sequence: int


def cache_size(config: Llama, precision: Precision) -> CacheSize:
    """Bytes of the cache: 2LGDc for each token, and 2LGDc(W - 1) for each sequence where there is a shift.

    With a sliding window the cache holds no more tokens than the window.
    """
    heads, kv_heads, size = _heads(config)
    of_head = config.num_hidden_layers * size * _itemsize(precision)
    row = 2 * kv_heads * of_head
    raw = row + (heads * of_head if "q" in config.shift_targets else 0)
    return CacheSize(row, raw * (config.shift_window - 1) if config.shift_targets else 0)


@dataclass(frozen=True)
class Memory:
    """Bytes on each device at the busiest moment of a training step.

    Attributes:
        weights: in float32; this device's part of them where they are sharded.
        gradients: in float32, and once more in the buckets of DDP.
        optimizer: the two moments of AdamW, in float32.
        copies: weights as matrix products want them: autocast's bfloat16 copies, or what FSDP gathers.
        kept: activations kept for the backward pass.
        working: what the busiest moment needs on top: 12 BTV for the logits (their logarithms, and two gradients), or
            one layer, recomputed where checkpointed, and its gradients.
    """

    weights: int
    gradients: int
    optimizer: int
    copies: int
    kept: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.copies + self.kept + self.working


def training_memory(
    config: Llama,
    *,
    rows: int,
    sequence_length: int,
    precision: Precision = "bf16",
    gradient_checkpointing: bool = False,
    sharding: Sharding = "none",
    devices: int = 1,
) -> Memory:
    """Memory of a training step of `rows` sequences on each device, with sdpa or flash attention.

    Not counted: the context of CUDA, what its allocator loses to fragments, buffers of the communication.

    Activations that a layer keeps for each token, in bytes; h(x) is HD for x a query, GD for a key or value:

        16E           what its two norms are given and what they normalized, in float32 like the residual stream
        n E c         what the matrices are fed: n = 2; 5 under autocast, which casts again for each matrix
        (2HD + 2GD) c rotated queries and keys, mixed values, the output
        h(x) c        raw tensor of every target of the shift
        4H            the logarithms of attention's sums
        4F c          gate, its activation, up, their product

    and with QK-norm (4 + c)(HD + GD); with a sliding window, which sdpa takes as a mask, Tc and 2(H - G)Dc for repeated
    keys and values. Checkpointed, a layer keeps its input, 4E.
    """
    parameters = count_parameters(config)
    itemsize = _itemsize(precision)
    shards = devices if sharding == "fsdp" else 1
    weights = 4 * parameters.total // shards
    head = config.vocab_size * config.hidden_size
    copies = copies_of_layers = 0
    if sharding == "fsdp":
        # FSDP2 holds the layer at work and the one fetched ahead, and what belongs to none from start to end; of each
        # the weights, and their gradients before they are reduced.
        outside = parameters.total - config.num_hidden_layers * parameters.layer
        copies = 2 * itemsize * (2 * parameters.layer + outside)
    elif precision == "bf16":
        copies, copies_of_layers = 2 * head, 2 * (parameters.multiplied - head)

    tokens = rows * sequence_length
    layer = tokens * _kept_by_layer(config, sequence_length, precision)
    kept_by_layers = config.num_hidden_layers * (4 * config.hidden_size * tokens if gradient_checkpointing else layer)
    # Around the layers: the last norm, token numbers and targets, the cosines and sines that all sequences share.
    ends = tokens * ((8 + itemsize) * config.hidden_size + 4 + 8 + 8) + 8 * sequence_length * _heads(config)[2]

    # The busiest moment, beyond what is kept, is one of three: the backward pass of the loss; that of the last layer's
    # MLP (its product is gone by then, and the ends); the end of the forward pass under autocast, which holds the
    # copies of all weights until it is left.
    logits = 12 * tokens * config.vocab_size
    in_layer = tokens * (2 * config.intermediate_size * itemsize + 8 * config.hidden_size) - ends
    leaving = 0
    if gradient_checkpointing:
        in_layer += layer
        leaving = copies_of_layers + 10 * tokens * config.vocab_size
    else:
        copies += copies_of_layers
    return Memory(
        weights=weights,
        gradients=weights * (2 if sharding == "ddp" else 1),
        optimizer=2 * weights,
        copies=copies,
        kept=kept_by_layers + ends,
        working=max(logits, in_layer, leaving),
    )


def _kept_by_layer(config: Llama, sequence_length: int, precision: Precision) -> int:
    """Bytes for each token; the formula of `training_memory`."""
    itemsize, (heads, kv_heads, size) = _itemsize(precision), _heads(config)
    query, key = heads * size, kv_heads * size
    stream = (16 + (5 if precision == "bf16" else 2) * itemsize) * config.hidden_size + 8
    attention = (2 * query + 2 * key) * itemsize + 4 * heads
    if config.qk_norm:
        attention += (4 + itemsize) * (query + key) + 4 * (heads + kv_heads)
    if config.sliding_window is not None and sequence_length > config.sliding_window:
        attention += sequence_length * itemsize + (2 * (query - key) * itemsize)
    shift = sum(_shifted_heads(config)) * size * itemsize
    return stream + attention + shift + 4 * config.intermediate_size * itemsize


def _shifted_heads(config: Llama) -> list[int]:
    """The heads of each target of the shift."""
    heads, kv_heads, _ = _heads(config)
    return [heads if target == "q" else kv_heads for target in config.shift_targets]


def _heads(config: Llama) -> tuple[int, int, int]:
    """H, G and D."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert kv_heads is not None  # in transformers' annotation alone
    assert size is not None
    return heads, kv_heads, size


def _mean_keys(sequence_length: int, window: int | None) -> float:
    """The mean over t = 1 .. T of min(t, window)."""
    seen = sequence_length if window is None else min(window, sequence_length)
    return (seen * (seen + 1) / 2 + (sequence_length - seen) * seen) / sequence_length


def _itemsize(precision: Precision) -> int:
    return 2 if precision == "bf16" else 4
