"""What holds for every variant: paired start values, sizes, saving, documents and padding, caches, and bfloat16."""

from __future__ import annotations

import pydoc
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from kvshift_lab.core.errors import LabError
from kvshift_lab.variants.bidirectional import EncoderOptions
from kvshift_lab.variants.building import build_model, describe
from kvshift_lab.variants.by_name import VARIANTS, find_variant, with_variant
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.small_gpt2 import GPT2Options
from kvshift_lab.variants.uncached import decodes_with_cache

SIZES = {
    "llama": ModelConfig(hidden_size=24, num_attention_heads=6, num_key_value_heads=3, qk_norm=True),
    "gpt2": GPT2Options(width=24, heads=3, head="linear", dropout=0.0, embedding_rows=None),
    "encoder": EncoderOptions(width=24, heads=3),
}
TOKENS = 31
LENGTHS = (5, 1, 7, 2)

# Variants that have no form for the small GPT-2, and are refused there by name.
LLAMA_ALONE = {"differential-wide", "differential-kv-shift", "mla", "mla-kv-shift"}
# The weights of vanilla that a variant replaces.
REPLACED = dict.fromkeys(("differential", "differential-kv-shift"), ("q_norm", "k_norm"))
REPLACED |= dict.fromkeys(("mla", "mla-kv-shift"), ("k_proj", "v_proj", "q_norm", "k_norm"))
# This variant needs another size, as it halves the number of KV heads.
EVEN = {("differential-wide", "llama"): replace(SIZES["llama"], num_key_value_heads=2)}
# Variants that magnify the rounding of attention in these small random models: by a norm over the difference of two
# values that may be nearly equal, a sum over scores, or scores without QK-norm. Their own test files test their parts
# in bfloat16.
ILL_CONDITIONED = {"differential", "differential-wide", "differential-kv-shift", "selective", "selective-key"}
ILL_CONDITIONED |= {"mla", "mla-kv-shift"}
PAIRS = [(name, "llama") for name in VARIANTS] + [(name, "gpt2") for name in VARIANTS if name not in LLAMA_ALONE]
PAIRS += [("vanilla", "encoder"), ("kv-shift", "encoder")]

every_variant = pytest.mark.parametrize("name", VARIANTS)
every_pair = pytest.mark.parametrize(("name", "family"), PAIRS)


def built(name: str, family: str, seed: int = 5, *, beside: str = "") -> Any:
    return build(with_variant(EVEN.get((beside or name, family), SIZES[family]), name), seed)


def build(options: Any, seed: int) -> Any:
    return build_model(describe(options, vocab_size=TOKENS, length=41), seed=seed, variant=options.variant)


@every_pair
def test_an_unknown_argument_is_refused_by_name(name: str, family: str):
    model, ids = shaken(name, family), torch.arange(5).unsqueeze(0)
    with pytest.raises(TypeError, match=r"unknown argument foo: nothing in \w+ takes it"):
        model(input_ids=ids, foo=1)
    model(input_ids=ids, foo=None)


@every_variant
def test_zero_outputs_leaves_all_other_start_values(name: str):
    """All paths into the residual stream of a Llama are zero at the start, whatever its attention is."""
    options = with_variant(EVEN.get((name, "llama"), SIZES["llama"]), name)
    size = describe(options, vocab_size=TOKENS, length=41)
    plain, zeroed = (
        dict(build_model(size, seed=5, variant=options.variant, zero_outputs=zero).named_parameters())
        for zero in (False, True)
    )
    closed = {key for key, weight in zeroed.items() if not torch.equal(weight, plain[key])}
    layers = range(size.num_hidden_layers)
    ways = ("self_attn.o_proj", "mlp.down_proj")
    assert closed == {f"model.layers.{layer}.{way}.weight" for layer in layers for way in ways}
    assert not any(zeroed[key].any() for key in closed)


def is_replaced(name: str, key: str) -> bool:
    return any(f".{part}." in key for part in REPLACED.get(name, ()))


def shaken(name: str, family: str, *, beside: str = "") -> Any:
    """Return a model whose weights are so large that every part matters; some variants start equal to vanilla."""
    return deepcopy(_shaken(with_variant(EVEN.get((beside or name, family), SIZES[family]), name)))


@cache
def _shaken(options: Any) -> Any:
    model = build(options, seed=5).eval()
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=chance) * 0.4)
    return model


def documents() -> list[Tensor]:
    chance = torch.Generator().manual_seed(1)
    return [torch.randint(TOKENS, (length,), generator=chance) for length in LENGTHS]


def padded(texts: list[Tensor], side: str, token: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    """Return `input_ids`, `attention_mask` and `position_ids` of documents in one batch."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(texts, batch_first=True, padding_value=token, padding_side=side)
    mask = pad([torch.ones_like(text) for text in texts], batch_first=True, padding_side=side)
    return ids, mask, (mask.cumsum(1) - 1).clamp(min=0)


def alone(model: Any, ids: Tensor) -> Tensor:
    return model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]


class Holder(PreTrainedModel):
    """A user's model that contains another model."""

    _supports_sdpa = True

    def __init__(self, model: Any) -> None:
        super().__init__(model.config)
        self.model = model
        self.post_init()


@every_pair
def test_nothing_is_drawn_anew_in_a_model_that_takes_it_in(name: str, family: str) -> None:
    model = shaken(name, family)
    before = deepcopy(model.state_dict())
    Holder(model)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@every_pair
def test_twins_start_with_the_same_bits(name: str, family: str) -> None:
    ours, vanilla = (built(each, family, beside=name).state_dict() for each in (name, "vanilla"))
    shared = [key for key in vanilla if not is_replaced(name, key)]
    for key in shared:
        assert torch.equal(ours[key], vanilla[key]), key
    again, other = (built(name, family, seed).state_dict() for seed in (5, 6))
    assert all(torch.equal(ours[key], again[key]) for key in ours)
    assert any(not torch.equal(ours[key], other[key]) for key in shared)


@every_pair
def test_it_says_how_many_parameters_it_adds(name: str, family: str) -> None:
    count = [sum(p.numel() for p in shaken(each, family, beside=name).parameters()) for each in (name, "vanilla")]
    options = with_variant(EVEN.get((name, family), SIZES[family]), name)
    size, before = describe(options, vocab_size=TOKENS, length=41), torch.get_rng_state()
    assert find_variant(name).added_parameters(size) == count[0] - count[1]
    assert torch.equal(torch.get_rng_state(), before)


@every_pair
def test_only_vanilla_computes_what_vanilla_does(name: str, family: str) -> None:
    ids = torch.cat(documents())
    theirs = shaken("vanilla", family, beside=name)
    ours = shaken(name, family)
    shared = {key: ours.state_dict()[key] for key in theirs.state_dict() if not is_replaced(name, key)}
    assert all(is_replaced(name, key) for key in theirs.load_state_dict(shared, strict=False).missing_keys)
    assert torch.equal(alone(ours, ids), alone(theirs, ids)) == (name == "vanilla")


@every_pair
def test_the_lab_and_transformers_load_what_is_saved(name: str, family: str, tmp_path: Path) -> None:
    """A saved variant is loaded as its own class, and LlamaForCausalLM refuses it."""
    model, ids = shaken(name, family), torch.cat(documents())
    model.save_pretrained(tmp_path)
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(loaded) is type(model)
    assert pydoc.locate(model.config.loaded_by) is not None  # the message below names this class
    assert not any(report.values())
    assert torch.equal(alone(loaded, ids), alone(model, ids))
    if name != "vanilla":
        with pytest.raises(Exception, match=r"kv_shift: load it with kvshift(_lab)?\.[a-z0-9_.]+\.\w+"):
            LlamaForCausalLM.from_pretrained(tmp_path)


@every_pair
def test_documents_are_each_as_alone(name: str, family: str) -> None:
    """They may be in one row, padded on either side, or separated by a mask of pairs, which some variants refuse."""
    model, texts = shaken(name, family).double(), documents()
    expected = [alone(model, text) for text in texts]

    row = torch.cat(texts).unsqueeze(0)
    positions = torch.cat([torch.arange(len(text)) for text in texts]).unsqueeze(0)
    numbers = torch.cat([torch.full((len(text),), n) for n, text in enumerate(texts)]).unsqueeze(0)
    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    for where in ({"position_ids": positions}, {"seq_idx": numbers}, {"cu_seq_lens_q": ends}):
        packed = model(input_ids=row, use_cache=False, **where).logits[0]
        for logits, got in zip(expected, packed.split(LENGTHS), strict=True):
            torch.testing.assert_close(got, logits, rtol=0, atol=1e-10)

    for side in ("left", "right"):
        ids, mask, places = padded(texts, side)
        together = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits
        for logits, real, got in zip(expected, mask.bool(), together, strict=True):
            torch.testing.assert_close(got[real], logits, rtol=0, atol=1e-10, msg=lambda m, s=side: f"{s}: {m}")

    pairs = (numbers[0, :, None] == numbers[0]).tril()[None, None]
    given = {"attention_mask": pairs, "position_ids": positions, "use_cache": False}
    if name in ("selective", "selective-key", "smear") or family == "encoder":
        said = r"attention_mask must be \(batch, positions\) or None for .*, got \(1, 1, 15"
        with pytest.raises(ValueError, match=said):
            model(input_ids=row, **given)
        return
    for logits, got in zip(expected, model(input_ids=row, **given).logits[0].split(LENGTHS), strict=True):
        torch.testing.assert_close(got, logits, rtol=1e-5, atol=1e-5)


@every_variant
def test_it_generates_with_a_cache_or_refuses_one(name: str) -> None:
    model, ids = shaken(name, "llama").double(), documents()[0].unsqueeze(0)
    expected = ids
    for _ in range(6):
        expected = torch.cat([expected, model(input_ids=expected, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **how), expected)
    assert torch.equal(model.generate(ids, use_cache=False, **how), expected)
    if decodes_with_cache(model):
        assert torch.equal(model.generate(ids, use_cache=True, **how), expected)
        return
    said = f"use_cache must be False .*{model.config.model_type} does not decode with a cache"
    with pytest.raises(ValueError, match=said):
        model.generate(ids, use_cache=True, **how)
    with pytest.raises(ValueError, match=said):
        model(input_ids=ids, use_cache=True)


@every_pair
def test_every_parameter_learns(name: str, family: str) -> None:
    model, ids = shaken(name, family).train(), torch.cat(documents()).unsqueeze(0)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert [key for key, parameter in model.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize(("name", "family"), [pair for pair in PAIRS if pair[0] not in ILL_CONDITIONED])
def test_in_bfloat16(name: str, family: str) -> None:
    """The distance to double precision with the same rounded weights is close to vanilla's."""
    assert distance_in_bfloat16(name, family) <= 1.5 * distance_in_bfloat16("vanilla", family)


@cache
def distance_in_bfloat16(name: str, family: str) -> float:
    rounded, ids = shaken(name, family).to(torch.bfloat16), torch.cat(documents())
    got = alone(rounded, ids)
    assert got.dtype == torch.bfloat16
    return (got - alone(rounded.double(), ids)).abs().max().item()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("key-offset", GPT2Options(width=24, heads=4), "multiple of 4, got 6"),
        ("differential", ModelConfig(hidden_size=24, num_attention_heads=4), "a multiple of 4 .*, got 6"),
        ("differential-wide", ModelConfig(hidden_size=24, num_attention_heads=3), "even with halve_heads, got 3"),
        ("mla", ModelConfig(hidden_size=24, num_attention_heads=4), "qk_rope_head_dim must be even, got 3"),
        ("mla-kv-shift", ModelConfig(hidden_size=24, num_attention_heads=1), "2 or more with hard_shift, got 1"),
        ("selective", ModelConfig(hidden_size=24, sliding_window=3), "sliding_window must be None .* got 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_size_that_cannot_be_is_named(name: str, options: Any, said: str) -> None:
    size = describe(with_variant(options, name), vocab_size=23, length=9)
    with pytest.raises(LabError, match=rf"model\.variant {name} cannot be built at this size: .*{said}"):
        build_model(size, seed=0, variant=name)


@pytest.mark.parametrize("name", sorted(LLAMA_ALONE))
def test_a_family_that_it_has_no_form_for_is_named(name: str) -> None:
    with pytest.raises(LabError, match=rf"model\.variant {name} does not support model_type kvshift_lab_gpt2; it"):
        built(name, "gpt2")
