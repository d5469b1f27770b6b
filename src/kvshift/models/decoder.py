"""Attention and decoder of all models with KV shift, whichever family of transformers they extend.

The classes are mixins, listed before transformers' own classes, which supply embeddings, projections, norms, MLPs and
heads. A family uses `ShiftedAttention`, and either `RotaryDecoder` (`llama/modeling.py`, `retrofit/families.py`) or,
for other kinds of positions, `ShiftedDecoder` (`retrofit/gpt2.py`).

Shapes: B batch, T positions of this call, S sequences, H query heads, G KV heads, D head size, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from kvshift.layers import KVShift
from kvshift.layers.sequence_sharding import refuse_sharded_sequence
from kvshift.layers.shift import require_targets
from kvshift.models.cache import check_recording, ensure_shift_cache, require_growth, store_document_offset, token_count
from kvshift.models.configuration import ShiftConfig
from kvshift.models.documents import create_masks
from kvshift.models.next_token import prepare_next_token
from kvshift.models.versions import CACHE, refuse_unknown, resolve_cache_argument, warn_if_untested
from kvshift.ops.arguments import Norms
from kvshift.ops.boundaries import shared_plans
from kvshift.ops.dispatch import register_norm
from kvshift.ops.rope import Rotary, half_tables

Finish = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
_ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention")  # prefixes of names, including kernels


class ShiftedPreTrainedModel:
    """A mixin that initialises the coefficients as the configuration says and keeps them in float32."""

    config_class: type[Any]
    _keep_in_fp32_modules_strict: ClassVar = ["shift"]

    @property
    def name_or_path(self) -> str:
        """Where the weights are from. After `add_kv_shift` it is only in the configuration."""
        return vars(self).get("name_or_path", self.config.name_or_path)  # type: ignore[attr-defined]

    @name_or_path.setter
    def name_or_path(self, name: str) -> None:
        vars(self)["name_or_path"] = name

    def _check_config(self, config: Any) -> None:
        warn_if_untested()
        if not isinstance(config, self.config_class):
            raise TypeError(
                f"config must be a {self.config_class.__name__}, which says what to shift, got {type(config).__name__}"
            )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, KVShift):
            # Loaded coefficients are marked; if all were loaded, nothing is drawn from the caller's random generator.
            if not all(getattr(parameter, "_is_hf_initialized", False) for parameter in module.parameters()):
                for name, start in module.start_values().items():
                    init.copy_(getattr(module, name), start)
        else:
            super()._init_weights(module)  # type: ignore[misc]

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Initialise modules without parameters of their own too, which transformers skips in custom classes.

        Some of them scale parameters of a child: GPT-2's blocks scale the last matrix of each residual branch.
        """
        super()._initialize_weights(module)  # type: ignore[misc]


class ShiftedAttention:
    """Attention over shifted keys and values.

    The family's constructor creates the projections. If they are not named `q_proj`, `k_proj`, `v_proj` and `o_proj`,
    the family overrides `project` and `output`.

    Attributes:
        shift: the layer that holds the coefficients.
        eager_attention: the family's function for attn_implementation="eager".
        apply_rotary: the family's own `apply_rotary_pos_emb`, for (B, heads, T, D). None: the rotary embedding, if
            there is one, is Llama's and the norms are plain RMSNorms, which may run in one launch with the shift.
        llama_norm: the class of `q_norm` and `k_norm` if they and the rotary embedding compute Llama's formulas, and
            the next token may take one call (`kvshift.models.next_token`); None if not.
        qk_norm: whether `q_norm` and `k_norm` normalise the heads between shift and rotary embedding. (Read at every
            token, an attribute costs less than a look-up in the configuration.)
        sliding_window: number of tokens that each token attends to, itself included; None for all.
    """

    config: ShiftConfig
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float
    training: bool
    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module
    shift: KVShift
    eager_attention: ClassVar[Callable]
    apply_rotary: ClassVar[Callable | None] = None
    llama_norm: ClassVar[type[nn.Module] | None] = None
    qk_norm: bool = False
    sliding_window: int | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        norm = cls.__dict__.get("llama_norm")  # not one that is inherited, which may have been patched meanwhile
        if norm is not None:
            register_norm(norm)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project (B, T, E) to queries (B, T, H, D), keys and values (B, T, G, D)."""
        return self._split_heads(*self._projections(hidden_states))

    def _projections(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        modules: Any = self._modules  # as attributes, they would be found only after an AttributeError, at every token
        return modules["q_proj"](hidden_states), modules["k_proj"](hidden_states), modules["v_proj"](hidden_states)

    def _split_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = (*query.shape[:2], -1, self.head_dim)  # the layout of the operator
        return query.view(heads), key.view(heads), value.view(heads)

    def output(self, heads: Tensor) -> Tensor:
        """Project the heads that attention returned, (B, T, H, D), to (B, T, E)."""
        o_proj: Any = self._modules["o_proj"]  # as in `_projections`
        return o_proj(heads.flatten(2).contiguous())

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        shift_mask: Tensor | None = None,
        shift_seq_idx: Tensor | None = None,
        next_token: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        cache = past_key_values if cache is None else cache
        # One call on a CPU needs no views of the projections.
        whole = (
            next_token is not None
            and next_token.takes_whole
            and type(self).project is ShiftedAttention.project
            and "project" not in self.__dict__
        )
        heads = self._projections(hidden_states) if whole else self.project(hidden_states)
        done = None if next_token is None else next_token.shift_and_cache(self, *heads, cache, position_embeddings)
        if done is None:
            heads = self._split_heads(*heads) if whole else heads
            norms = (self.q_norm, self.k_norm) if self.qk_norm else None
            after: dict[str, Any] = {"rotary": position_embeddings, "norms": norms}
            if next_token is not None and position_embeddings is not None:
                after["rotary"] = half_tables(*position_embeddings)
            if self.apply_rotary is not None:
                after = {"finish": partial(_norm_then_rotate, self.apply_rotary, position_embeddings, norms)}
            done = shift_and_cache(
                self.shift, *heads, cache, self.layer_idx, mask=shift_mask, seq_idx=shift_seq_idx, **after
            )
        query, key, value = done
        output, weights = self.attend(
            query,
            key,
            value,
            attention_mask=attention_mask if next_token is None else next_token.scores(attention_mask, query.dtype),
            shift_mask=shift_mask,
            shift_seq_idx=shift_seq_idx,
            **kwargs,
        )
        return self.output(output), weights

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        attention_mask: Tensor | None,
        shift_mask: Tensor | None,
        shift_seq_idx: Tensor | None,
        attn_implementation: str | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output of attention, (B, T, H, D), and its weights, or None in place of them.

        Args:
            query: (B, H, T, D).
            key, value: (B, G, length, D), cached tokens included.
            attention_mask, shift_mask, shift_seq_idx: masks of the scores, of padding and of documents, as in
                `create_masks`; the last two are not used here.
            kwargs: further arguments of the attention function.
        """
        attention: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            attn_implementation or self.config._attn_implementation, self.eager_attention
        )
        return attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )


def _norm_then_rotate(
    apply_rotary: Callable, tables: tuple[Tensor, Tensor], norms: Norms | None, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor]:
    """Normalise and rotate q (B, T, H, D) and k (B, T, G, D) with a family's own functions.

    The functions get views with the same strides as in the family's own code, so that results agree bit for bit.
    """
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if norms is not None:
        q, k = norms[0](q), norms[1](k)
    q, k = apply_rotary(q, k, *tables)
    return q.transpose(1, 2), k.transpose(1, 2)


def shift_and_cache(
    shift: KVShift,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: Cache | None,
    layer_idx: int,
    *,
    mask: Tensor | None,
    seq_idx: Tensor | None,
    rotary: Rotary | None = None,
    norms: Norms | None = None,
    finish: Finish | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shift the heads of one layer, continuing from the state in the cache, then normalise, rotate and cache them.

    Args:
        shift: the shift of the layer.
        q, k, v: as in `KVShift.forward`.
        cache: a cache after `ensure_shift_cache`; None: every row begins here.
        layer_idx: index of the layer in the cache.
        mask, seq_idx, rotary, norms: as in `KVShift.forward`.
        finish: a family's own function of shifted q and k, used instead of `rotary` and `norms`.

    Returns:
        q (B, H, T, D); k and v (B, G, length, D), cached tokens included.
    """
    require_targets(shift)
    options: dict[str, Any] = {"mask": mask, "seq_idx": seq_idx, "rotary": rotary, "norms": norms}
    if cache is None or not shift.targets:
        q, k, v, _ = shift(q, k, v, keep_state=False, **options)
    else:
        layer: Any = cache.layers[layer_idx]
        q, k, v = layer.shift_tokens(shift, q, k, v, **options)
    if finish is not None:
        q, k = finish(q, k)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return q, *((k, v) if cache is None else cache.update(k, v, layer_idx))


class ShiftedDecoder:
    """A stack of layers with shift, without a head."""

    config: ShiftConfig

    own_arguments: ClassVar[frozenset[str]] = frozenset()  # of `forward`, passed on to `run_layers`
    embed_tokens: nn.Module
    run_layers: Callable[..., Any]  # (result of `embed`, masks, arguments of the layers) -> output

    def embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """Return the input of the first layer, (B, T, E), from ids (B, T) or embeddings (B, T, E)."""
        return self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds

    @merge_with_config_defaults
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the decoder as transformers does, and keep documents that are packed into one row apart.

        Neither shift nor attention crosses a document boundary, with or without a cache. The first document of a call
        continues the last one in the cache.

        Args:
            seq_idx: (B, T) number of the document at each position; a document begins where it changes.
            cu_seq_lens_q: (S + 1,) boundaries of the documents in the single row of a pack.
            position_ids: (B, T); if neither of the above is given, a document begins wherever they do not increase by
                one. Without position_ids, positions are counted from the start of each document.
            past_key_values, cache: two names of one argument; the second exists in transformers 5.24 and later.

        Raises:
            TypeError: a keyword argument is unknown.
            RuntimeError: the layers did not add their tokens to the cache.
        """
        refuse_unknown(self, kwargs)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        inputs_embeds = self.embed(input_ids, inputs_embeds)
        cache = resolve_cache_argument(past_key_values, cache)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        masks, position_ids = self.prepare_inputs(
            inputs_embeds, attention_mask, position_ids, cache, seq_idx=seq_idx, cu_seq_lens=cu_seq_lens_q
        )
        # A compiled call would be recompiled for every count.
        before = None if torch.compiler.is_compiling() else token_count(cache)
        if cu_seq_lens_q is not None:
            kwargs["cu_seq_lens_q"] = cu_seq_lens_q
        kwargs |= {CACHE: cache, "use_cache": use_cache, "position_ids": position_ids}
        kwargs |= {"shift_mask": masks["padding"], "shift_seq_idx": masks["documents"]}
        if masks["padding"] is masks["documents"] is None or torch.compiler.is_compiling():
            output = self.run_layers(inputs_embeds, masks, **kwargs)
        else:
            with shared_plans():
                output = self.run_layers(inputs_embeds, masks, **kwargs)
        require_growth(self, cache, before, inputs_embeds.shape[1])
        return output

    def prepare_inputs(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | dict[str, Tensor | None] | None,
        position_ids: Tensor | None,
        cache: Cache | None,
        **named: Tensor | None,
    ) -> tuple[dict[str, Tensor | None], Tensor]:
        """Prepare a forward pass: let the cache carry the state of the shift, and create the masks of all layers.

        What holds for all layers is checked here, and not in a layer: a layer must not depend on its number, because
        layers that are compiled one by one (`layer.compile()`) share a graph.

        Args:
            inputs_embeds: (B, T, E); only its shape, dtype and device are used.
            attention_mask: as in `create_masks`, or the result of that function.
            position_ids: (B, T); None: they continue from the cache, and are counted from the start of each document.
            cache: the cache of the call.
            named: seq_idx and cu_seq_lens, as in `document_index`.

        Returns:
            The result of `create_masks`, and the position ids.
        """
        self._refuse_unknown_attention()
        if self.config.shift_targets:
            refuse_sharded_sequence()
        if cache is not None:
            ensure_shift_cache(cache, self.config)
        if isinstance(attention_mask, dict) and "offsets" in attention_mask:
            masks = attention_mask
        else:
            masks = create_masks(self.config, inputs_embeds, attention_mask, cache, position_ids, **named)
        if cache is not None and not (masks["padding"] is masks["documents"] is None):
            check_recording(cache, masks["padding"], attention_mask, masks["documents"])
        offsets = masks["offsets"]
        if position_ids is None:
            positions = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
            position_ids = (positions + (0 if cache is None else cache.get_seq_length())).unsqueeze(0)
            if offsets is not None:
                position_ids = position_ids - offsets
        if cache is not None and offsets is not None:
            is_named = any(tensor is not None for tensor in named.values())
            store_document_offset(cache, offsets[:, -1], is_named=is_named)
        return masks, position_ids

    def _refuse_unknown_attention(self) -> None:
        """Raise a ValueError for attention with its own cache, as in servers, which would drop the state silently."""
        name = str(self.config._attn_implementation)
        from_hub = "/" in name and not name.startswith("paged|")
        if not name.startswith(_ATTENTION) and not from_hub:
            raise ValueError(
                f"attn_implementation must be one of {', '.join(_ATTENTION)}, or a kernel from the hub, got {name!r}: "
                "its cache does not carry the raw keys and values"
            )


class RotaryDecoder(ShiftedDecoder):
    """A family's decoder with `norm`, `rotary_emb` and `layers` that contain a `ShiftedAttention`.

    The attention windows of layers differ if `config.layer_types` says so; `rotary_tables` may return separate tables
    for each type of layer.
    """

    layers: nn.ModuleList
    norm: nn.Module
    rotary_emb: nn.Module
    has_llama_layers: ClassVar[bool] = False  # whether there are layers with `ShiftedAttention.llama_norm`
    rotates_halves: ClassVar[bool] = True  # whether layers rotate with `kvshift.ops.rope`, not with a family's function

    def rotary_tables(self, hidden_states: Tensor, position_ids: Tensor) -> Any:
        """Return the tables of transformers, (L, T, D), for all attention layers, or a dict of them by layer type."""
        return self.rotary_emb(hidden_states, position_ids=position_ids)

    @capture_outputs
    def run_layers(
        self, hidden_states: Tensor, masks: dict[str, Tensor | None], *, position_ids: Tensor, **kwargs: Any
    ) -> BaseModelOutputWithPast:
        tables = self.rotary_tables(hidden_states, position_ids)
        attn_implementation = self.config._attn_implementation  # once: a look-up in a configuration takes microseconds
        layer_types: Iterable[str] = repeat("attention", self.config.num_hidden_layers)
        if isinstance(tables, dict) or "attention" not in masks:
            layer_types = self.config.layer_types[: self.config.num_hidden_layers]
        tokens = prepare_next_token(self, hidden_states, tables, masks, kwargs[CACHE], attn_implementation)
        if self.rotates_halves and not tokens:
            is_dict = isinstance(tables, dict)
            tables = {name: half_tables(*x) for name, x in tables.items()} if is_dict else half_tables(*tables)
        # zip, not a slice: a slice of a ModuleList is a new module, which would be created at every token.
        for decoder_layer, layer_type in zip(self.layers, layer_types, strict=False):
            hidden_states = decoder_layer(
                hidden_states,
                attention_mask=masks[layer_type] if layer_type in masks else masks["attention"],
                position_embeddings=tables[layer_type] if isinstance(tables, dict) else tables,
                position_ids=position_ids,
                attn_implementation=attn_implementation,
                next_token=tokens.get(layer_type),
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **{CACHE: kwargs[CACHE]})
