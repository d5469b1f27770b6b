"""Configuration of Baichuan-M1: the fields of the released `config.json`."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from kvshift.models.configuration import ShiftConfig, check_unknown_fields


@strict
class BaichuanM1Config(LlamaConfig):
    """Configuration of `BaichuanM1ForCausalLM`.

    The head size of a layer is hidden_size divided by its number of query heads. The fields are those of `LlamaConfig`,
    and:

    Args:
        sliding_window_layers: indices of the layers with sliding-window attention; required, [] for none.
        sliding_window: number of tokens that each token of those layers attends to, itself included; 2 or more.
        num_swa_attention_heads, num_swa_key_value_heads: numbers of query heads and KV heads in those layers; None: as
            in the other layers.
        conv_window: number of tokens that the convolution of keys and values mixes, the current one included; always 2.
        rope_theta: base of the rotary embedding; required, here or in `rope_parameters`.

    Raises:
        ValueError: a field is missing or has a wrong value; the message names it, its value and what is expected.
    """

    model_type = "baichuan_m1"
    has_no_defaults_at_init = True  # sliding_window_layers must be given
    base_model_tp_plan = None
    # The caches and the decoder read these from the configuration of any model with KV shift.
    shift_targets: ClassVar[tuple[str, ...]] = ("k", "v")
    shift_window: ClassVar[int] = 2

    sliding_window_layers: list[int] | None = None
    sliding_window: int | None = None
    num_swa_attention_heads: int | None = None
    num_swa_key_value_heads: int | None = None
    conv_window: int = 2

    def __post_init__(self, **kwargs: Any) -> None:
        check_unknown_fields(self, kwargs)
        if not self.rope_parameters and kwargs.get("rope_theta") is None:
            raise ValueError("rope_theta must be given, here or in rope_parameters; got neither")
        if self.attention_bias:
            raise ValueError(f"attention_bias must be False, as in the released layout; got {self.attention_bias!r}")
        self._check_windows()
        super().__post_init__(**kwargs)
        self._check_heads()
        base, given = self.rope_parameters["rope_theta"], kwargs.get("rope_theta")  # type: ignore[index]
        if given not in (None, base):
            raise ValueError(f"rope_theta must be left out or equal that of rope_parameters ({base!r}); got {given!r}")

    def _check_windows(self) -> None:
        layers, window = self.sliding_window_layers, self.sliding_window
        numbers = range(self.num_hidden_layers)
        if (
            not isinstance(layers, list)
            or not all(type(layer) is int and layer in numbers for layer in layers)  # not bool, a subclass of int
            or len(set(layers)) < len(layers)
        ):
            raise ValueError(
                f"sliding_window_layers must be a list of different integers from 0 to "
                f"{self.num_hidden_layers - 1}, got {layers!r}"
            )
        if (layers or window is not None) and (type(window) is not int or window < 2):
            raise ValueError(
                f"sliding_window must be an integer of at least 2 with sliding_window_layers; got {window!r}"
            )
        if type(self.conv_window) is not int or self.conv_window != 2:
            raise ValueError(f"conv_window must be 2, the only released value; got {self.conv_window!r}")

    def _check_heads(self) -> None:
        for name in ("num_swa_attention_heads", "num_swa_key_value_heads"):
            count = getattr(self, name)
            if count is not None and (type(count) is not int or count < 1):
                raise ValueError(f"{name} must be an integer of at least 1 or None; got {count!r}")
        for layer in range(self.num_hidden_layers):
            heads, kv_heads = self.heads(layer)
            if self.hidden_size % (2 * heads) or heads % kv_heads:
                raise ValueError(
                    f"hidden_size ({self.hidden_size}) must be an even multiple of the {heads} query heads of layer "
                    f"{layer}, and these a multiple of its {kv_heads} KV heads"
                )
        if self.head_dim != self.hidden_size // self.num_attention_heads:
            raise ValueError(
                f"head_dim must be left out or hidden_size / num_attention_heads = "
                f"{self.hidden_size // self.num_attention_heads}; got {self.head_dim!r}"
            )

    @ShiftConfig.layer_types.getter  # with its setter
    def layer_types(self) -> list[str]:
        """Type of each layer, for transformers' caches and masks."""
        sliding = set(self.sliding_window_layers or ())
        return ["sliding_attention" if i in sliding else "full_attention" for i in range(self.num_hidden_layers)]

    def heads(self, layer: int) -> tuple[int, int]:
        """Return the numbers of query heads and KV heads of a layer."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.layer_types[layer] == "sliding_attention":
            heads, kv_heads = self.num_swa_attention_heads or heads, self.num_swa_key_value_heads or kv_heads
        return heads, kv_heads  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """Return the fields to save, with `rope_theta` also at the top level, as in the released layout."""
        saved = super().to_dict()
        saved["rope_theta"] = saved["rope_parameters"]["rope_theta"]
        return saved
