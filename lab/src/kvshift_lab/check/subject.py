"""The model that is being checked: how it is called, its reference, and the size of its rounding errors.

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

from kvshift.models.extending import CACHE
from kvshift_lab.check.findings import Comparison, NotSupportedError, WrongShapeError

_CACHES = ("cache", "past_key_values", "cache_params", "state")  # names of the argument in transformers' models
_MAX_REFERENCES = 40  # number of cached references; with a large vocabulary, each takes tens of megabytes
_SAFETY = 8.0  # tolerance / measured noise; docs/check.md shows how far right and wrong results are from it


class Subject:
    """A causal language model and its reference: each sequence alone, without a cache, in one forward pass.

    Attributes:
        cache: name of the cache argument of `forward`; None if there is none.
        spread: standard deviation of the logits over the vocabulary.
        noise, tolerance: how far rounding moves a logit, and the largest difference that counts as rounding.
        result: the result of the property that is being checked.

    Args:
        model: a model in evaluation mode.
        length: number of tokens in the longest sequences.
        seed: seed of the random tokens.
        leave_out: ids of tokens that are never drawn.
    """

    def __init__(self, model: Any, length: int, seed: int = 0, leave_out: Sequence[int] = ()) -> None:
        self.model, self.length, self.device = model, length, model.device
        size = model.get_input_embeddings().weight.shape[0]
        self.vocabulary = torch.tensor(sorted(set(range(size)) - set(leave_out)))
        self._arguments = inspect.signature(model.forward).parameters
        others = any(argument.kind is argument.VAR_KEYWORD for argument in self._arguments.values())
        self.cache = next(filter(self.accepts, _CACHES), CACHE if others else None)
        self._use_cache = ["use_cache"] if others or self.accepts("use_cache") else []
        self._references: dict[tuple[int, ...], Tensor] = {}
        self._seed, self._generator = seed, torch.Generator()
        self._eps = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
        self.reseed()
        self._probe = self.tokens(length)
        self.spread = _spread(self.reference_logits(self._probe))
        self.noise = self._noise(self._probe)
        # The noise does not excuse a model with errors much larger than rounding, such as one with dropout.
        self.tolerance = min(_SAFETY * self.noise, self.spread * self._eps**0.25)
        self.result = Comparison(self.tolerance)

    def reseed(self) -> None:
        """Draw the same tokens again from here on: all properties start with them, and so share most references."""
        self._generator.manual_seed(self._seed)

    def accepts(self, name: str) -> bool:
        """Return True if the signature of `forward` names this argument."""
        return name in self._arguments

    def require(self, name: str) -> None:
        if not self.accepts(name):
            raise NotSupportedError(f"forward has no argument {name}")

    def tokens(self, *shape: int) -> Tensor:
        """Draw random tokens. They are also used as padding, so that padding changes the logits if it leaks."""
        return self.vocabulary[torch.randint(len(self.vocabulary), shape, generator=self._generator)]

    def forward(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Return the logits (B, T, V) of ids (B, T) without a cache, in float64 on the CPU; `inputs` as in `call`."""
        with torch.no_grad():
            return self._logits(self.call(ids, cached=False, **inputs), ids)

    def resume(self, ids: Tensor, cache: Any = None, **inputs: Any) -> tuple[Tensor, Any]:
        """Return the logits of tokens that follow those in the cache (None: the first tokens), and the new cache."""
        if self.cache is None or not self._use_cache:
            raise NotSupportedError("forward takes no cache")
        with torch.no_grad():
            output = self.call(ids, cached=True, **({self.cache: cache} if cache is not None else {}), **inputs)
        if getattr(output, self.cache, None) is None:
            raise NotSupportedError("forward returns no cache")
        return self._logits(output, ids), getattr(output, self.cache)

    def call(self, ids: Tensor, *, cached: bool, embedded: bool = False, **inputs: Any) -> Any:
        """Return the output of `forward`, with gradients if enabled; `embedded` passes inputs_embeds, not input_ids."""
        inputs |= dict.fromkeys(self._use_cache, cached)
        placed = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return self.model(**self._tokens(ids, embedded), **placed)

    def generate(self, ids: Tensor, mask: Tensor, *, new: int, embedded: bool = False, **options: Any) -> Any:
        """Generate exactly `new` tokens by greedy decoding, with the logits of each."""
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
        """For each span of positions, return how much its logits depend on each token, (T,), relative to the largest.

        From here on, `result` counts in the same unit. The logits of a span are weighted at random, so that gradients
        of one token do not cancel. All tables that are indexed by (1, T) or (T, 1) numbers are included, also those of
        positions, which depend on no other token.
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

    def reference_logits(self, tokens: Tensor) -> Tensor:
        """Return the reference: logits (T, V) of one sequence by itself."""
        key = tuple(tokens.tolist())
        logits = self._references.pop(key, None)
        self._references[key] = self.forward(tokens.unsqueeze(0))[0] if logits is None else logits
        if len(self._references) > _MAX_REFERENCES:
            del self._references[next(iter(self._references))]  # the least recently used
        return self._references[key]

    @cached_property
    def first_position(self) -> int:
        """The model's first position: 0 or, as in RoBERTa, the id of the padding token plus 1."""
        padding = getattr(self.model.config.get_text_config(decoder=True), "pad_token_id", None)
        starts = [0] if padding is None else [0, padding + 1]
        return next(filter(self.agrees_with_first_position, starts), 0) if self.accepts("position_ids") else 0

    def agrees_with_first_position(self, first: int) -> bool:
        """Return True if position_ids that begin with this number change the logits only by rounding."""
        positions = torch.arange(len(self._probe)) + first
        moved = self.forward(self._probe.unsqueeze(0), position_ids=positions.unsqueeze(0))[0]
        return float((moved - self.reference_logits(self._probe)).abs().nan_to_num(0.0).max()) <= self.tolerance

    def _tokens(self, ids: Tensor, embedded: bool) -> dict[str, Tensor]:
        ids = ids.to(self.device)
        return {"inputs_embeds": self.model.get_input_embeddings()(ids)} if embedded else {"input_ids": ids}

    def _logits(self, output: Any, ids: Tensor) -> Tensor:
        logits = output.logits if hasattr(output, "logits") else output[0]
        if logits.shape[:-1] != ids.shape:
            raise WrongShapeError(f"logits of {tuple(logits.shape)} for tokens of {tuple(ids.shape)}")
        return logits.detach().to("cpu", torch.float64)

    def _noise(self, tokens: Tensor) -> float:
        """Return how far rounding moves a logit, by perturbing the outputs of all modules by one unit of rounding.

        Each output element of a module without children is changed by a random fraction of eps times the largest
        element of that output, about the rounding error of an inner product of such numbers. The result is the largest
        change of a logit in four draws. A float64 model is treated as float32, in which its norms and rotary angles
        are often computed.
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
            changes = [(self.forward(tokens.unsqueeze(0))[0] - self.reference_logits(tokens)).abs() for _ in range(4)]
        return float(torch.stack(changes).nan_to_num(0.0, 0.0, 0.0).max())


def _spread(logits: Tensor) -> float:
    """Return the standard deviation over the vocabulary, without tokens of infinite logits; the mean over positions."""
    spread = float(logits[:, logits.isinf().logical_not().all(0)].std(dim=-1).mean())
    if not spread > 0:
        raise ValueError(f"model must return finite logits that differ, got a spread of {spread} for random tokens")
    return spread


@contextmanager
def _hooks(modules: Iterable[nn.Module], hook: Callable) -> Iterator[None]:
    """Register a forward hook on each of the modules within this context."""
    handles = [module.register_forward_hook(hook) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Set the model to evaluation mode and silence logging; afterwards restore it and the random number generators."""
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
        for now, before in attributes:  # also drops the static cache that generate leaves on the model
            now.clear()
            now.update(before)
