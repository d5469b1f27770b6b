"""The lab's GPT-2: its outputs, start values of paired models, saving, and what it refuses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from kvshift import KVShift
from kvshift_lab.core.errors import LabError
from kvshift_lab.run.loading import load_weights
from kvshift_lab.tasks import HopConfig, HopTask
from kvshift_lab.variants.building import build_model, describe, freeze_shift
from kvshift_lab.variants.small_gpt2 import GPT2Options, LabGPT2
from tests.models.retrofit.reference import gpt2_hidden

HOP = HopTask(HopConfig(letters=11, max_hops=3))  # 10 tokens
SMALL = GPT2Options(width=12, layers=3, heads=3, embedding_rows=17)
VARIANTS: dict[str, GPT2Options] = {
    "norm": SMALL,
    "linear": replace(SMALL, head="linear"),
    "tied, no MLP": replace(SMALL, head="tied", mlp=False, heads=1, embedding_rows=None),
    "window 3, queries too": replace(SMALL, shift_targets=("q", "k", "v"), shift_window=3),
    "vanilla": replace(SMALL, shift_targets=()),
}
every_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def built(
    options: GPT2Options, seed: int = 0, *, vocab_size: int = HOP.vocab_size, length: int = HOP.length
) -> LabGPT2:
    size = describe(options, vocab_size=vocab_size, length=length)
    model = build_model(size, seed=seed)
    freeze_shift(model, options)
    return model


def batch(rows: int = 5):
    return HOP.batch(torch.Generator().manual_seed(0), rows)


@every_variant
def test_logits_against_the_formulas(options: GPT2Options):
    model, ids = built(options).eval(), batch(2).input_ids
    with torch.no_grad():
        for parameter in model.parameters():  # initial weights are so small that attention hardly matters
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.5)
    weights = {name.removeprefix("transformer."): tensor for name, tensor in model.state_dict().items()}
    heads = {
        "norm": lambda hidden: hidden,
        "linear": lambda hidden: hidden @ weights["head.weight"].T,
        "tied": lambda hidden: hidden @ weights["wte.weight"].T,
    }
    logits = model(input_ids=ids).logits
    assert logits.shape == (2, HOP.length, 12 if options.head == "norm" else HOP.vocab_size)
    for row, got in zip(ids, logits, strict=True):
        expected = heads[options.head](gpt2_hidden(weights, model.config, row.tolist()))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@every_variant
def test_the_loss_compares_each_output_with_the_label_after_it(options: GPT2Options):
    model, rows = built(options).eval(), batch()
    output = model(input_ids=rows.input_ids, labels=rows.labels)
    scored = output.logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(scored, rows.labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(output.loss, expected)
    total = model(input_ids=rows.input_ids, labels=rows.labels, num_items_in_batch=torch.tensor(7)).loss
    count = (rows.labels[:, 1:] >= 0).sum()
    torch.testing.assert_close(total, expected * count / 7)


def test_start_values_are_those_of_gpt2():
    """The standard deviation is 0.02, and 0.02 / sqrt(2 layers) for weights that add to the residual stream."""
    model = built(GPT2Options(layers=3, head="linear"), vocab_size=23, length=100)
    blocks = model.transformer.h
    spread = {
        0.02: [model.transformer.wte, model.transformer.wpe, blocks[0].attn.c_attn, blocks[2].mlp.c_fc, model.head],
        0.02 / 6**0.5: [blocks[0].attn.c_proj, blocks[2].mlp.c_proj],
    }
    for expected, modules in spread.items():
        for module in modules:
            # The standard error of a standard deviation is 1 / sqrt(2 n), and n is 2944 or more here.
            assert module.weight.std().item() == pytest.approx(expected, rel=0.06)
    for block in blocks:
        shift = block.attn.shift
        torch.testing.assert_close(shift.alpha.sum(1), torch.ones(4))
        assert ((shift.beta > 0) & (shift.beta < 1)).all()


def test_sizes_of_the_published_model():
    model = built(GPT2Options(layers=5), vocab_size=HopTask(HopConfig()).vocab_size, length=100)
    per_layer = 128 * 384 + 384 + 128 * 128 + 128 + 128 * 512 + 512 + 512 * 128 + 128 + 4 * 128
    coefficients = sum(p.numel() for m in model.modules() if isinstance(m, KVShift) for p in m.parameters())
    assert coefficients == 5 * 4 * 4
    assert model.num_parameters() == 30 * 128 + 100 * 128 + 5 * per_layer + 2 * 128 + coefficients


@every_variant
def test_a_saved_model_is_the_same_bit_for_bit(tmp_path, options: GPT2Options):
    model, rows = built(options).eval(), batch()
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*model*")] == ["model.safetensors"]
    for load in (LabGPT2, AutoModelForCausalLM):
        loaded, report = load.from_pretrained(tmp_path, output_loading_info=True)
        assert type(loaded) is LabGPT2
        assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        got, expected = (m(input_ids=rows.input_ids, labels=rows.labels) for m in (loaded, model))
        assert torch.equal(got.logits, expected.logits)
        assert torch.equal(got.loss, expected.loss)


def test_the_lab_loads_it_though_it_cannot_generate(tmp_path):
    model, ids = built(SMALL).eval(), batch().input_ids
    model.save_pretrained(tmp_path)
    assert torch.equal(load_weights(tmp_path, device="cpu")(input_ids=ids).logits, model(input_ids=ids).logits)


def test_dropout_is_active_in_training_alone():
    model, ids = built(SMALL), batch().input_ids
    assert not torch.equal(model.train()(input_ids=ids).logits, model(input_ids=ids).logits)
    assert torch.equal(model.eval()(input_ids=ids).logits, model(input_ids=ids).logits)
    still = built(replace(SMALL, dropout=0.0)).train()
    assert torch.equal(still(input_ids=ids).logits, still(input_ids=ids).logits)


def test_frozen_coefficients():
    model = built(replace(SMALL, freeze_shift=True))
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {f"transformer.h.{i}.attn.shift.{name}" for i in range(3) for name in ("alpha", "beta")}


def test_every_parameter_learns():
    for options in VARIANTS.values():
        model, rows = built(options), batch()
        model(input_ids=rows.input_ids, labels=rows.labels).loss.backward()
        silent = [name for name, parameter in model.named_parameters() if not parameter.grad.any()]
        assert silent == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"embedding_rows": 9}, r"model\.embedding_rows must be 10 or more.*got 9"),
        ({"width": 9}, r'model\.width must be 10 or more with head="norm".*got 9'),
        ({"width": 14}, r"model\.width must be a multiple of heads, 3, got 14"),
        ({"dropout": 1.0}, r"model\.dropout must be at least 0, less than 1, got 1\.0"),
        ({"layers": 0}, r"model\.layers must be 1 or more, got 0"),
        ({"head": "matrix"}, r"model\.head must be one of norm, linear, tied, got 'matrix'"),
        ({"shift_window": 1}, r"model\.shift_window must be an integer of at least 2"),
        ({"shift_constraint": "gate", "shift_init": "identity"}, r"model\.shift_init must be .uniform."),
    ],
    ids=str,
)
def test_bad_options_are_named(change: dict[str, Any], message: str):
    with pytest.raises(LabError, match=message):
        built(replace(SMALL, **change))
