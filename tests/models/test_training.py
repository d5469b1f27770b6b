"""Training: checkpointing, Trainer, bfloat16, and the compiler."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments, set_seed

from kvshift import KVShift, param_groups
from kvshift.models.llama import KVShiftLlamaForCausalLM
from kvshift.models.versions import CACHE

from ..covering import covering
from .baichuan_m1.tiny import CONFIG, shapes
from .llama.checks import REFERENCES, names_of
from .llama.tiny import left_padded, random_tokens, tiny_config, tiny_model
from .registry import CHECKPOINTING, MODELS, RETROFITTED
from .retrofit.tiny_families import shifted

GATE = {"Llama, gate, sliding window": partial(tiny_model, shift_constraint="gate", sliding_window=5)}
ALL = MODELS | RETROFITTED | GATE


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
    torch.manual_seed(2)  # for dropout
    model(**batch, labels=batch["input_ids"], **inputs).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor], **tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


ALL_AT_ONCE = {"shift_targets": ["q", "k", "v"], "shift_window": 3, "qk_norm": True, "sliding_window": 7}
GRADIENTS = {  # models that stay close to the formulas despite Llama's float32 norms and angles
    "Llama, all at once": ((11,), partial(tiny_model, **ALL_AT_ONCE)),
    **{name: ((5, 1, 7, 2), MODELS[name]) for name in MODELS if "Llama" in name and "alone" not in name},
    **{name: ((11,), MODELS[name]) for name in MODELS if "GPT-2" in name},
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_all_parameters_equal_the_reference(name: str):
    lengths, build = GRADIENTS[name]
    model = build(torch.float64)
    documents = [random_tokens(length, seed=length) for length in lengths]
    upstream = torch.randn(sum(lengths), 61, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    positions = names_of(lengths)["position_ids"]
    logits = model(torch.cat(documents).unsqueeze(0), position_ids=positions, use_cache=False).logits[0]
    (logits * upstream).sum().backward()
    weights = {name: tensor.clone().requires_grad_() for name, tensor in model.state_dict().items()}
    for document, weight in zip(documents, upstream.split(lengths), strict=True):
        formulas = REFERENCES[model.config.model_type](weights, model.config, document.tolist())
        (formulas * weight).sum().backward()
    for key, parameter in model.named_parameters():
        close = 1e-4 if "Llama" in name else 1e-5 if ".shift." in key else 1e-9
        torch.testing.assert_close(
            parameter.grad, weights[key].grad, rtol=close, atol=close, msg=lambda m, n=key: f"{n}: {m}"
        )


@covering(name=list(ALL), reentrant=[False, True], batch=batches())
def test_gradient_checkpointing_changes_no_bit(name: str, reentrant: bool, batch: dict):
    model = ALL[name](torch.float32).train()
    expected = gradients_of(model, batch, use_cache=False)
    getattr(model, f"{CHECKPOINTING}_enable")({"use_reentrant": reentrant})
    model.enable_input_require_grads()  # reentrant checkpoints have no gradient without it
    calls = []
    next(module for module in model.modules() if isinstance(module, KVShift)).register_forward_hook(
        lambda *_: calls.append(1)
    )
    assert_equal(gradients_of(model, batch), expected, rtol=0, atol=0)
    assert len(calls) == 2  # once in forward, once in backward


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_that_nobody_asked_for_does_not_change_training(name: str):
    """Configurations have `use_cache` on by default. (A cache changes the layout of keys, and so GPT-2's rounding.)"""
    model, batch = MODELS[name](torch.float64).train(), batches()["padded rows"]
    got, expected = gradients_of(model, batch), gradients_of(model, batch, use_cache=False)
    for parameter, gradient in got.items():
        tolerance = 1e-6 if ".shift." in parameter else 1e-12  # float32 gradients in a float64 model
        tolerance = tolerance if "GPT-2" in name else 0
        torch.testing.assert_close(gradient, expected[parameter], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("Llama", "whole rows"),
        ("Llama, queries too, window 4", "packed rows"),
        (*GATE, "padded rows"),
        ("GPT-2", "whole rows"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # from torch
@pytest.mark.slow
def test_a_compiled_step_has_no_graph_break(name: str, batch: str):
    torch._dynamo.reset()
    model, inputs = ALL[name](torch.float32), dict(batches()[batch], use_cache=False)
    model.train(name != "GPT-2")
    if name != "GPT-2":  # GPT-2's loss writes to a log
        inputs["labels"] = inputs["input_ids"]

    def gradients(call: Callable) -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        outputs = call(**inputs)
        (outputs.logits.square().mean() if outputs.loss is None else outputs.loss).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    expected = gradients(model)
    assert_equal(gradients(torch.compile(model, fullgraph=True, backend="aot_eager")), expected, rtol=1e-4, atol=1e-5)


TRAINED: dict[str, Callable[[], PreTrainedModel]] = {
    "Llama": lambda: KVShiftLlamaForCausalLM(tiny_config(shift_window=3)),
    "Baichuan-M1": MODELS["Baichuan-M1"],
    "GPT-NeoX": partial(shifted, "GPT-NeoX", torch.float32, tie_word_embeddings=False),
}


def trained(tmp_path, steps: int, *, resume: bool = False, name: str = "Llama", **arguments: Any) -> PreTrainedModel:
    """Train for a few steps with transformers' Trainer, always on the same random sequences, and return the model."""
    set_seed(11)
    model = TRAINED[name]().train()
    rows = [{"input_ids": row, "labels": row} for row in random_tokens(16, 12)]
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2, shift_lr_multiplier=3.0))
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=steps,
        per_device_train_batch_size=4,
        save_steps=2,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=11,
        **arguments,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, optimizers=(optimizer, constant))
    trainer.train(resume_from_checkpoint=resume)
    return model


@pytest.mark.parametrize("name", TRAINED)
def test_trainer_moves_the_coefficients_saves_and_resumes(tmp_path, name: str):
    set_seed(11)
    start = TRAINED[name]().state_dict()
    whole = trained(tmp_path / "whole", 4, name=name).state_dict()
    for key, tensor in whole.items():
        assert not torch.equal(tensor, start[key]), f"{key} did not move"
    trained(tmp_path / "parts", 2, name=name)
    if name == "Baichuan-M1":
        saved = load_file(tmp_path / "parts" / "checkpoint-2" / "model.safetensors")
        assert {key: tuple(tensor.shape) for key, tensor in saved.items()} == shapes(CONFIG)  # under released names
    if name == "GPT-NeoX":
        assert "embed_out.weight" in load_file(tmp_path / "parts" / "checkpoint-2" / "model.safetensors")
    assert_equal(trained(tmp_path / "parts", 4, resume=True, name=name).state_dict(), whole, rtol=0, atol=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "parts" / "checkpoint-4").state_dict()
    assert_equal(loaded, whole, rtol=0, atol=0)


def test_trainer_with_checkpointing_and_bfloat16(tmp_path):
    model = trained(tmp_path, 2, bf16=True, **{CHECKPOINTING: True})
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ALL)
def test_coefficients_stay_float32_in_bfloat16(name: str):
    for model in (ALL[name](torch.bfloat16), ALL[name](torch.float32).to(torch.bfloat16)):
        for parameter, tensor in model.named_parameters():
            assert tensor.dtype == (torch.float32 if ".shift." in parameter else torch.bfloat16), parameter


def test_pieces_of_a_sequence_in_bfloat16_are_as_near_to_float32_as_the_sequence():
    model, ids = tiny_model(torch.bfloat16, shift_window=3), random_tokens(1, 9)
    with torch.no_grad():
        exact = tiny_model(shift_window=3)(ids).logits
        whole = model(ids).logits.float()
        cache = model(ids[:, :5], use_cache=True).past_key_values
        rest = model(ids[:, 5:], **{CACHE: cache}).logits.float()
    rounding = (whole - exact).abs().max()
    assert rounding < 0.5
    assert (rest - whole[:, 5:]).abs().max() <= rounding
