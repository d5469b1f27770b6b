"""Parameters, FLOPs and memory of a Llama with KV shift, computed from its configuration.

Letters: B sequences per batch, T tokens per sequence, L layers, H query heads, G KV heads, D head size, E model width,
F MLP width, V vocabulary, W window; c bytes per number in a matrix product (2 with bfloat16, 4 with float32).

The formulas describe the models of `kvshift.models.llama` under `transformers.Trainer`, and the tests compare them with
these models. bfloat16 means autocast: weights, gradients, optimizer and residual stream stay float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvshift.models.llama import KVShiftLlamaConfig

Precision = Literal["bf16", "fp32"]
Sharding = Literal["none", "ddp", "fsdp"]


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters of a model.

    Attributes:
        total: All parameters; tied embeddings count once.
        embedding: Parameters of the embedding and, if it is not tied, of the head.
        shift: Coefficients of the shift.
        layer: Parameters of one layer, including its coefficients.
        multiplied: Parameters in the matrices that every token is multiplied with, including the head, tied or not.
    """

    total: int
    embedding: int
    shift: int
    layer: int
    multiplied: int


def count_parameters(config: KVShiftLlamaConfig) -> Parameters:
    """Count the parameters of `KVShiftLlamaForCausalLM(config)`.

    A layer has 2EHD + 2EGD parameters in attention, 3EF in the MLP and 2E in its norms; W coefficients for each head
    and target of the shift (1 with the gate); and biases and QK-norm if the configuration enables them.
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
    """Floating-point operations per token, forward and backward. A multiplication and an addition count as two.

    Attributes:
        matrices: Products with weights.
        attention: Scores and weighted sums.
        shift: The shift operator.
        recomputed: Operations in matrices and attention that gradient checkpointing repeats.
    """

    matrices: float
    attention: float
    shift: float
    recomputed: float

    @property
    def model(self) -> float:
        """Operations without recomputation, the basis of the model FLOPs utilization (MFU)."""
        return self.matrices + self.attention + self.shift


def training_flops(config: KVShiftLlamaConfig, sequence_length: int, *, causal: bool = True) -> Flops:
    """Count the FLOPs of training per token. The backward pass costs twice the forward, for inputs and for weights.

        matrices   6 * (parameters in matrices, including the head)
        attention  12 L H D K, where a query sees K keys on average: (T + 1) / 2, or fewer with a sliding window
        shift      L * sum over targets of (6W - 2) * heads * D: 2W - 1 forward; backward 2W - 1 for the input and 2W
                   for the coefficients

    Args:
        config: Configuration of the model.
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
    # The forward pass is a third of the total. The head is not recomputed. Neither is the last product of a layer:
    # torch's checkpoint stops before it, because the backward pass does not need its result.
    last = layers * config.hidden_size * config.intermediate_size
    return Flops(6.0 * multiplied, attention, float(shift), 2.0 * (multiplied - head - last) + attention / 3)


@dataclass(frozen=True)
class Memory:
    """Peak memory of a training step in bytes per device.

    Attributes:
        weights: Weights in float32; if they are sharded, this device's shard.
        gradients: Gradients in float32, counted twice for the buckets of DDP.
        optimizer: The two moments of AdamW, in float32.
        copies: Copies of weights for matrix products: autocast's bfloat16 copies, or the weights that FSDP gathers.
        kept: Activations saved for the backward pass.
        working: Additional memory at the peak: 12 BTV for the logits (their logarithms and two gradients), or one
            layer, recomputed if checkpointed, and its gradients.
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
    config: KVShiftLlamaConfig,
    *,
    rows: int,
    sequence_length: int,
    precision: Precision = "bf16",
    gradient_checkpointing: bool = False,
    sharding: Sharding = "none",
    devices: int = 1,
) -> Memory:
    """Estimate the memory of a training step of `rows` sequences per device, with sdpa or flash attention.

    The estimate excludes the CUDA context, allocator fragmentation and communication buffers.

    A layer saves these activations for each token, in bytes; h(x) is HD for queries and GD for keys and values:

        16E + 8       inputs and normalized values of its two norms, in float32 like the residual stream
        n E c         inputs of the matrices: n = 2; 5 under autocast, which casts separately for each matrix
        (2HD + 2GD) c rotated queries and keys, shifted values, the output of attention
        h(x) c        the raw tensor of each target of the shift
        4H            log-sum-exp of the attention scores
        4F c          gate, its activation, up projection, and their product

    QK-norm adds (4 + c)(HD + GD) + 4(H + G). A sliding window below T, which sdpa takes as a mask, adds Tc and
    2(H - G)Dc for repeated keys and values. A checkpointed layer saves only its input, 4E.
    """
    parameters = count_parameters(config)
    itemsize = _itemsize(precision)
    shards = devices if sharding == "fsdp" else 1
    weights = 4 * parameters.total // shards
    head = config.vocab_size * config.hidden_size
    copies = copies_of_layers = 0
    if sharding == "fsdp":
        # FSDP2 holds the current layer and the prefetched one, and throughout the step the parameters outside of
        # layers: for each, the weights, and their gradients before the reduction.
        outside = parameters.total - config.num_hidden_layers * parameters.layer
        copies = 2 * itemsize * (2 * parameters.layer + outside)
    elif precision == "bf16":
        copies, copies_of_layers = 2 * head, 2 * (parameters.multiplied - head)

    tokens = rows * sequence_length
    layer = tokens * _kept_by_layer(config, sequence_length, precision)
    kept_by_layers = config.num_hidden_layers * (4 * config.hidden_size * tokens if gradient_checkpointing else layer)
    # Outside of the layers: the last norm, token ids and labels, and cosines and sines, which all sequences share.
    ends = tokens * ((8 + itemsize) * config.hidden_size + 4 + 8 + 8) + 8 * sequence_length * _heads(config)[2]

    # Beyond the saved activations, the peak is one of three moments: the backward pass of the loss; the backward pass
    # of the last layer's MLP (its product and `ends` are freed by then); or the end of the forward pass under autocast,
    # which holds the copies of all weights until its context exits.
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


def _kept_by_layer(config: KVShiftLlamaConfig, sequence_length: int, precision: Precision) -> int:
    """Return the bytes of activations that a layer saves per token; see `training_memory` for the formula."""
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


def _shifted_heads(config: KVShiftLlamaConfig) -> list[int]:
    """Return the number of heads of each target of the shift."""
    heads, kv_heads, _ = _heads(config)
    return [heads if target == "q" else kv_heads for target in config.shift_targets]


def _heads(config: KVShiftLlamaConfig) -> tuple[int, int, int]:
    """Return H, G and D."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    assert kv_heads is not None  # None only in transformers' annotation
    assert size is not None
    return heads, kv_heads, size


def _mean_keys(sequence_length: int, window: int | None) -> float:
    """Return the mean of min(t, window) over t = 1 .. T."""
    seen = sequence_length if window is None else min(window, sequence_length)
    return (seen * (seen + 1) / 2 + (sequence_length - seen) * seen) / sequence_length


def _itemsize(precision: Precision) -> int:
    return 2 if precision == "bf16" else 4
