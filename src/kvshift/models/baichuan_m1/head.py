"""The head of Baichuan-M1, which normalises the rows of its matrix to length 1.

Shapes: E model width, V vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class NormHead(nn.Linear):
    """A linear head without bias whose rows have length 1.

        logits[v] = x . weight[v],  weight[v] = raw[v] / (|raw[v]| + 1e-7)

    `weight` is the matrix that multiplies the hidden states, for all code that reads it: losses that do not compute
    the logits, quantization, distillation. The parameter is `raw`: it has the released name in `named_parameters` and
    `state_dict`, `model.get_parameter("lm_head.weight")` returns it, and the optimizer updates it. Because `weight`,
    (V, E), is computed at each access, writing to it or to its `.data` has no effect: write to the parameter.

    `forward` divides the logits, in float32, instead of the rows, and so needs no second matrix.
    """

    _shows_raw = False
    _keeps_lengths = False
    _kept_lengths: Tensor | None = None

    @property
    def raw(self) -> Tensor:
        """The parameter, (V, E), or the tensor that FSDP puts in its place."""
        return self._parameters["weight"] if "weight" in self._parameters else self.__dict__["weight"]  # type: ignore

    @property
    def weight(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Matrix (V, E) with rows of length 1; differentiable. Under no_grad, a Parameter that quantization copies."""
        if "weight" not in self._parameters and "weight" not in self.__dict__:
            raise AttributeError("weight")  # not registered yet, or deleted
        raw = self.raw
        if raw is None or self._shows_raw or _manages_parameters():
            return raw
        rows = (raw / row_lengths(raw)[:, None]).to(raw.dtype)
        return rows if torch.is_grad_enabled() else nn.Parameter(rows, requires_grad=False)

    @weight.setter
    def weight(self, value: Tensor) -> None:
        self.__dict__["weight"] = value  # a plain tensor; assigning a Parameter registers it instead

    @weight.deleter
    def weight(self) -> None:
        del self.__dict__["weight"]

    @contextmanager
    def showing_raw(self) -> Iterator[None]:
        """Let `weight` return the parameter within this context, for code that writes to it."""
        before, self._shows_raw = self._shows_raw, True
        try:
            yield
        finally:
            self._shows_raw = before

    @contextmanager
    def keeping_lengths(self) -> Iterator[None]:
        """Compute the V row lengths once, not at every call. The parameter must not change within this context."""
        before, self._keeps_lengths = self._keeps_lengths, True
        try:
            yield
        finally:
            self._keeps_lengths, self._kept_lengths = before, None

    def reset_parameters(self) -> None:
        with self.showing_raw():
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        raw = self.raw
        logits = functional.linear(input, raw)
        if not self._keeps_lengths or torch.compiler.is_compiling():
            lengths = row_lengths(raw)
        elif self._kept_lengths is None:
            lengths = self._kept_lengths = row_lengths(raw)
        else:
            lengths = self._kept_lengths
        return (logits.to(lengths.dtype) / lengths).to(logits.dtype)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if name == "weight" and type(param).__module__.partition(".")[0] == "torchao":
            self.__class__ = nn.Linear  # type: ignore[assignment]  # torchao quantized the normalised rows, in place

    def __getattr__(self, name: str) -> Any:
        if name == "weight":  # `nn.Module` would return the parameter if the property raises
            raise AttributeError(f"the rows of a {type(self).__name__} could not be computed")
        return super().__getattr__(name)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__name__.startswith("Parametrized"):  # made by `torch.nn.utils.parametrize`
            raise TypeError(
                "the weight of a NormHead cannot be parametrized: it is already computed from its parameter. Leave "
                "lm_head out; for LoRA on it use target_modules, not target_parameters"
            )


def _manages_parameters() -> bool:
    """Return True if the caller reads `weight` to move, shard or tie the parameter, as FSDP and accelerate do."""
    if torch.compiler.is_compiling():
        return False
    caller = sys._getframe(2)
    module = caller.f_globals.get("__name__", "")
    packages = ("torch.distributed.", "torch.nn.modules.", "accelerate.", "deepspeed.")
    return module.startswith(packages) and caller.f_code.co_name != "__getattr__"


def row_lengths(matrix: Tensor) -> Tensor:
    """Return the divisors of the rows, (V,): their L2 norms + 1e-7, in float32 or wider."""
    wide = torch.promote_types(matrix.dtype, torch.float32)
    return torch.linalg.vector_norm(matrix, dim=1, dtype=wide) + 1e-7


def as_head(module: nn.Module) -> nn.Module:
    """Convert a module to the `lm_head` of a model: a Linear, as from `resize_token_embeddings`, becomes a NormHead.

    A layer of another class, such as a quantized one, is returned unchanged: it holds a copy of `NormHead.weight`.

    Raises:
        TypeError: the module is an unsupported adapter, a Linear with a bias, or a module whose weights are not loaded
            yet and would not be normalised.
    """
    kind = type(module)
    if kind is nn.Linear and module.bias is None:
        module.__class__ = NormHead
    if kind.__module__.partition(".")[0] == "peft" and "peft" in sys.modules:
        from kvshift.models.baichuan_m1.adapter import as_adapter

        return as_adapter(module)
    if any(isinstance(part, NormHead) for part in module.modules()):  # the module itself, or one inside FSDP
        return module
    if any(tensor.is_meta for tensor in module.parameters()) or kind is nn.Linear:
        raise TypeError(
            f"lm_head must be a NormHead, which scales its rows to length 1; got {kind.__module__}.{kind.__qualname__}"
            f"{'' if getattr(module, 'bias', None) is None else ' with a bias'}. Exclude lm_head from replacement "
            "before the weights are loaded (modules_to_not_convert)"
        )
    return module
