"""The model that is being checked: how it is called, its slow truth, and how much rounding may change.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from kvshift.models.check.findings import NotSupportedError, WrongShapeError
from kvshift.models.versions import CACHE

__all__ = ["Subject", "undisturbed"]

_CACHES = ("cache", "past_key_values", "cache_params", "state")  # what models call theirs
_KEPT = 40  # truths that may be needed again; with a large vocabulary each takes tens of megabytes
_SAFETY = 8.0  # times the measured noise; docs/check.md shows how far right and wrong lie from it


class Subject:
    """A causal language model and its truth: each sequence alone, without a cache, in one forward pass.

    Attributes:
        cache: what `forward` calls its cache; None without one.
        spread: standard deviation of the logits over the vocabulary.
        noise, tolerance: what rounding does to a logit, and what is still taken for rounding.

    Args:
        model: in evaluation mode.
        length: tokens of the longest sequences.
        seed: of all tokens that are drawn.
        leave_out: tokens that are not drawn.
    """

    def __init__(self, model: Any, length: int, seed: int = 0, leave_out: Sequence[int] = ()) -> None:
        self.model, self.length = model, length
        self.device = model.device
        size = model.get_input_embeddings().weight.shape[0]
        self.vocabulary = torch.tensor(sorted(set(range(size)) - set(leave_out)))
        self._arguments = inspect.signature(model.forward).parameters
        others = any(argument.kind is argument.VAR_KEYWORD for argument in self._arguments.values())
        self.cache = next((name for name in _CACHES if name in self._arguments), CACHE if others else None)
        self._uses = {"use_cache"} if others or "use_cache" in self._arguments else set()
        self._alone: dict[tuple[int, ...], Tensor] = {}
        self._seed, self._generator = seed, torch.Generator()
        self.restart()
        self._probe = self.tokens(length)
        self.spread = _spread(self.alone(self._probe))
        self.noise = self._noise(self._probe)
        # A model that is off by much more than rounding, such as one with dropout, must not excuse itself by it.
        self.tolerance = min(_SAFETY * self.noise, self.spread * self._eps() ** 0.25)

    def restart(self) -> None:
        """Draw the same tokens again: every property does, whatever was drawn before, so most truths are shared."""
        self._generator.manual_seed(self._seed)

    def takes(self, name: str) -> bool:
        """Whether `forward` names this argument."""
        return name in self._arguments

    def require(self, name: str) -> None:
        if not self.takes(name):
            raise NotSupportedError(f"forward has no argument {name}")

    def tokens(self, *shape: int) -> Tensor:
        """Random tokens; padding is made of them too, so that what it embeds to is seen where it leaks."""
        return self.vocabulary[torch.randint(len(self.vocabulary), shape, generator=self._generator)]

    def forward(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Logits (B, T, V) of (B, T) without a cache, in float64 on the CPU; `inputs` as in `call`."""
        with torch.no_grad():
            return self._logits(self.call(ids, cached=False, **inputs), ids)

    def resume(self, ids: Tensor, cache: Any = None, **inputs: Any) -> tuple[Tensor, Any]:
        """Logits of the tokens that follow those in the cache, and the cache; None: they are the first."""
        if self.cache is None or not self._uses:
            raise NotSupportedError("forward takes no cache")
        with torch.no_grad():
            output = self.call(ids, cached=True, **({self.cache: cache} if cache is not None else {}), **inputs)
        if getattr(output, self.cache, None) is None:
            raise NotSupportedError("forward returns no cache")
        return self._logits(output, ids), getattr(output, self.cache)

    def call(self, ids: Tensor, *, cached: bool, embedded: bool = False, **inputs: Any) -> Any:
        """The output of `forward`, with gradients where they are on; embedded: given inputs_embeds, not input_ids."""
        inputs |= dict.fromkeys(self._uses, cached)
        placed = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return self.model(**self._tokens(ids, embedded), **placed)

    def alone(self, tokens: Tensor) -> Tensor:
        """The truth: logits (T, V) of one sequence by itself."""
        key = tuple(tokens.tolist())
        truth = self._alone.pop(key, None)
        if len(self._alone) == _KEPT:
            del self._alone[next(iter(self._alone))]  # the one that was needed least recently
        self._alone[key] = self.forward(tokens.unsqueeze(0))[0] if truth is None else truth
        return self._alone[key]

    def greedy(self, tokens: Tensor, new: int) -> Tensor:
        """The truth of greedy generation: a whole forward pass for each token."""
        for _ in range(new):
            tokens = torch.cat([tokens, self.alone(tokens)[-1:].argmax(-1)])
        return tokens

    def positions(self, mask: Tensor) -> dict[str, Tensor]:
        """position_ids for a padded batch, for a model that takes them: they count the tokens of each row."""
        if not self.takes("position_ids"):
            return {}
        return {"position_ids": (mask.cumsum(1) - 1).clamp(min=0) + self.first_position}

    @cached_property
    def first_position(self) -> int:
        """Where the model itself begins to count: at 0, or, as RoBERTa does, after the number of the padding token."""
        padding = getattr(self.model.config.get_text_config(decoder=True), "pad_token_id", None)
        starts = [0] if padding is None else [0, padding + 1]
        return next(filter(self.agrees_from, starts), 0) if self.takes("position_ids") else 0

    def agrees_from(self, first: int) -> bool:
        """Whether position_ids that begin with this number change nothing but rounding."""
        positions = torch.arange(len(self._probe)) + first
        moved = self.forward(self._probe.unsqueeze(0), position_ids=positions.unsqueeze(0))[0]
        return float((moved - self.alone(self._probe)).abs().nan_to_num(0.0).max()) <= self.tolerance

    def generate(
        self, ids: Tensor, mask: Tensor | None = None, *, new: int, embedded: bool = False, **options: Any
    ) -> Any:
        """Greedy `generate` of exactly `new` tokens, with the logits of each."""
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=None,
            pad_token_id=int(self.vocabulary[0]),
            return_dict_in_generate=True,
            output_logits=True,
            disable_compile=True,
            **options,
        )
        mask = torch.ones_like(ids) if mask is None else mask
        given = self._tokens(ids, embedded)
        return self.model.generate(**given, attention_mask=mask.to(self.device), generation_config=config)

    def _tokens(self, ids: Tensor, embedded: bool) -> dict[str, Tensor]:
        ids = ids.to(self.device)
        return {"inputs_embeds": self.model.get_input_embeddings()(ids)} if embedded else {"input_ids": ids}

    def _logits(self, output: Any, ids: Tensor) -> Tensor:
        logits = output.logits if hasattr(output, "logits") else output[0]
        if logits.shape[:-1] != ids.shape:
            raise WrongShapeError(f"logits of {tuple(logits.shape)} for tokens of {tuple(ids.shape)}")
        return logits.detach().to("cpu", torch.float64)

    def _eps(self) -> float:
        return max(torch.finfo(self.model.dtype).eps, torch.finfo(torch.float32).eps)

    def _noise(self, tokens: Tensor) -> float:
        """How far rounding moves a logit: the largest change where each module's outputs are off by one unit of it.

        Every element that comes out of a module without children is moved by a random part of eps times the largest
        element beside it, which is what an inner product of such numbers may be off by; the largest of four draws.
        A model of float64 counts as one of float32, which its norms and rotary angles often stay in.
        """
        eps = self._eps()
        generator = torch.Generator(self.device).manual_seed(0)

        def disturb(module: nn.Module, inputs: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point() or output.numel() == 0:
                return None
            part = torch.rand(output.shape, generator=generator, device=output.device, dtype=torch.float64) * 2 - 1
            moved = output.double() + eps * output.abs().amax().double() * part
            return moved.to(output.dtype)

        leaves = [module for module in self.model.modules() if next(module.children(), None) is None]
        hooks = [module.register_forward_hook(disturb) for module in leaves]
        try:
            changes = [(self.forward(tokens.unsqueeze(0))[0] - self.alone(tokens)).abs() for _ in range(4)]
        finally:
            for hook in hooks:
                hook.remove()
        return float(torch.stack(changes).nan_to_num(0.0, 0.0, 0.0).max())


def _spread(logits: Tensor) -> float:
    """Standard deviation over the vocabulary, but for tokens that a model leaves out; the mean over positions."""
    spread = float(logits[:, logits.isinf().logical_not().all(0)].std(dim=-1).mean())
    if not spread > 0:
        raise ValueError(f"model must give finite logits that differ, got a spread of {spread} for random tokens")
    return spread


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """The model in evaluation mode, quiet; afterwards it and the generators of random numbers are as they were."""
    modes = [(module, module.training) for module in model.modules()]
    generation, options, own = model.generation_config, dict(vars(model.config)), set(vars(model))
    log = logging.getLogger("transformers")
    level = log.level
    devices = [model.device] if model.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            log.setLevel(logging.CRITICAL)
            model.eval()
            model.generation_config = GenerationConfig()
            yield
    finally:
        log.setLevel(level)
        for module, training in modes:
            module.training = training
        model.generation_config = generation
        vars(model.config).clear()
        vars(model.config).update(options)
        for name in set(vars(model)) - own:  # such as the static cache that generate keeps for its next call
            delattr(model, name)
