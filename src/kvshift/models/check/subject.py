"""The model that is being checked: how it is called, its reference, and how much rounding may change.

Shapes: B batch, T positions, V vocabulary.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from kvshift.models.check.findings import Comparison, NotSupportedError, WrongShapeError
from kvshift.models.versions import CACHE

_CACHES = ("cache", "past_key_values", "cache_params", "state")  # names of the argument in transformers' models
_REMEMBERED = 40  # references that may be needed again; with a large vocabulary each takes tens of megabytes
_SAFETY = 8.0  # times the measured noise; docs/check.md shows how far right and wrong lie from it


class Subject:
    """A causal language model and its reference: each sequence alone, without a cache, in one forward pass.

    Attributes:
        cache: name of the argument of `forward` that is its cache; None without one.
        spread: standard deviation of the logits over the vocabulary.
        noise, tolerance: how far rounding moves a logit, and the largest difference that counts as rounding.
        result: of the property that is being checked.

    Args:
        model: in evaluation mode.
        length: tokens of the longest sequences.
        seed: of the random tokens.
        leave_out: tokens that are never drawn.
    """

    def __init__(self, model: Any, length: int, seed: int = 0, leave_out: Sequence[int] = ()) -> None:
        self.model, self.length, self.device = model, length, model.device
        size = model.get_input_embeddings().weight.shape[0]
        self.vocabulary = torch.tensor(sorted(set(range(size)) - set(leave_out)))
        self._arguments = inspect.signature(model.forward).parameters
        others = any(argument.kind is argument.VAR_KEYWORD for argument in self._arguments.values())
        self.cache = next(filter(self.takes, _CACHES), CACHE if others else None)
        self._use_cache = ["use_cache"] if others or self.takes("use_cache") else []
        self._alone: dict[tuple[int, ...], Tensor] = {}
        self._seed, self._generator = seed, torch.Generator()
        self._eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
        self.restart()
        self._probe = self.tokens(length)
        self.spread = _spread(self.alone(self._probe))
        self.noise = self._noise(self._probe)
        # A model that is off by much more than rounding, such as one with dropout, is not excused by its noise.
        self.tolerance = min(_SAFETY * self.noise, self.spread * self._eps**0.25)
        self.result = Comparison(self.tolerance)

    def restart(self) -> None:
        """Draw the same tokens again: every property begins with them, so they share most references."""
        self._generator.manual_seed(self._seed)

    def takes(self, name: str) -> bool:
        """Whether `forward` names this argument."""
        return name in self._arguments

    def require(self, name: str) -> None:
        if not self.takes(name):
            raise NotSupportedError(f"forward has no argument {name}")

    def tokens(self, *shape: int) -> Tensor:
        """Random tokens, also for padding, so that its embeddings make a difference where they leak."""
        return self.vocabulary[torch.randint(len(self.vocabulary), shape, generator=self._generator)]

    def forward(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Logits (B, T, V) of (B, T) without a cache, in float64 on the CPU; `inputs` as in `call`."""
        with torch.no_grad():
            return self._logits(self.call(ids, cached=False, **inputs), ids)

    def resume(self, ids: Tensor, cache: Any = None, **inputs: Any) -> tuple[Tensor, Any]:
        """Logits of the tokens that follow those in the cache, and the cache; None: they are the first."""
        if self.cache is None or not self._use_cache:
            raise NotSupportedError("forward takes no cache")
        with torch.no_grad():
            output = self.call(ids, cached=True, **({self.cache: cache} if cache is not None else {}), **inputs)
        if getattr(output, self.cache, None) is None:
            raise NotSupportedError("forward returns no cache")
        return self._logits(output, ids), getattr(output, self.cache)

    def call(self, ids: Tensor, *, cached: bool, embedded: bool = False, **inputs: Any) -> Any:
        """The output of `forward`, with gradients where they are on; embedded: of inputs_embeds, not input_ids."""
        inputs |= dict.fromkeys(self._use_cache, cached)
        placed = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return self.model(**self._tokens(ids, embedded), **placed)

    def generate(self, ids: Tensor, mask: Tensor, *, new: int, embedded: bool = False, **options: Any) -> Any:
        """Greedy `generate` of exactly `new` tokens, with the logits of each."""
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=new,
            pad_token_id=int(self.vocabulary[0]),
            return_dict_in_generate=True,
            output_logits=True,
            disable_compile=True,
            **options,
        )
        tokens = self._tokens(ids, embedded)
        return self.model.generate(**tokens, attention_mask=mask.to(self.device), generation_config=config)

    def gradients(self, ids: Tensor, spans: Iterable[Sequence[int] | Tensor], **inputs: Any) -> list[Tensor]:
        """For each span of positions, how much its logits depend on each token, (T,), as parts of the largest,
        in which the result counts from here on.

        The logits of a span have random weights, so that gradients of one token do not cancel. Every table that is
        looked up by (1, T) or (T, 1) numbers counts, those of positions too, which depend on no other token.
        """
        self.result.of, self.result.tolerance = "gradients", self.tolerance / self.spread
        layouts = ids.shape, ids.mT.shape  # XLNet has positions first
        leaves: list[Tensor] = []

        def cut(module: nn.Module, arguments: Any, output: Tensor) -> Tensor | None:
            numbers = arguments[0] if arguments else None
            if not isinstance(numbers, Tensor) or numbers.shape not in layouts or output.ndim != 3:
                return None
            leaves.append(output.detach().requires_grad_())
            return leaves[-1].clone()  # some models scale it in place, which a leaf does not allow

        tables = [module for module in self.model.modules() if isinstance(module, nn.Embedding)]
        with _hooks(tables, cut), torch.enable_grad():
            logits = self.call(ids, cached=False, **inputs).logits[0].float()
        if not leaves or not logits.requires_grad:
            raise NotSupportedError("no gradient reaches the embeddings")
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0)).to(logits.device)
        sizes: list[Tensor] = []
        for span in spans:
            objective = (logits[span] * weights[span]).nan_to_num(0.0, 0.0, 0.0).sum()
            gradients = torch.autograd.grad(objective, leaves, retain_graph=True, allow_unused=True)
            reached = [gradient.abs().amax(-1).flatten() for gradient in gradients if gradient is not None]
            sizes.append(torch.stack(reached).amax(0).cpu().double())
        largest = max(float(size_T.max()) for size_T in sizes)
        return [size_T / largest for size_T in sizes]

    def alone(self, tokens: Tensor) -> Tensor:
        """The reference: logits (T, V) of one sequence by itself."""
        key = tuple(tokens.tolist())
        logits = self._alone.pop(key, None)
        self._alone[key] = self.forward(tokens.unsqueeze(0))[0] if logits is None else logits
        if len(self._alone) > _REMEMBERED:
            del self._alone[next(iter(self._alone))]  # the one that was needed least recently
        return self._alone[key]

    @cached_property
    def first_position(self) -> int:
        """The model's first position: 0, or, as in RoBERTa, the number after that of the padding token."""
        padding = getattr(self.model.config.get_text_config(decoder=True), "pad_token_id", None)
        starts = [0] if padding is None else [0, padding + 1]
        return next(filter(self.agrees_from, starts), 0) if self.takes("position_ids") else 0

    def agrees_from(self, first: int) -> bool:
        """Whether position_ids that begin with this number change nothing but rounding."""
        positions = torch.arange(len(self._probe)) + first
        moved = self.forward(self._probe.unsqueeze(0), position_ids=positions.unsqueeze(0))[0]
        return float((moved - self.alone(self._probe)).abs().nan_to_num(0.0).max()) <= self.tolerance

    def _tokens(self, ids: Tensor, embedded: bool) -> dict[str, Tensor]:
        ids = ids.to(self.device)
        return {"inputs_embeds": self.model.get_input_embeddings()(ids)} if embedded else {"input_ids": ids}

    def _logits(self, output: Any, ids: Tensor) -> Tensor:
        logits = output.logits if hasattr(output, "logits") else output[0]
        if logits.shape[:-1] != ids.shape:
            raise WrongShapeError(f"logits of {tuple(logits.shape)} for tokens of {tuple(ids.shape)}")
        return logits.detach().to("cpu", torch.float64)

    def _noise(self, tokens: Tensor) -> float:
        """How far rounding moves a logit: the largest change where each module's outputs are off by one unit of it.

        Every element that comes out of a module without children is moved by a random part of eps times the largest
        element beside it, which is what an inner product of such numbers may be off by; the largest of four draws.
        A model of float64 counts as one of float32, which its norms and rotary angles often stay in.
        """
        generator = torch.Generator(self.device).manual_seed(0)

        def disturb(module: nn.Module, inputs: Any, output: Any) -> Any:
            if not isinstance(output, Tensor) or not output.is_floating_point() or output.numel() == 0:
                return None
            part = torch.rand(output.shape, generator=generator, device=output.device, dtype=torch.float64) * 2 - 1
            moved = output.double() + self._eps * output.abs().amax().double() * part
            return moved.to(output.dtype)

        leaves = [module for module in self.model.modules() if next(module.children(), None) is None]
        with _hooks(leaves, disturb):
            changes = [(self.forward(tokens.unsqueeze(0))[0] - self.alone(tokens)).abs() for _ in range(4)]
        return float(torch.stack(changes).nan_to_num(0.0, 0.0, 0.0).max())


def _spread(logits: Tensor) -> float:
    """Standard deviation over the vocabulary, without tokens that the model excludes; the mean over positions."""
    spread = float(logits[:, logits.isinf().logical_not().all(0)].std(dim=-1).mean())
    if not spread > 0:
        raise ValueError(f"model must return finite logits that differ, got a spread of {spread} for random tokens")
    return spread


@contextmanager
def _hooks(modules: Iterable[nn.Module], hook: Callable) -> Iterator[None]:
    """A forward hook on each of the modules."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """The model in evaluation mode, quiet; afterwards it and the generators of random numbers are as they were."""
    modes = [(module, module.training) for module in model.modules()]
    attributes = [(vars(part), dict(vars(part))) for part in (model, model.config)]
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
        for now, before in attributes:  # among those of the model are the static cache that generate keeps
            now.clear()
            now.update(before)
