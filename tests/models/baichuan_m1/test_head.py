"""The head's rows have length 1 for all code that calls it or reads its `weight`; its parameter is the raw matrix."""

from __future__ import annotations

import copy
import pickle

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from transformers import AutoModelForCausalLM

from kvshift.models.baichuan_m1 import BaichuanM1Config
from kvshift.models.baichuan_m1 import head as head_module
from kvshift.models.baichuan_m1.head import NormHead

from ..llama.checks import assert_greedy, logits_of, new_tokens_of
from ..llama.tiny import random_tokens
from .tiny import checkpoint, config_with, load, write

IDS = random_tokens(2, 9)


@pytest.fixture
def model(tmp_path):
    return load(write(tmp_path))


def rows_of(matrix):
    return matrix / (matrix.square().sum(1, keepdim=True).sqrt() + 1e-7)


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def assert_normalised(model, ids=IDS):
    """Check the logits against the formula applied to the parameter."""
    with torch.no_grad():
        close(model(ids).logits, model.model(ids).last_hidden_state @ rows_of(model.lm_head.raw).T)


def test_weight_gives_the_logits_and_their_gradients(model):
    logits = model(IDS).logits
    (of_logits,) = torch.autograd.grad(logits.sin().sum(), model.lm_head.raw)
    hidden = model.model(IDS).last_hidden_state
    read = hidden @ model.get_output_embeddings().weight.T
    close(read, logits)
    (of_read,) = torch.autograd.grad(read.sin().sum(), model.lm_head.raw)
    close(of_read, of_logits)
    assert of_logits.abs().max() > 1e-3
    with torch.no_grad():
        close(hidden @ model.lm_head.weight.T, logits)
    close(hidden @ copy.deepcopy(model).lm_head.weight.T, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_rows_are_divided_in_float32(dtype):
    head = NormHead(48, 61).to(dtype)
    assert head.weight.dtype == dtype
    wide = head.raw.float()
    assert torch.equal(head.weight, (wide / (torch.linalg.vector_norm(wide, dim=1, keepdim=True) + 1e-7)).to(dtype))


def test_the_parameter_is_the_matrix_of_the_file(model):
    raw = checkpoint()["lm_head.weight"].double()
    assert torch.equal(model.lm_head.raw, raw)
    assert torch.equal(model.state_dict()["lm_head.raw"], raw)
    assert [name for name, _ in model.lm_head.named_parameters()] == ["raw"]


def test_a_new_head_is_initialised():
    torch.manual_seed(0)
    assert NormHead(4096, 7).raw.std().item() == pytest.approx(1 / (3 * 4096) ** 0.5, rel=0.05)
    model = AutoModelForCausalLM.from_config(BaichuanM1Config(**config_with(initializer_range=0.07)))
    assert model.lm_head.raw.std().item() == pytest.approx(0.07, rel=0.1)


def test_trl(model):
    """SFT, DPO and GRPO compute log-probabilities from the hidden states and `lm_head.weight`."""
    trl = pytest.importorskip("trl.trainer.utils")
    expected = model(IDS).logits[:, :-1].log_softmax(-1).gather(2, IDS[:, 1:, None])[..., 0]
    (gradient,) = torch.autograd.grad(expected.mean(), model.lm_head.raw)
    trl.add_fused_lm_head(model)
    found = model(IDS, labels=IDS, fused_lm_head=True)
    close(found.log_probs.double(), expected, atol=1e-5)
    (of_loss,) = torch.autograd.grad(-found.loss, model.lm_head.raw)
    close(of_loss, gradient, atol=1e-5)


def lora(**options):
    options = {"r": 4, "target_modules": ["lm_head"], **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", **options)


REFUSED = {
    "LoRA": lora(),
    "DoRA": lora(use_dora=True),
    "pissa": lora(init_lora_weights="pissa"),
    "parameter": lora(target_modules=[], target_parameters=["lm_head.raw"]),
    "tokens beside LoRA": lora(target_modules=["o_proj"], trainable_token_indices={"lm_head": [1, 2]}),
    "IA3": peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
    "LoHa": peft.LoHaConfig(target_modules=["lm_head"]),
    "OFT": peft.OFTConfig(target_modules=["lm_head"], r=0, oft_block_size=4),
    "VeRA": peft.VeraConfig(target_modules=["lm_head"]),
    "tokens": peft.TrainableTokensConfig(target_modules=["lm_head"], token_indices=[1, 2]),
}


@pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning")  # before the refusal
@pytest.mark.parametrize("case", REFUSED)
def test_adapters_of_the_head_are_refused(model, case):
    model.float()
    with pytest.raises((AttributeError, TypeError, ValueError), match=r"NormHead|No layers types compatible with VeRA"):
        peft.get_peft_model(model, REFUSED[case])


# peft also saves the parameter of a head that is trained, and warns of it.
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
def test_peft_trains_all_of_the_head(tmp_path, model):
    before = logits_of(model, IDS)
    adapted = peft.get_peft_model(model, lora(target_modules=["o_proj"], modules_to_save=["lm_head"])).eval()
    with torch.no_grad():
        (raw,) = [p for name, p in adapted.named_parameters() if "lm_head" in name and p.requires_grad]
        raw.mul_(torch.rand(61, 48) - 0.5)
    trained = logits_of(adapted, IDS)
    assert (trained - before).abs().max() > 0.1
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(tmp_path), tmp_path / "adapter").eval()
    close(logits_of(again, IDS), trained, atol=1e-5)  # adapters are saved in float32
    merged = adapted.merge_and_unload()
    assert type(merged.lm_head) is NormHead
    assert_normalised(merged)
    merged.save_pretrained(tmp_path / "merged")
    close(logits_of(load(tmp_path / "merged"), IDS), trained)


def test_other_heads_are_refused(model):
    for other in (nn.Linear(48, 61, bias=False), nn.Sequential(nn.Linear(48, 61))):
        with pytest.raises(TypeError, match=r"lm_head must be a NormHead, .*; got torch\.nn\.modules"):
            model.lm_head = other
    with pytest.raises(TypeError, match=r"lm_head must be a NormHead, .*; got torch.nn.modules.linear.Linear"):
        model.set_output_embeddings(nn.Linear(48, 61))  # has a bias
    model.set_output_embeddings(NormHead(48, 61).double())
    assert_normalised(model)


@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_resizing_keeps_the_parameter(tmp_path, no_grad, tied):
    config = config_with(tie_word_embeddings=tied)
    model = load(write(tmp_path, checkpoint(config), config))
    before = model.lm_head.raw.clone()
    with torch.set_grad_enabled(not no_grad):
        for size in (70, 50):
            model.resize_token_embeddings(size)
            assert torch.equal(model.lm_head.raw[:61], before[:size])
            assert model.lm_head.raw.requires_grad
            assert (model.lm_head.raw is model.model.embed_tokens.weight) == tied
            assert model.lm_head.raw.shape == (size, 48)
            assert_normalised(model, IDS.clamp(max=size - 1))


def test_copies_are_right(model):
    expected = logits_of(model, IDS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  # pickled here
        close(logits_of(other, IDS), expected, atol=0)
        with torch.no_grad():
            other.lm_head.raw[3] *= -1
        assert_normalised(other)
    close(logits_of(model, IDS), expected, atol=0)


def test_generate_computes_the_lengths_once(model, monkeypatch):
    calls = []
    lengths = head_module.row_lengths
    monkeypatch.setattr(head_module, "row_lengths", lambda matrix: calls.append(1) or lengths(matrix))
    assert_greedy(model, IDS[:1], new_tokens_of(model, IDS[:1], max_new_tokens=5))
    assert len(calls) == 1
    for _ in range(2):
        model(IDS)
    assert len(calls) == 3


CHANGES = {
    "in place": lambda head: head.raw.mul_(torch.rand(61, 1) - 0.5),
    "data": lambda head: head.raw.data.mul_(torch.rand(61, 1) - 0.5),
    "load": lambda head: head.load_state_dict({"raw": torch.randn(61, 48)}),
    "another parameter": lambda head: setattr(head, "raw", nn.Parameter(torch.randn(61, 48).double())),
    "cast": lambda head: head.float().double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_logits_follow_every_change(model, change):
    new_tokens_of(model, IDS[:1], max_new_tokens=2)
    assert_normalised(model)
    with torch.no_grad():
        CHANGES[change](model.lm_head)
    assert_normalised(model)
    assert_greedy(model, IDS[:1], new_tokens_of(model, IDS[:1], max_new_tokens=3))


@pytest.fixture
def process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(model):
    """Return the logits before and after one training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = logits_of(model, IDS)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    return before, logits_of(model, IDS)


@pytest.mark.parametrize("own_group", [False, True])
def test_fsdp2(process_group, tmp_path, own_group):
    model, expected = load(write(tmp_path), dtype=torch.float32), trained(load(tmp_path, dtype=torch.float32))
    if own_group:
        fully_shard(model.lm_head)
    fully_shard(model)
    for found, right in zip(trained(model), expected, strict=True):
        close(found, right, atol=0)
    rows = model.lm_head.weight
    rows = rows.full_tensor() if own_group else rows
    state = model.state_dict()["lm_head.raw"]
    close(rows, rows_of(state.full_tensor()), atol=1e-6)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1(process_group, tmp_path, use_orig_params):
    model, expected = load(write(tmp_path), dtype=torch.float32), trained(load(tmp_path, dtype=torch.float32))
    sharded = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    for found, right in zip(trained(sharded), expected, strict=True):
        close(found, right, atol=0)
    with FullyShardedDataParallel.summon_full_params(sharded):
        assert any(name.endswith("lm_head.raw") for name, _ in sharded.named_parameters())


@pytest.mark.slow
def test_it_compiles_and_exports(model):
    head, x = model.lm_head, torch.randn(3, 48, dtype=torch.float64)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), head.keeping_lengths():
            head(x)
            close(torch.compile(head, backend="aot_eager", fullgraph=True)(x), head(x))
    read = torch.compile(lambda x: x @ head.weight.T, backend="aot_eager", fullgraph=True)
    close(read(x), head(x))
    exported = torch.export.export(head, (x,))
    assert list(exported.state_dict) == ["raw"]
    close(exported.module()(x), head(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda head: pickle.loads(pickle.dumps(head))])  # noqa: S301
def test_a_copy_made_while_generating_follows_its_own_matrix(model, copied):
    head, x = model.lm_head, torch.randn(3, 48, dtype=torch.float64)
    with torch.no_grad(), head.keeping_lengths():
        head(x)
        other = copied(head)
        other.raw *= 3
        close(other(x), x @ rows_of(other.raw).T)
