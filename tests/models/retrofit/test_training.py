"""Training: checkpointing, bfloat16, parameter groups, and coefficients that learn."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainingArguments

from kvshift import param_groups
from kvshift.models.retrofit import add_kv_shift

from ..llama.checks import logits_of
from ..llama.tiny import left_padded, random_tokens
from .tiny import shifted_gpt2, tiny_gpt2

# The word of transformers 5.23, and of those before.
CHECKPOINTING = next(
    word for word in ("activation_checkpointing", "gradient_checkpointing") if hasattr(TrainingArguments, word)
)


def batches() -> dict[str, dict[str, Tensor]]:
    ids = random_tokens(2, 9)
    padded, mask = left_padded([random_tokens(9), random_tokens(4)])
    return {
        "whole rows": {"input_ids": ids},
        "padded rows": {"input_ids": padded, "attention_mask": mask},
        "packed rows": {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])},
    }


def gradients_of(model: torch.nn.Module, batch: dict[str, Tensor], **inputs: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(2)  # of dropout
    model(**batch, labels=batch["input_ids"], **inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("batch", batches().values(), ids=batches().keys())
def test_gradient_checkpointing_changes_no_bit(reentrant: bool, batch: dict):
    model = shifted_gpt2().train()
    expected = gradients_of(model, batch, use_cache=False)
    getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # without which reentrant checkpoints have no gradient
    calls = []
    model.transformer.h[0].attn.shift.register_forward_hook(lambda *_: calls.append(1))
    assert_equal(gradients_of(model, batch), expected)
    assert len(calls) == 2  # once forward, once again backward


def test_a_cache_that_nobody_asked_for_does_not_change_training():
    """`use_cache` is on by default in a configuration. (A cache changes the layout of keys, which changes rounding.)"""
    model, batch = shifted_gpt2(torch.float64).train(), batches()["padded rows"]
    expected = gradients_of(model, batch, use_cache=False)
    for name, gradient in gradients_of(model, batch).items():
        tolerance = 1e-6 if ".shift." in name else 1e-12  # float32 gradients in a float64 model
        torch.testing.assert_close(
            gradient, expected[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_bfloat16_keeps_the_coefficients_in_float32():
    model = add_kv_shift(tiny_gpt2(torch.bfloat16))
    after = shifted_gpt2().to(torch.bfloat16)
    for one in (model, after):
        for name, parameter in one.named_parameters():
            assert parameter.dtype == (torch.float32 if ".shift." in name else torch.bfloat16), name
    ids = random_tokens(2, 9)
    exact = shifted_gpt2()
    torch.testing.assert_close(logits_of(after, ids).float(), logits_of(exact, ids), rtol=0.1, atol=0.3)


def test_coefficients_have_a_group_of_their_own():
    model = shifted_gpt2(targets=("q", "k", "v"))
    groups = {group["name"]: group for group in param_groups(model, lr=1e-3, shift_lr_multiplier=2.0)}
    coefficients = {id(parameter) for name, parameter in model.named_parameters() if ".shift." in name}
    assert len(coefficients) == 6
    assert {id(parameter) for parameter in groups["shift"]["params"]} == coefficients
    assert (groups["shift"]["weight_decay"], groups["shift"]["lr"]) == (0.0, 2e-3)


def test_a_step_moves_every_parameter_from_the_identity():
    model, ids = add_kv_shift(tiny_gpt2()), random_tokens(2, 9)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2))
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    for name, tensor in model.state_dict().items():
        assert not torch.equal(tensor, start[name]), f"{name} did not move"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # torch's own
def test_a_compiled_step_has_no_graph_break():
    torch._dynamo.reset()
    model, ids = shifted_gpt2(), random_tokens(2, 9)

    def gradients(step: Any) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        step(ids, use_cache=False).logits.square().mean().backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients(model)
    got = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
