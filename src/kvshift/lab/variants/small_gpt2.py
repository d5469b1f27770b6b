"""The lab's GPT-2: small, with learned positions, for hop-k and MQAR.

Source: Sanford et al. train a GPT2Model without an output matrix: the numbers of its last LayerNorm are the logits.
Zoology has an output matrix tied to the embeddings, and no MLP.

Shapes: B sequences, T positions, E width, C classes of the output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.gpt2.modeling_gpt2 import GPT2PreTrainedModel

from kvshift.lab.core.errors import LabError, require
from kvshift.lab.tasks.option_checks import check_at_least, check_choices
from kvshift.layers import ShiftOptions
from kvshift.models.decoder import ShiftedPreTrainedModel
from kvshift.models.retrofit import KVShiftGPT2Config, KVShiftGPT2Model


@dataclass(frozen=True, kw_only=True)
class GPT2Options:
    """A GPT-2 with KV shift; the defaults are those of Sanford et al."""

    family = "gpt2"
    width: int = 128
    """Model width E."""
    layers: int = 2
    """Layers."""
    heads: int = 4
    """Heads; each has keys and values of its own."""
    mlp: bool = True
    """MLPs of width 4 E; no: layers of attention alone."""
    dropout: float = 0.1
    """Of embeddings, attention weights and what each layer adds."""
    head: Literal["norm", "linear", "tied"] = "norm"
    """norm: the E numbers of the last LayerNorm are the logits, of which the first belong to tokens. linear: a matrix
    to as many logits as there are tokens. tied: the embedding is that matrix."""
    embedding_rows: int | None = 30
    """Rows of the embedding, no less than there are tokens; None: as many."""
    variant: str | None = None
    """What the model is, by a name of `kvshift.lab.variants.by_name`; None: kv-shift, refined by the fields shift_*."""
    shift_targets: tuple[Literal["q", "k", "v"], ...] = ("k", "v")
    """What the layers shift. With no value after it: nothing, the vanilla model."""
    shift_window: int = 2
    """Tokens mixed, the current one included."""
    shift_constraint: Literal["free", "gate", "clamp"] = "free"
    """free: any numbers. gate: sigmoid(a) and 1 - sigmoid(a). clamp: within [0, 1]."""
    shift_init: Literal["uniform", "identity"] = "uniform"
    """uniform: U(0, 1), summing to 1. identity: (1, 0), no shift at first."""
    freeze_shift: bool = False
    """Keep the coefficients at their start values."""

    def check(self, *, vocab_size: int) -> None:
        """Raise a LabError that names the field, its value, and what it may be."""
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
    """What `LabGPT2` is built from.

    Besides the fields of `KVShiftGPT2Config`, where vocab_size is the number of embedding rows:

    Args:
        head, mlp: see `GPT2Options`.
        classes: C, of a linear head.
    """

    model_type = "kvshift_lab_gpt2"
    loaded_by: ClassVar[str] = "kvshift.lab.variants.small_gpt2.LabGPT2.from_pretrained"

    head: str = "norm"
    mlp: bool = True
    classes: int = 23


class LabGPT2(ShiftedPreTrainedModel, GPT2PreTrainedModel):
    """GPT-2 for a task: scores of tokens at every position, no cache and no `generate`."""

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

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutput:
        """Logits, and their mean cross-entropy with the labels.

        Args:
            input_ids: (B, T).
            attention_mask, position_ids: as in `KVShiftGPT2Model.forward`.
            labels: (B, T): the output at t - 1 is compared with labels[t]; -100 counts for nothing.
            kwargs: of `KVShiftGPT2Model.forward`; use_cache is False.

        Returns:
            `loss`, None without labels, and `logits` (B, T, C).
        """
        in_batch = kwargs.pop("num_items_in_batch", None)  # of Trainer: labels in all batches of a step
        output = self.transformer(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **{**kwargs, "use_cache": False},
        )
        logits = output.last_hidden_state
        if self.head is not None:
            logits = self.head(logits)
        elif self.config.head == "tied":
            logits = F.linear(logits, self.transformer.wte.weight)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=logits.shape[-1], num_items_in_batch=in_batch)
        return CausalLMOutput(
            loss=loss, logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )


class _NoMLP(nn.Module):
    """What a layer without MLP adds: nothing."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.new_zeros(())


def gpt2_config(options: GPT2Options, *, vocab_size: int, length: int) -> LabGPT2Config:
    """The configuration of the GPT-2 that the options describe.

    Args:
        options: of the model.
        vocab_size: tokens of the task.
        length: T, of its sequences.
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


AutoConfig.register(LabGPT2Config.model_type, LabGPT2Config, exist_ok=True)
AutoModelForCausalLM.register(LabGPT2Config, LabGPT2, exist_ok=True)
