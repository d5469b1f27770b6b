"""The lab's GPT-2: a small model with learned positions, for hop-k and MQAR.

Source: Sanford et al. train a GPT2Model without an output matrix; the outputs of its last LayerNorm are the logits.
Zoology has an output matrix tied to the embeddings, and no MLP.

Shapes: E width, C output classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.models.gpt2.modeling_gpt2 import GPT2PreTrainedModel

from kvshift import ShiftOptions
from kvshift.models.extending import ShiftedPreTrainedModel
from kvshift.models.retrofit import KVShiftGPT2Config, KVShiftGPT2Model
from kvshift_lab.core.errors import LabError, require
from kvshift_lab.tasks.option_checks import check_at_least, check_choices
from kvshift_lab.variants.uncached import TaskModel


@dataclass(frozen=True, kw_only=True)
class GPT2Options:
    """A GPT-2 with KV shift; the defaults are those of Sanford et al."""

    family = "gpt2"
    width: int = 128
    """Model width E."""
    layers: int = 2
    """Number of layers."""
    heads: int = 4
    """Number of heads; each has its own keys and values."""
    mlp: bool = True
    """Give each layer an MLP of width 4 E; no: layers of attention alone."""
    dropout: float = 0.1
    """Dropout rate of embeddings, attention weights and residual branches."""
    head: Literal["norm", "linear", "tied"] = "norm"
    """norm: the E outputs of the last LayerNorm are the logits, the first of which belong to tokens. linear: an output
    matrix with one logit per token. tied: the embedding is the output matrix."""
    embedding_rows: int | None = 30
    """Rows of the embedding, at least as many as there are tokens. None: exactly as many."""
    variant: str | None = None
    """Name of a variant in `kvshift_lab.variants.by_name`. None: kv-shift, configured by shift_*."""
    shift_targets: tuple[Literal["q", "k", "v"], ...] = ("k", "v")
    """Which of queries, keys and values to shift; with no value after it, none (the vanilla model)."""
    shift_window: int = 2
    """Number of tokens that are mixed, the current one included."""
    shift_constraint: Literal["free", "gate", "clamp"] = "free"
    """free: any numbers. gate: sigmoid(a) and 1 - sigmoid(a). clamp: within [0, 1]."""
    shift_init: Literal["uniform", "identity"] = "uniform"
    """uniform: U(0, 1), summing to 1. identity: (1, 0), initially no shift."""
    freeze_shift: bool = False
    """Keep the coefficients at their initial values."""

    def check(self, *, vocab_size: int) -> None:
        """Raise a LabError that names an invalid field, its value and the allowed values."""
        check_choices("model", self)
        check_at_least("model", self, width=1, layers=1, heads=1)
        require(self.width % self.heads == 0, "model.width", self.width, f"a multiple of heads, {self.heads}")
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "at least 0, less than 1")
        rows = self.embedding_rows
        require(
            rows is None or rows >= vocab_size,
            "model.embedding_rows",
            rows,
            f"{vocab_size} or more, as many as there are tokens, or None",
        )
        require(
            self.head != "norm" or self.width >= vocab_size,
            "model.width",
            self.width,
            f'{vocab_size} or more with head="norm", whose logits are the hidden state',
        )
        try:
            ShiftOptions.of(self, name="model.shift_")
        except ValueError as error:
            raise LabError(str(error)) from error


@strict
class LabGPT2Config(KVShiftGPT2Config):
    """The configuration of a `LabGPT2`.

    It has the fields of `KVShiftGPT2Config`, in which vocab_size is the number of embedding rows, and:

    Args:
        head, mlp: see `GPT2Options`.
        classes: C, the number of logits of a linear head.
    """

    model_type = "kvshift_lab_gpt2"
    loaded_by: ClassVar[str] = "kvshift_lab.variants.small_gpt2.LabGPT2.from_pretrained"

    head: str = "norm"
    mlp: bool = True
    classes: int = 23


class LabGPT2(TaskModel, ShiftedPreTrainedModel, GPT2PreTrainedModel):
    """A GPT-2 for tasks; see `TaskModel`."""

    config: LabGPT2Config
    config_class = LabGPT2Config

    def __init__(self, config: LabGPT2Config) -> None:
        super().__init__(config)
        self.transformer = KVShiftGPT2Model(config)
        if not config.mlp:
            for block in self.transformer.h:
                block.ln_2 = nn.Identity()
                block.mlp = _NoMLP()
        self.head = nn.Linear(config.n_embd, config.classes, bias=False) if config.head == "linear" else None
        self.loss_type = "ForCausalLM"
        self.post_init()

    def logits(self, hidden_states: Tensor) -> Tensor:
        if self.head is not None:
            return self.head(hidden_states)
        if self.config.head == "tied":
            return F.linear(hidden_states, self.transformer.wte.weight)
        return hidden_states


class _NoMLP(nn.Module):
    """Replaces the MLP of a layer and adds 0 to the residual stream."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.new_zeros(())


def gpt2_config(options: GPT2Options, *, vocab_size: int, length: int) -> LabGPT2Config:
    """Return the configuration of the GPT-2 that the options describe.

    Args:
        options: options of the model.
        vocab_size: number of tokens of the task.
        length: T, the length of its sequences.
    """
    options.check(vocab_size=vocab_size)
    return LabGPT2Config(
        vocab_size=options.embedding_rows or vocab_size,
        n_positions=length,
        n_embd=options.width,
        n_layer=options.layers,
        n_head=options.heads,
        activation_function="gelu_pytorch_tanh",  # the formula of GPT-2's gelu_new in one call instead of eight
        embd_pdrop=options.dropout,
        attn_pdrop=options.dropout,
        resid_pdrop=options.dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        head=options.head,
        mlp=options.mlp,
        classes=vocab_size,
        **ShiftOptions.of(options).as_fields(),
    )
