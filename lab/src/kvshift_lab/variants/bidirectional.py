"""A small encoder, in which tokens attend to later tokens too, with a shift in one or both directions.

    previous    y[t] = a[0] * x[t] + a[1] * x[t-1]
    next        y[t] = a[0] * x[t] + a[1] * x[t+1]
    both        y[t] = a[0] * x[t] + a[1] * x[t-1] + a[2] * x[t+1]

for keys x = k and values x = v, with separate coefficients for each KV head. In both directions, nothing crosses a
document boundary, and padding is skipped: the next token is the next real one. Everything else is the lab's Llama,
except for the attention mask and the output matrix, which is the embedding matrix.

Source: a reviewer of the paper requested this experiment, which the paper does not have.

Shapes: B batch, T positions, G KV heads, D head size, W coefficients, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor

from kvshift import KVShift, ShiftOptions
from kvshift.models.extending import shift_tokens
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaModel, KVShiftLlamaPreTrainedModel
from kvshift_lab.core.errors import LabError, require
from kvshift_lab.tasks.option_checks import check_at_least, check_choices
from kvshift_lab.variants.token_mixing import TokenMixing, require_token_mask
from kvshift_lab.variants.uncached import TaskModel, UncachedConfig, UncachedDecoder

Direction = Literal["previous", "next", "both"]
_WINDOWS = {"previous": 2, "next": 2, "both": 3}
_ATTENTION = ("eager", "sdpa")


def shift_both_ways(
    x: Tensor, coefficients: Tensor, direction: str, *, mask: Tensor | None = None, seq_idx: Tensor | None = None
) -> Tensor:
    """Compute the formula above in float32 (float64 for float64), rounded once.

    Args:
        x: (B, T, G, D).
        coefficients: (G, W), W = 3 for both directions, 2 for one.
        direction: "previous", "next" or "both".
        mask, seq_idx: (B, T), as in `kvshift.kv_shift`.

    Returns:
        y like x, zero on padding.
    """
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)

    def backwards(coefficients: Tensor) -> Tensor:
        mirrored_mask, mirrored_idx = (None if each is None else each.flip(1) for each in (mask, seq_idx))
        return shift_tokens(wide.flip(1), coefficients, mask=mirrored_mask, seq_idx=mirrored_idx)[0].flip(1)

    if direction == "next":
        y = backwards(coefficients)
    else:
        y = shift_tokens(wide, coefficients[:, :2], mask=mask, seq_idx=seq_idx)[0]
    if direction == "both":
        only_next = torch.cat([torch.zeros_like(coefficients[:, 2:]), coefficients[:, 2:]], dim=1)
        y = y + backwards(only_next)
    return y.to(x.dtype)


class BidirectionalShift(TokenMixing, KVShift):
    """Applies `shift_both_ways` to keys and values in place of an attention's `KVShift`, with the same initial values.

    Args:
        num_kv_heads: G.
        options: targets and initial values of the shift; its window is W.
        direction: see `shift_both_ways`.

    Raises:
        ValueError: the direction is unknown, or the window does not fit it.
    """

    def __init__(self, num_kv_heads: int, options: ShiftOptions, *, direction: str) -> None:
        if direction not in _WINDOWS:
            raise ValueError(f"direction must be one of {', '.join(_WINDOWS)}, got {direction!r}")
        if options.targets and options.window != _WINDOWS[direction]:
            raise ValueError(f"window must be {_WINDOWS[direction]} with direction {direction}, got {options.window}")
        super().__init__(num_kv_heads, options)
        self.direction = direction

    def mix(
        self, k: Tensor, v: Tensor, state: Any, *, mask: Tensor | None, seq_idx: Tensor | None
    ) -> tuple[Tensor, Tensor, None]:
        """See `TokenMixing.mix`; there is no state to continue from."""
        coefficients = self.coefficients()
        k, v = (
            shift_both_ways(x, coefficients[target], self.direction, mask=mask, seq_idx=seq_idx)
            if target in coefficients
            else x
            for target, x in (("k", k), ("v", v))
        )
        return k, v, None


@dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """An encoder with a shift of keys and values."""

    family = "encoder"
    width: int = 64
    """Model width E; the MLPs have width 4 E."""
    layers: int = 4
    """Number of layers."""
    heads: int = 4
    """Number of heads; each has its own keys and values."""
    direction: Direction = "both"
    """Which neighbours a token is mixed with: previous, next or both."""
    variant: str | None = None
    """vanilla or kv-shift. None: kv-shift, configured by shift_*."""
    shift_targets: tuple[Literal["k", "v"], ...] = ("k", "v")
    """Which of keys and values to shift; with no value after it, none (the vanilla model)."""
    shift_window: int = 3
    """Number of tokens that are mixed, the current one included: 3 for both directions, 2 for one."""
    shift_constraint: Literal["free"] = "free"
    """free: any numbers."""
    shift_init: Literal["uniform", "identity"] = "uniform"
    """uniform: U(0, 1), summing to 1. identity: (1, 0) or (1, 0, 0), initially no shift."""
    freeze_shift: bool = False
    """Keep the coefficients at their initial values."""

    def check(self) -> None:
        """Raise a LabError that names an invalid field, its value and the allowed values."""
        check_choices("model", self)
        check_at_least("model", self, width=1, layers=1, heads=1)
        pairs = 2 * self.heads  # rotary embedding needs heads of even size
        require(self.width % pairs == 0, "model.width", self.width, f"a multiple of 2 * heads = {pairs}")
        window = _WINDOWS[self.direction]
        require(
            not self.shift_targets or self.shift_window == window,
            "model.shift_window",
            self.shift_window,
            f"{window} with direction {self.direction}",
        )
        try:
            ShiftOptions.of(self, name="model.shift_")
        except ValueError as error:
            raise LabError(str(error)) from error


@strict
class EncoderConfig(UncachedConfig, KVShiftLlamaConfig):
    """The configuration of an encoder: the fields of `KVShiftLlamaConfig`, where shift_window must fit the direction.

    Args:
        shift_direction: see `shift_both_ways`.
    """

    model_type = "kvshift_lab_encoder"
    loaded_by: ClassVar[str] = "kvshift_lab.variants.bidirectional.LabEncoder.from_pretrained"

    shift_direction: str = "both"


class EncoderModel(UncachedDecoder, KVShiftLlamaModel):
    """The layers of an encoder: every token attends to all tokens of its document, and to no padding."""

    config: EncoderConfig
    config_class = EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        options = ShiftOptions.of(config)
        for layer in self.layers:
            attention: Any = layer.self_attn
            attention.shift = BidirectionalShift(config.num_key_value_heads, options, direction=config.shift_direction)

    def prepare_inputs(
        self, inputs_embeds: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """Prepare a call like `ShiftedDecoder.prepare_inputs`, but with a bidirectional attention mask."""
        if self.config._attn_implementation not in _ATTENTION:
            raise ValueError(
                f"attn_implementation must be one of {', '.join(_ATTENTION)} for an encoder, "
                f"got {self.config._attn_implementation!r}"
            )
        require_token_mask(attention_mask, "an encoder")
        masks, position_ids = super().prepare_inputs(inputs_embeds, attention_mask, *args, **kwargs)
        masks["attention"] = _bidirectional_mask(inputs_embeds, masks["padding"], masks["documents"])
        return masks, position_ids


class LabEncoder(TaskModel, KVShiftLlamaPreTrainedModel):
    """An encoder for tasks; see `TaskModel`. Its output matrix is the embedding matrix."""

    decodes_with_cache = False
    config: EncoderConfig
    config_class = EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.model = EncoderModel(config)
        self.loss_type = "ForCausalLM"
        self.post_init()

    def logits(self, hidden_states: Tensor) -> Tensor:
        return F.linear(hidden_states, self.model.embed_tokens.weight)


def encoder_config(options: EncoderOptions, *, vocab_size: int, length: int) -> EncoderConfig:
    """Return the configuration of the encoder that the options describe.

    Args:
        options: options of the model.
        vocab_size: number of tokens of the task.
        length: T, the length of its sequences.
    """
    options.check()
    return EncoderConfig(
        vocab_size=vocab_size,
        hidden_size=options.width,
        intermediate_size=4 * options.width,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.heads,
        max_position_embeddings=length,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,  # `logits` uses the embedding matrix itself, so nothing needs tying
        shift_direction=options.direction,
        **ShiftOptions.of(options).as_fields(),
    )


def _bidirectional_mask(x: Tensor, real: Tensor | None, documents: Tensor | None) -> Tensor:
    """Return the additive mask, (B, 1, T, T), with which a token attends to its document's real tokens and itself."""
    batch, positions = x.shape[:2]
    seen = torch.eye(positions, dtype=torch.bool, device=x.device).expand(batch, -1, -1)
    others = torch.ones(batch, 1, positions, dtype=torch.bool, device=x.device) if real is None else real.unsqueeze(1)
    if documents is not None:
        others = others & (documents.unsqueeze(1) == documents.unsqueeze(2))
    added = torch.zeros((), dtype=x.dtype, device=x.device).masked_fill(~(seen | others), torch.finfo(x.dtype).min)
    return added.unsqueeze(1)
