"""Configuration of Baichuan-M1: the fields of the released `config.json`."""

from __future__ import annotations

from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig


@strict
class BaichuanM1Config(LlamaConfig):
    """Configuration of `BaichuanM1ForCausalLM`.

    The head size of a layer is hidden_size divided by its query heads. Besides the fields of `LlamaConfig`:

    Args:
        sliding_window_layers: numbers of the layers that attend to a window; always needed, [] for none.
        sliding_window: each token of those layers attends to this many tokens, itself included; 2 or more.
        num_swa_attention_heads, num_swa_key_value_heads: query heads and KV heads of those layers; None: those of the
            other layers.
        conv_window: tokens that the convolution of keys and values mixes, the current one included: 2.
        rope_theta: always needed, here or in `rope_parameters`.

    Raises:
        ValueError: a field is missing or has another value; the message names it, its value and what it should be.
    """

    model_type = "baichuan_m1"
    has_no_defaults_at_init = True  # without sliding_window_layers there is no configuration
    base_model_tp_plan = None
    # What the caches and the decoder ask of a model with KV shift.
    shift_targets: ClassVar[tuple[str, ...]] = ("k", "v")
    shift_window: ClassVar[int] = 2

    sliding_window_layers: list[int] | None = None
    sliding_window: int | None = None
    num_swa_attention_heads: int | None = None
    num_swa_key_value_heads: int | None = None
    conv_window: int = 2

    def __post_init__(self, **kwargs: Any) -> None:
        if not self.rope_parameters and kwargs.get("rope_theta") is None:
            raise ValueError("rope_theta must be given, here or in rope_parameters; got neither")
        self._check_windows()
        super().__post_init__(**kwargs)
        self._check_heads()

    def _check_windows(self) -> None:
        layers, window = self.sliding_window_layers, self.sliding_window
        numbers = range(self.num_hidden_layers)
        if (
            not isinstance(layers, list)
            or not all(type(layer) is int and layer in numbers for layer in layers)  # no bool, which is an int too
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

    @property
    def layer_types(self) -> list[str]:
        """By which transformers' caches and masks tell layers apart."""
        sliding = set(self.sliding_window_layers or ())
        return ["sliding_attention" if i in sliding else "full_attention" for i in range(self.num_hidden_layers)]

    def heads(self, layer: int) -> tuple[int, int]:
        """Query heads and KV heads of a layer."""
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.layer_types[layer] == "sliding_attention":
            heads, kv_heads = self.num_swa_attention_heads or heads, self.num_swa_key_value_heads or kv_heads
        return heads, kv_heads  # type: ignore[return-value]

    def to_dict(self) -> dict[str, Any]:
        """Of transformers; what is saved: `rope_theta` also where the released layout has it."""
        saved = super().to_dict()
        saved["rope_theta"] = saved["rope_parameters"]["rope_theta"]
        return saved
