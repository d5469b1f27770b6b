"""All code that reads the head's `weight`, adapts the head or replaces it gets rows of length 1, or is refused."""

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

from kvshift.models.baichuan_m1 import head as head_module
from kvshift.models.baichuan_m1.head import NormHead

from ..llama.checks import assert_greedy, logits_of, new_tokens_of
from ..llama.tiny import random_tokens
from .tiny import checkpoint, config_with, load, write

IDS = random_tokens(2, 9)


@pytest.fixture
def model(tmp_path):
    return load(write(tmp_path))


def parameter_of(model):
    return dict(model.named_parameters())["lm_head.weight"]


def rows_of(matrix):
    return matrix / (matrix.square().sum(1, keepdim=True).sqrt() + 1e-7)


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


def assert_normalised(model, ids=IDS):
    """Check the logits against the formula applied to the parameter."""
    with torch.no_grad():
        close(model(ids).logits, model.model(ids).last_hidden_state @ rows_of(parameter_of(model)).T)


def test_who_reads_weight_gets_the_logits_and_their_gradients(model):
    logits = model(IDS).logits
    (of_logits,) = torch.autograd.grad(logits.sin().sum(), parameter_of(model))
    hidden = model.model(IDS).last_hidden_state
    read = hidden @ model.get_output_embeddings().weight.T
    close(read, logits)
    (of_read,) = torch.autograd.grad(read.sin().sum(), parameter_of(model))
    close(of_read, of_logits)
    assert of_logits.abs().max() > 1e-3
    with torch.no_grad():
        close(hidden @ model.lm_head.weight.T, logits)
    close(hidden @ copy.deepcopy(model).lm_head.weight.T, logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_rows_are_divided_in_float32(dtype):
    head = NormHead(48, 61, bias=False, dtype=dtype)
    assert head.weight.dtype == dtype
    wide = head.raw.float()
    assert torch.equal(head.weight, (wide / (torch.linalg.vector_norm(wide, dim=1, keepdim=True) + 1e-7)).to(dtype))


def test_the_parameter_has_the_released_name_and_bits(model):
    raw = checkpoint()["lm_head.weight"].double()
    assert torch.equal(parameter_of(model), raw)
    assert torch.equal(model.state_dict()["lm_head.weight"], raw)
    assert model.get_parameter("lm_head.weight") is parameter_of(model) is model.lm_head.raw
    assert list(model.lm_head.state_dict()) == ["weight"]


@pytest.mark.parametrize("change", [1, 3])
def test_a_new_head_is_initialised(change):
    """A new head is not left uninitialised, and transformers' own initialisation applies to it."""
    torch.manual_seed(change)
    head = NormHead(4096, 7, bias=False)
    assert head.raw.std().item() == pytest.approx(1 / (3 * 4096) ** 0.5, rel=0.05)
    model = AutoModelForCausalLM.from_config(load_config(initializer_range=0.07))
    assert parameter_of(model).std().item() == pytest.approx(0.07, rel=0.1)


def load_config(**changes):
    from kvshift.models.baichuan_m1 import BaichuanM1Config

    return BaichuanM1Config(**config_with(**changes))


def test_trl(model):
    """SFT, DPO and GRPO compute log-probabilities from the hidden states and `lm_head.weight`."""
    trl = pytest.importorskip("trl.trainer.utils")
    expected = model(IDS).logits[:, :-1].log_softmax(-1).gather(2, IDS[:, 1:, None])[..., 0]
    (gradient,) = torch.autograd.grad(expected.mean(), parameter_of(model))
    trl.add_fused_lm_head(model)
    found = model(IDS, labels=IDS, fused_lm_head=True)
    close(found.log_probs.double(), expected, atol=1e-5)
    (of_loss,) = torch.autograd.grad(-found.loss, parameter_of(model))
    close(of_loss, gradient, atol=1e-5)


def lora(**options):
    torch.manual_seed(1)
    options = {"r": 4, "target_modules": ["lm_head"], "init_lora_weights": False, **options}
    return peft.LoraConfig(task_type="CAUSAL_LM", **options)


LORA = {
    "head": {},
    "head and layers": {"target_modules": ["lm_head", "W_pack", "o_proj"], "use_rslora": True, "lora_dropout": 0.2},
    "rank 1": {"r": 1, "lora_alpha": 3},
    "another copy": {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]},
    "orthogonal": {"init_lora_weights": "orthogonal"},
}


# peft also saves the parameter of an adapted head, and warns of it.
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning")
@pytest.mark.parametrize("case", LORA)
def test_lora_merged_and_unmerged(tmp_path, model, case):
    before = logits_of(model, IDS)
    parameter = parameter_of(model).detach().clone()
    adapted = peft.get_peft_model(model, lora(**LORA[case])).eval()
    unmerged = logits_of(adapted, IDS)
    assert case == "orthogonal" or (unmerged - before).abs().max() > 0.1
    with adapted.disable_adapter():
        close(logits_of(adapted, IDS), before)
    adapted.merge_adapter()
    close(logits_of(adapted, IDS), unmerged)
    adapted.unmerge_adapter()
    close(logits_of(adapted, IDS), unmerged)
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(load(tmp_path), tmp_path / "adapter").eval()
    close(logits_of(again, IDS), unmerged, atol=1e-5)  # adapters are saved in float32
    merged = adapted.merge_and_unload()
    assert type(merged.lm_head) is NormHead
    close(logits_of(merged, IDS), unmerged)
    assert torch.equal(parameter_of(merged), parameter) == (
        "lm_head" not in LORA[case].get("target_modules", "lm_head")
    )
    merged.save_pretrained(tmp_path / "merged")
    close(logits_of(load(tmp_path / "merged"), IDS), unmerged)


def test_lora_of_the_sum_of_the_matrices(model):
    """The rows of raw + s B A are divided by their lengths, and the gradients are those of that formula."""
    adapted = peft.get_peft_model(model, lora())
    layer = adapted.base_model.model.lm_head
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    hidden = model.model(IDS).last_hidden_state
    expected = hidden @ rows_of(layer.base_layer.raw + layer.scaling["default"] * b @ a).T
    found = adapted(IDS).logits
    close(found, expected)
    close(hidden @ adapted.get_output_embeddings().weight.T, expected)
    for got, right in zip(
        torch.autograd.grad(found.sin().sum(), (a, b)), torch.autograd.grad(expected.sin().sum(), (a, b)), strict=True
    ):
        close(got, right)


def test_two_adapters(model):
    adapted = peft.get_peft_model(model, lora()).eval()
    adapted.add_adapter("second", lora(r=3))
    adapted.base_model.set_adapter(["default", "second"])
    both = logits_of(adapted, IDS)
    adapted.merge_adapter()
    close(logits_of(adapted, IDS), both)
    adapted.unmerge_adapter()
    adapted.set_adapter("second")
    assert (logits_of(adapted, IDS) - both).abs().max() > 0.1
    for refused in ({"init_lora_weights": "pissa"}, {"use_dora": True}, {"lora_bias": True}):
        with pytest.raises(TypeError, match=f"lm_head, .*, cannot have {next(iter(refused))}="):
            adapted.add_adapter("third", lora(**refused))
    with pytest.raises(ValueError, match="adapter_names cannot be given with an adapter on lm_head"):
        adapted(IDS, adapter_names=["default", "second"])


REFUSED = {
    "pissa": lora(init_lora_weights="pissa"),
    "olora": lora(init_lora_weights="olora"),
    "DoRA": lora(use_dora=True),
    "bias": lora(lora_bias=True),
    "parameter": lora(target_modules=[], target_parameters=["lm_head.weight"]),
    "IA3": peft.IA3Config(target_modules=["lm_head"], feedforward_modules=[]),
    "LoHa": peft.LoHaConfig(target_modules=["lm_head"]),
    "OFT": peft.OFTConfig(target_modules=["lm_head"], r=0, oft_block_size=4),
    "VeRA": peft.VeraConfig(target_modules=["lm_head"]),
    "tokens": peft.TrainableTokensConfig(target_modules=["lm_head"], token_indices=[1, 2]),
}


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed:peft.utils.warning.PeftWarning")
@pytest.mark.parametrize("case", REFUSED)
def test_adapters_that_would_be_wrong_are_refused(model, case):
    model.float()
    with pytest.raises(TypeError, match="lm_head, which scales its rows to length 1, cannot have"):
        peft.get_peft_model(model, REFUSED[case])


class CopiedLinear(nn.Linear):
    """A layer that takes the weight of the layer that it replaces, as the layers of quantization do."""

    @classmethod
    def of(cls, layer):
        made = cls(layer.in_features, layer.out_features, bias=layer.bias is not None, dtype=layer.weight.dtype)
        with torch.no_grad():
            made.weight = layer.weight
        return made


class QuantizedTensor(torch.Tensor):
    __module__ = "torchao.of_a_test"


def test_a_copy_of_another_class_gives_the_same_logits(model):
    before = logits_of(model, IDS)
    model.lm_head = CopiedLinear.of(model.lm_head)
    close(logits_of(model, IDS), before)


def test_weights_that_torchao_replaces_in_place_give_the_same_logits(model):
    before, head = logits_of(model, IDS), model.lm_head
    with torch.no_grad():
        head.weight = nn.Parameter(head.weight.as_subclass(QuantizedTensor), requires_grad=False)
    assert type(head) is nn.Linear
    close(logits_of(model, IDS), before)


def test_other_heads(model):
    model.lm_head = nn.Linear(48, 61, bias=False, dtype=torch.float64)
    assert type(model.lm_head) is NormHead
    assert_normalised(model)
    with pytest.raises(TypeError, match=r"lm_head must be a NormHead, .*; got torch.nn.*Linear with a bias"):
        model.lm_head = nn.Linear(48, 61)
    with pytest.raises(TypeError, match=r"lm_head must be a NormHead, .*; got .*CopiedLinear\. Exclude lm_head"):
        model.lm_head = CopiedLinear(48, 61, bias=False, device="meta")  # its weights would be loaded
    with pytest.raises(TypeError, match="the weight of a NormHead cannot be parametrized"):
        nn.utils.parametrizations.weight_norm(model.lm_head)


@pytest.mark.parametrize("no_grad", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_resizing_keeps_the_parameter(tmp_path, no_grad, tied):
    config = config_with(tie_word_embeddings=tied)
    model = load(write(tmp_path, checkpoint(config), config))
    before = parameter_of(model).clone() if not tied else model.model.embed_tokens.weight.clone()
    with torch.set_grad_enabled(not no_grad):
        for size in (70, 50):
            model.resize_token_embeddings(size)
            assert torch.equal(model.lm_head.raw[:61], before[:size])
            assert model.lm_head.raw.requires_grad
            assert (model.lm_head.raw is model.model.embed_tokens.weight) == tied
            assert type(model.lm_head) is NormHead
            ids = IDS.clamp(max=size - 1)
            close(logits_of(model, ids), model.model(ids).last_hidden_state @ rows_of(model.lm_head.raw).T)


def test_copies_are_right(model):
    expected = logits_of(model, IDS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301  # pickled here
        close(logits_of(other, IDS), expected, atol=0)
        with torch.no_grad():
            parameter_of(other)[3] *= -1
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
    "in place": lambda model, parameter: parameter.mul_(torch.rand(61, 1) - 0.5),
    "data": lambda model, parameter: parameter.data.mul_(torch.rand(61, 1) - 0.5),
    "load": lambda model, _: model.lm_head.load_state_dict({"weight": torch.randn(61, 48)}),
    "assign": lambda model, _: model.lm_head.load_state_dict({"weight": torch.randn(61, 48).double()}, assign=True),
    "another parameter": lambda model, _: setattr(model.lm_head, "weight", nn.Parameter(torch.randn(61, 48).double())),
    "cast": lambda model, _: model.float().double(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_logits_follow_every_change(model, change):
    new_tokens_of(model, IDS[:1], max_new_tokens=2)
    assert_normalised(model)
    with torch.no_grad():
        CHANGES[change](model, parameter_of(model))
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
    state = model.state_dict()["lm_head.weight"]
    close(rows, rows_of(state.full_tensor()), atol=1e-6)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1(process_group, tmp_path, use_orig_params):
    model, expected = load(write(tmp_path), dtype=torch.float32), trained(load(tmp_path, dtype=torch.float32))
    sharded = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    for found, right in zip(trained(sharded), expected, strict=True):
        close(found, right, atol=0)
    with FullyShardedDataParallel.summon_full_params(sharded):
        assert any(name.endswith("lm_head.weight") for name, _ in sharded.named_parameters())


@pytest.mark.slow
def test_it_compiles_and_exports(model):
    head, x = model.lm_head, torch.randn(3, 48, dtype=torch.float64)
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled), head.caching_row_lengths():
            head(x)
            close(torch.compile(head, backend="aot_eager", fullgraph=True)(x), head(x))
    read = torch.compile(lambda x: x @ head.weight.T, backend="aot_eager", fullgraph=True)
    close(read(x), head(x))
    exported = torch.export.export(head, (x,))
    assert list(exported.state_dict) == ["weight"]
    close(exported.module()(x), head(x))
