"""The next token in one call: the bits of the general way, taken where it can be and nowhere else."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing  # how tensors are pickled for another process
from torch import Tensor, nn
from torch.nn.modules import module as nn_module
from torch.nn.utils import parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor
from transformers import DynamicCache, StaticCache
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from kvshift.layers import KVShift
from kvshift.models import decoder
from kvshift.models.llama import ensure_shift_cache
from kvshift.models.next_token import Token
from kvshift.models.versions import CACHE
from kvshift.ops import dispatch
from kvshift.ops.cpu import kernel as cpu_kernel
from kvshift.ops.cpu.kernel import cpu_unsupported_reason
from kvshift.ops.cpu.next_token import sums_like_torch

from .llama.tiny import left_padded, random_tokens, tiny_model
from .registry import MODELS, RETROFITTED

ALL = MODELS | RETROFITTED
TAKE_IT = {
    "Llama",
    "Llama, values alone",
    "Llama, no shift",
    "Llama, no shift, sliding window",
    "Baichuan-M1",
    "Baichuan-M1, two windows",
    "Llama, retrofitted",
    "Mistral, retrofitted",
    "Qwen2, retrofitted",
    "Qwen2, sliding window, retrofitted",
    "Qwen3, retrofitted",
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PROMPT, LENGTH = 4, 12


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    refusal = cpu_unsupported_reason(torch.empty(0), 2)
    if refusal is not None:
        pytest.skip(refusal)


@pytest.fixture
def taken(monkeypatch) -> list[bool]:
    """For every layer of every token that the decoder leaves to one call: whether it was one."""
    calls = []

    def record(self: Token, *args: Any, real: Callable = Token.shift_and_cache) -> Any:
        done = real(self, *args)
        calls.append(done is not None)
        return done

    monkeypatch.setattr(Token, "shift_and_cache", record)
    return calls


@pytest.fixture
def general(monkeypatch) -> Callable[..., Any]:
    """A function that calls another one while every layer takes the general way."""

    def call(function: Callable[[], Any]) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(decoder, "prepare_next_token", lambda *_: {})
            return function()

    return call


def cache_of(model: Any, kind: str) -> Any:
    if kind == "dynamic":
        cache = DynamicCache(config=model.config)
    else:
        cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    ensure_shift_cache(cache, model.config)
    return cache


@torch.no_grad()
def feed(model: Any, cache: Any, ids: Tensor, start: int, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Feed the tokens from `start` on one by one, and return their logits."""
    logits = []
    for at in range(start, ids.shape[1]):
        padding = {} if mask is None else {"attention_mask": mask[:, : at + 1]}
        logits.append(model(ids[:, at : at + 1], **{CACHE: cache}, **padding, **options).logits)
    return torch.cat(logits, 1)


def contents(cache: Any) -> list[Tensor]:
    """Return all that a cache holds."""
    found = []
    for layer in cache.layers:
        state = layer.shift_state
        found += [layer.keys, layer.values] + ([] if state is None else [state.k, state.v])
        found += [layer.cumulative_length] if isinstance(getattr(layer, "cumulative_length", None), Tensor) else []
    return [x.clone() for x in found]


def decoded(model: Any, kind: str, ids: Tensor, mask: Tensor | None = None, **options: Any) -> list[Tensor]:
    """Return the logits of a prompt and of the tokens after it, and the cache's contents."""
    cache = cache_of(model, kind)
    padding = {} if mask is None else {"attention_mask": mask[:, :PROMPT]}
    with torch.no_grad():
        prompt = model(ids[:, :PROMPT], **{CACHE: cache}, **padding).logits
    return [prompt, feed(model, cache, ids, PROMPT, mask, **options), *contents(cache)]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x, y)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ALL)
def test_every_family_has_the_same_bits(name: str, kind: str, taken, general):
    for dtype in DTYPES:
        model, ids = ALL[name](dtype), random_tokens(2, LENGTH)
        taken.clear()
        found = decoded(model, kind, ids)
        assert bool(taken and all(taken)) is (name in TAKE_IT), taken
        assert_same_bits(found, general(lambda: decoded(model, kind, ids)))  # noqa: B023


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("options", [{}, {"qk_norm": True}, {"sliding_window": 3}], ids=str)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_padded_rows_have_the_same_bits(kind: str, options: dict, attention: str, taken, general):
    for dtype in DTYPES:
        model = tiny_model(dtype, attention=attention, **options)
        ids, mask = left_padded([random_tokens(LENGTH), random_tokens(LENGTH - 2, seed=1)])
        taken.clear()
        found = decoded(model, kind, ids, mask)
        assert taken
        assert all(taken)
        assert_same_bits(found, general(lambda: decoded(model, kind, ids, mask)))  # noqa: B023


def test_sizes_whose_sums_differ_take_the_general_way(taken, general):
    assert not sums_like_torch(6)
    model, ids = tiny_model(head_dim=6, qk_norm=True), random_tokens(1, LENGTH)
    assert_same_bits(decoded(model, "dynamic", ids), general(lambda: decoded(model, "dynamic", ids)))
    assert taken
    assert not any(taken)


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Subclass(torch.Tensor):
    pass


def shifts(model: Any) -> list[Any]:
    return [layer.self_attn.shift for layer in model.model.layers]


def doubled_output(model: Any) -> None:
    for shift in shifts(model):
        shift.register_forward_hook(lambda module, args, output: (2 * output[0], *output[1:]))


def doubled_input(model: Any) -> None:
    for shift in shifts(model):
        shift.register_forward_pre_hook(lambda module, args: (2 * args[0], *args[1:]))


def replaced_forward(model: Any) -> None:
    for shift in shifts(model):
        shift.forward = lambda q, *args, real=shift.forward, **options: real(2 * q, *args, **options)


def parametrized(model: Any) -> None:
    for shift in shifts(model):
        parametrize.register_parametrization(shift, "alpha", Doubled())


def pruned(model: Any) -> None:
    for shift in shifts(model):
        prune.custom_from_mask(shift, "beta", torch.tensor([[1, 0]] * 3))


def in_bfloat16(model: Any) -> None:
    for shift in shifts(model):
        shift.alpha.data = shift.alpha.data.bfloat16()


def as_subclass(model: Any) -> None:
    for shift in shifts(model):
        shift.alpha.data = shift.alpha.data * 1
        shift._parameters["alpha"] = nn.Parameter(shift.alpha.data.as_subclass(Subclass), requires_grad=False)


def hooked_norms(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_norm.register_forward_hook(lambda module, args, output: 2 * output)


def other_norms(model: Any) -> None:
    for layer in model.model.layers:
        norm = nn.RMSNorm(10, 1e-5)
        norm.weight.data.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(1))
        layer.self_attn.q_norm = norm


def two_epsilons(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_norm.variance_epsilon = 0.1


def norms_replaced(model: Any) -> None:
    for layer in model.model.layers:
        norm = layer.self_attn.q_norm
        norm.forward = lambda x, real=norm.forward: 2 * real(x)


def projection_as_subclass(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, output: output.as_subclass(Subclass))


def projection_negated(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: torch._neg_view(output))


GENERAL: dict[str, tuple[Callable[[Any], None], dict[str, Any]]] = {
    "a hook on the output": (doubled_output, {}),
    "a hook on the input": (doubled_input, {}),
    "a replaced forward": (replaced_forward, {}),
    "parametrized coefficients": (parametrized, {}),
    "pruned coefficients": (pruned, {}),
    "coefficients in bfloat16": (in_bfloat16, {}),
    "coefficients of a subclass": (as_subclass, {}),
    "projections of a subclass": (projection_as_subclass, {}),
    "lazy projections": (projection_negated, {}),
    "hooks on a norm": (hooked_norms, {"qk_norm": True}),
    "another norm": (other_norms, {"qk_norm": True}),
    "two epsilons": (two_epsilons, {"qk_norm": True}),
    "a norm's replaced forward": (norms_replaced, {"qk_norm": True}),
    "float64": (lambda model: None, {"dtype": torch.float64}),
    "gate": (lambda model: None, {"shift_constraint": "gate"}),
    "clamp": (lambda model: None, {"shift_constraint": "clamp"}),
    "window of 3": (lambda model: None, {"shift_window": 3}),
    "queries too": (lambda model: None, {"shift_targets": ["q", "k", "v"]}),
}


@pytest.mark.filterwarnings("ignore:the coefficients of a KV shift are torch.bfloat16")
@pytest.mark.parametrize("before", [True, False], ids=["from the first token", "after some tokens"])
@pytest.mark.parametrize("name", GENERAL)
def test_what_takes_the_general_way(name: str, before: bool, taken, general):
    """A change is noticed at the next token, whatever was prepared before it."""
    change, options = GENERAL[name]
    ids = random_tokens(2, LENGTH)

    def results() -> list[Tensor]:
        model = tiny_model(**options)
        cache = cache_of(model, "dynamic")
        if before:
            change(model)
        found = [model(ids[:, :PROMPT], **{CACHE: cache}).logits, feed(model, cache, ids[:, :-4], PROMPT)]
        taken.clear()
        if not before:
            change(model)
        return [*found, feed(model, cache, ids, LENGTH - 4), *contents(cache)]

    with torch.no_grad():
        found = results()
        assert not any(taken)
        assert_same_bits(found, general(results))


def test_passes_that_are_not_the_next_token(taken, general, monkeypatch):
    model, ids = tiny_model(), random_tokens(2, LENGTH)
    decoded(model, "dynamic", ids)
    assert taken
    taken.clear()
    with torch.no_grad():
        model(ids, use_cache=False)
        model(ids[:, :1], use_cache=False)
        cache = cache_of(model, "dynamic")
        model(ids[:, :1], **{CACHE: cache})  # the first token has no state
        assert not any(taken)
        taken.clear()
        model(ids[:, 1:3], **{CACHE: cache})
        with torch.enable_grad():
            model(ids[:, 3:4], **{CACHE: cache})
        assert not any(taken)
        taken.clear()
        cache.update = lambda *args, real=cache.update, **options: real(*args, **options)
        model(ids[:, 5:6], **{CACHE: cache})
        del cache.update
        handle = nn_module.register_module_forward_hook(lambda *_: None)
        model(ids[:, 6:7], **{CACHE: cache})
        handle.remove()
        monkeypatch.setattr(dispatch, "_AUTO", "eager")
        model(ids[:, 7:8], **{CACHE: cache})
        monkeypatch.setattr(dispatch, "_AUTO", "auto")
        cache.activate_past_recording()
        model(ids[:, 8:9], **{CACHE: cache})
    assert not any(taken)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype, taken, general):
    """Projections are in bfloat16; the tables have the dtype of the model."""
    model, ids = tiny_model(dtype), random_tokens(2, LENGTH)
    with torch.autocast("cpu", torch.bfloat16):
        found = decoded(model, "dynamic", ids)
        assert_same_bits(found, general(lambda: decoded(model, "dynamic", ids)))
    assert taken
    assert all(taken) is any(taken) is (dtype == torch.bfloat16)


def test_hooks_of_one_layer_leave_the_others_alone(taken, general):
    model, ids = tiny_model(), random_tokens(1, LENGTH)
    shifts(model)[1].register_forward_hook(lambda module, args, output: (2 * output[0], *output[1:]))
    found = decoded(model, "dynamic", ids)
    assert taken == [True, False] * (LENGTH - PROMPT)
    assert_same_bits(found, general(lambda: decoded(model, "dynamic", ids)))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda shift: shift.alpha.copy_(shift.alpha * 3),
    "by .data": lambda shift: shift.alpha.data.copy_(shift.alpha * 3),
    "to zero": lambda shift: shift.alpha[0].zero_(),
    "another parameter": lambda shift: setattr(shift, "alpha", nn.Parameter(shift.alpha * 3)),
    "new memory": lambda shift: setattr(shift.alpha, "data", shift.alpha.data * 3),
    "loaded": lambda shift: shift.load_state_dict({"alpha": shift.alpha * 3, "beta": shift.beta * 1}, assign=True),
}


@pytest.mark.parametrize("inference", [False, True], ids=["", "inference mode"])
@pytest.mark.parametrize("change", CHANGES)
def test_coefficients_are_taken_as_they_are_now(change: str, inference: bool, taken, general):
    ids = random_tokens(1, LENGTH)

    def results() -> list[Tensor]:
        with torch.inference_mode(inference), torch.no_grad():
            model = tiny_model()
            cache = cache_of(model, "dynamic")
            found = [model(ids[:, :PROMPT], **{CACHE: cache}).logits, feed(model, cache, ids[:, :-4], PROMPT)]
            for shift in shifts(model):
                CHANGES[change](shift)
            return [*found, feed(model, cache, ids, LENGTH - 4), *contents(cache)]

    found = results()
    assert all(taken)
    assert_same_bits(found, general(results))


# The cache ------------------------------------------------------------------------------------------------------------

OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(2),
    "reset": lambda cache: cache.reset(),
    "crop nothing": lambda cache: cache.crop(0),
}


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_between_tokens(operation: str, kind: str, taken, general):
    if kind == "static" and operation not in ("reorder", "reset"):
        pytest.skip("a static cache refuses it")
    model, ids = tiny_model(), random_tokens(3, 7)

    def results() -> list[Tensor]:
        cache = cache_of(model, kind)
        found = [feed(model, cache, ids, 0)]
        OPERATIONS[operation](cache)
        rows = {"select": 2, "repeat": 6}.get(operation, 3)
        found.append(feed(model, cache, random_tokens(rows, 4, seed=1), 0))
        OPERATIONS[operation](cache)
        return [*found, *contents(cache)] if operation != "reset" else found

    found = results()
    assert any(taken)
    assert_same_bits(found, general(results))


COPIES: dict[str, Callable[[Any], Any]] = {
    "deep": copy.deepcopy,
    "pickled": lambda cache: pickle.loads(pickle.dumps(cache)),  # noqa: S301
}


def shallow(cache: Any) -> Any:
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


@pytest.mark.parametrize("copied", [*COPIES.values(), shallow], ids=[*COPIES, "shallow"])
def test_copies_of_a_cache_continue_independently(copied: Callable[[Any], Any], taken, general):
    model, ids = tiny_model(), random_tokens(2, 8)
    tails = [random_tokens(2, 3, seed=seed) for seed in (1, 2)]
    cache = cache_of(model, "dynamic")
    feed(model, cache, ids, 0)
    branch = copied(cache)
    found = []
    for at in range(3):  # by turns
        found += [feed(model, one, tail[:, at : at + 1], 0) for one, tail in zip((cache, branch), tails, strict=True)]
    assert all(taken[2:])
    expected = []
    for tail in tails:

        def alone(tail: Tensor = tail) -> Tensor:
            other = cache_of(model, "dynamic")
            feed(model, other, ids, 0)
            return feed(model, other, tail, 0)

        expected.append(general(alone))
    assert torch.equal(torch.cat(found[::2], 1), expected[0])
    assert torch.equal(torch.cat(found[1::2], 1), expected[1])


def test_keys_that_somebody_holds_do_not_change(taken):
    model, ids = tiny_model(), random_tokens(1, 9)
    cache = cache_of(model, "dynamic")
    feed(model, cache, ids, 0)
    held = [layer.keys for layer in cache.layers]
    before = [x.clone() for x in held]
    feed(model, cache, random_tokens(1, 3, seed=1), 0)
    for layer in cache.layers:  # as `crop` does
        layer.keys, layer.values = layer.keys[:, :, :-1], layer.values[:, :, :-1]
    later = cache.layers[0].keys
    kept = later.clone()
    feed(model, cache, random_tokens(1, 1, seed=2), 0)
    assert all(taken[2:])
    assert_same_bits([*held, later], [*before, kept])


def test_projections_that_somebody_holds_do_not_change():
    """The state after a chunk may share memory with projections; it is copied before it is overwritten."""
    model, ids, held = tiny_model(), random_tokens(1, 9), []
    for layer in model.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda module, args, output: held.append((output, output.clone())))
    cache = cache_of(model, "dynamic")
    feed(model, cache, ids, 0)
    cache.activate_past_recording()
    feed(model, cache, ids, 8)
    cache.crop(0)
    feed(model, cache, ids, 6)
    for output, before in held:
        assert torch.equal(output, before)


def test_a_growing_cache_takes_at_most_an_eighth_more(taken):
    model = tiny_model(num_hidden_layers=1)
    cache = cache_of(model, "dynamic")
    with torch.no_grad():
        model(random_tokens(1, 700), **{CACHE: cache})
    storages, layer = [], cache.layers[0]
    for token in random_tokens(1, 200).split(1, 1):
        feed(model, cache, token, 0)
        used, whole = layer.keys.nbytes, layer.keys.untyped_storage().nbytes()
        assert used <= whole <= max(used * 9 / 8, used + 64 * layer.keys[:, :, :1].nbytes)
        storages.append(layer.keys.untyped_storage().data_ptr())
    assert all(taken)
    assert sum(x != y for x, y in itertools.pairwise(storages)) == 2  # after 700 + 87 and 788 + 98


def test_a_full_static_cache_is_named_and_left_alone(taken):
    model, ids = tiny_model(), random_tokens(2, LENGTH)
    cache = cache_of(model, "static")
    feed(model, cache, ids, 0)
    before = contents(cache)
    with pytest.raises(IndexError, match=f"the cache is full: it has room for {LENGTH} tokens"):
        feed(model, cache, ids, LENGTH - 1)
    assert_same_bits(contents(cache), before)


def test_a_static_cache_counts_tokens_of_both_ways(taken, general):
    """The kernel reads and increments the tensor that compiled calls and the general way use."""
    model, ids = tiny_model(), random_tokens(2, LENGTH)

    def by_turns(way: Callable[[Callable[[], Any]], Any]) -> list[Tensor]:
        cache = cache_of(model, "static")
        found = [
            (way if at % 2 else general)(lambda at=at: feed(model, cache, ids[:, : at + 1], at)) for at in range(LENGTH)
        ]
        assert [layer.tokens_fed for layer in cache.layers] == [LENGTH] * 2
        return [*found, *contents(cache)]

    found = by_turns(lambda function: function())
    assert all(taken)
    assert len(taken) == LENGTH
    assert_same_bits(found, by_turns(general))


def test_a_cache_in_another_dtype_takes_the_general_way(taken):
    model, ids = tiny_model(), random_tokens(1, 6)
    cache = cache_of(model, "dynamic")
    feed(model, cache, ids, 0)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys.double(), layer.values.double()
    taken.clear()
    with pytest.raises(RuntimeError):  # from attention, as without one call
        feed(model, cache, ids, 5)
    assert taken == [False]


# Around it ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}], ids=str)
@pytest.mark.parametrize("kind", [None, "static"])
def test_generate_gives_the_same_tokens(kind: str | None, options: dict, taken, general):
    if kind == "static" and "prompt_lookup_num_tokens" in options:
        pytest.skip("a static cache cannot take tokens back")
    model = tiny_model()
    ids, mask = left_padded(
        [random_tokens(7), random_tokens(5, seed=1)][: 1 if "prompt_lookup_num_tokens" in options else 2]
    )

    def tokens() -> Tensor:
        inputs = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "disable_compile": True}
        return model.generate(ids, **inputs, cache_implementation=kind, **options)

    found = tokens()
    assert any(taken) is ("prompt_lookup_num_tokens" not in options)
    assert torch.equal(found, general(tokens))


def test_without_the_kernel_the_general_way_is_taken(taken, monkeypatch, tmp_path):
    model, ids = tiny_model(), random_tokens(1, LENGTH)
    found = decoded(model, "static", ids)
    assert taken
    taken.clear()
    monkeypatch.setattr(cpu_kernel, "__file__", str(tmp_path / "kernel.py"))
    cpu_kernel._kernels.cache_clear()
    try:
        expected = decoded(model, "static", ids)
    finally:
        monkeypatch.undo()
        cpu_kernel._kernels.cache_clear()
    assert not taken
    assert_same_bits(found, expected)


def test_layers_that_are_compiled_alone(taken):
    torch._dynamo.reset()
    model, ids = tiny_model(), random_tokens(1, LENGTH)
    expected = decoded(model, "dynamic", ids)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    for x, y in zip(decoded(model, "dynamic", ids), expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:DeprecationWarning")
def test_tracers_do_not_take_it(taken):
    model, ids = tiny_model().requires_grad_(False), random_tokens(1, 6)
    cache = cache_of(model, "dynamic")
    feed(model, cache, ids, 0)
    taken.clear()
    with torch.no_grad():
        torch.jit.trace(lambda x: model(x, **{CACHE: copy.deepcopy(cache)}).logits, ids[:, :1], check_trace=False)
    assert not any(taken)


def test_embeddings_of_a_subclass(taken):
    model, ids = tiny_model(), random_tokens(1, 6)
    cache = cache_of(model, "dynamic")
    feed(model, cache, ids, 0)
    taken.clear()
    x = model.model.embed_tokens(ids[:, :1]).detach()
    with torch.no_grad():
        model(inputs_embeds=TwoTensor(x, x), **{CACHE: cache})
    assert not any(taken)


@pytest.fixture(autouse=True)
def nothing_else_is_left() -> Iterator[None]:
    yield
    assert not nn_module._global_forward_hooks


# What changes between two tokens --------------------------------------------------------------------------------------


def shared(x: Any) -> None:
    """Move tensors to shared memory, as sending them to another process does."""
    ForkingPickler(io.BytesIO(), 2).dump(x)


MOVES: dict[str, Callable[[Any], object]] = {
    "cache": shared,
    "keys": lambda cache: [layer.keys.share_memory_() for layer in cache.layers],
    "states": lambda cache: shared([layer._shift_state for layer in cache.layers]),
    "keys through data": lambda cache: [setattr(layer.keys, "data", layer.keys.clone()) for layer in cache.layers],
}


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("move", MOVES)
def test_memory_that_moves_is_noticed(move: str, kind: str, taken, general):
    """Otherwise, the kernel writes to memory that was freed."""
    model, ids = tiny_model(qk_norm=True), random_tokens(2, LENGTH)

    def moved() -> list[Tensor]:
        cache = cache_of(model, kind)
        before = feed(model, cache, ids[:, : PROMPT + 3], 0)
        MOVES[move](cache)
        return [before, feed(model, cache, ids, PROMPT + 3), *contents(cache)]

    found = moved()
    assert taken[-1]
    assert_same_bits(found, general(moved))


def test_a_state_that_was_read_keeps_its_numbers(taken, general):
    """A caller may keep keys, values and state, try a token, and put them back."""
    model, ids = tiny_model(), random_tokens(2, LENGTH)

    def with_a_rejected_token() -> list[Tensor]:
        cache = cache_of(model, "dynamic")
        feed(model, cache, ids[:, :6], 0)
        kept = [(layer.keys, layer.values, layer.shift_state) for layer in cache.layers]
        feed(model, cache, ids[:, :8].flip(1), 6)
        for layer, parts in zip(cache.layers, kept, strict=True):
            layer.keys, layer.values, layer.shift_state = parts
        return [feed(model, cache, ids, 6), *contents(cache)]

    found = with_a_rejected_token()
    assert taken[-1]
    assert_same_bits(found, general(with_a_rejected_token))


def test_two_caches_may_continue_one_state(general):
    model, ids = tiny_model(), random_tokens(2, LENGTH)

    def forked() -> list[Tensor]:
        first, second = cache_of(model, "dynamic"), cache_of(model, "dynamic")
        for cache in (first, second):
            feed(model, cache, ids[:, :6], 0)
        for layer, other in zip(first.layers, second.layers, strict=True):
            other.write_shift(layer.shift_state)
        return [feed(model, first, ids.flip(1), 6), feed(model, second, ids, 6), *contents(first), *contents(second)]

    assert_same_bits(forked(), general(forked))


def hide_a_key(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    mask = kwargs["attention_mask"].clone()
    assert mask.dtype == torch.bool
    mask[..., 3] = False
    return args, {**kwargs, "attention_mask": mask}


def hide_a_key_in_place(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    kwargs["attention_mask"][..., 3] = False


def no_rotation(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    cos, sin = kwargs["position_embeddings"]
    return args, {**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))}


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("hook", [hide_a_key, hide_a_key_in_place, no_rotation])
def test_a_hook_on_attention_changes_its_masks_and_tables(hook: Any, kind: str, taken, general):
    model = tiny_model(attn_implementation="sdpa")
    ids = random_tokens(2, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    model.model.layers[-1].self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    found = decoded(model, kind, ids, mask)
    assert any(taken)
    assert_same_bits(found, general(lambda: decoded(model, kind, ids, mask)))


def instance_project(model: Any, _cache: Any, _patch: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.project = lambda x, real=attention.project: tuple(2 * heads for heads in real(x))


def instance_update(_model: Any, cache: Any, _patch: Any) -> None:
    layer = cache.layers[0]
    layer.update = lambda k, v, *args, real=layer.update, **options: real(2 * k, v, *args, **options)


def class_shift(_model: Any, _cache: Any, patch: Any) -> None:
    real = KVShift.forward
    patch.setattr(KVShift, "forward", lambda self, q, k, v, **options: real(self, q, 2 * k, v, **options))


def class_norm(_model: Any, _cache: Any, patch: Any) -> None:
    real = LlamaRMSNorm.forward
    patch.setattr(LlamaRMSNorm, "forward", lambda self, x: 2 * real(self, x))


def transposed_coefficients(model: Any, _cache: Any, _patch: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.shift.alpha.data = layer.self_attn.shift.alpha.data.t()


@pytest.mark.parametrize(
    "change", [instance_project, instance_update, class_shift, class_norm, transposed_coefficients]
)
def test_what_is_replaced_between_two_tokens_is_noticed(change: Any, general, monkeypatch):
    ids = random_tokens(2, LENGTH)

    def changed() -> list[Tensor]:
        model = tiny_model(qk_norm=True, num_key_value_heads=2)
        cache = cache_of(model, "dynamic")
        before = feed(model, cache, ids[:, :6], 0)
        with monkeypatch.context() as patch:
            change(model, cache, patch)
            return [before, feed(model, cache, ids, 6), *contents(cache)]

    assert_same_bits(changed(), general(changed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_order_of_sums_is_probed_whatever_the_default_dtype(dtype):
    """The kernel reads and writes the probe's memory as float32."""
    expected = sums_like_torch(64)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        assert sums_like_torch.__wrapped__(64) == expected
    finally:
        torch.set_default_dtype(before)
