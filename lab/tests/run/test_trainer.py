"""A training step: the loss of plain Trainer code, accumulation, groups of parameters, and schedules."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from kvshift_lab.data.order import ShuffledEpochs
from kvshift_lab.data.packing import collate
from kvshift_lab.data.text import load_text_data
from kvshift_lab.run.optimizer import adamw
from kvshift_lab.run.train import train
from kvshift_lab.run.train_config import OptimizerConfig
from kvshift_lab.variants.building import build_model, llama_config
from kvshift_lab.variants.model_config import ModelConfig

from ..run_cases import LENGTH, assert_same_bits, losses, metrics, result, tiny, weights


class PlainTrainer(Trainer):
    """Transformers' Trainer, except for the order of the sequences."""

    def get_train_dataloader(self):
        return self.accelerator.prepare(
            DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size, collate_fn=collate)
        )


class Log(TrainerCallback):
    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses.append(logs["loss"])


def test_vanilla_learns_as_llama_under_plain_trainer(corpus, vanilla, tmp_path):
    config = tiny(corpus, vanilla, model={"shift_targets": ()})
    data = load_text_data(config.data, seed=config.seed, tokenizer_folder=vanilla / "tokenizer")
    ours = llama_config(config.model, vocab_size=len(data.tokenizer), sequence_length=LENGTH)
    fields = {name: value for name, value in ours.to_dict().items() if name in LlamaConfig().to_dict()}
    fields.pop("model_type")
    llama = LlamaForCausalLM(LlamaConfig(**{**fields, "use_cache": False}))
    llama.load_state_dict(build_model(ours, seed=config.seed).state_dict())
    order = list(ShuffledEpochs(len(data.train), config.steps * config.batch_size, config.seed))
    log = Log()
    trainer = PlainTrainer(
        llama,
        TrainingArguments(
            output_dir=str(tmp_path / "plain"),
            max_steps=config.steps,
            per_device_train_batch_size=config.batch_size,
            learning_rate=2e-3,
            adam_beta2=0.95,
            weight_decay=0.1,
            warmup_steps=1,
            lr_scheduler_type="constant_with_warmup",
            optim="adamw_torch",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            dataloader_pin_memory=False,
            remove_unused_columns=False,
            disable_tqdm=True,
        ),
        train_dataset=data.train.select(order),
        callbacks=[log],
    )
    trainer.train()
    assert len(log.losses) == config.steps
    assert log.losses[-1] < log.losses[0] - 0.3
    assert losses(vanilla) == log.losses  # to the last bit
    assert_same_bits(weights(vanilla), llama.state_dict())


@pytest.mark.parametrize("packing", ["concat", "documents"])
def test_accumulation_changes_nothing(corpus, tmp_path, packing):
    """Documents leave unequal numbers of labels to the parts of a step; the mean is over all tokens of the step."""
    options = {"data": {"packing": packing}, "steps": 4}
    train(tiny(corpus, tmp_path / "whole", batch_size=16, **options))
    train(tiny(corpus, tmp_path / "parts", batch_size=8, tokens_per_step=16 * LENGTH, **options))
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)
    assert metrics(tmp_path / "whole", "train")[-1]["tokens"] == 4 * 16 * LENGTH
    assert result(tmp_path / "parts")["tokens"] == 4 * 16 * LENGTH
    torch.testing.assert_close(
        result(tmp_path / "parts")["eval_losses_per_row"],
        result(tmp_path / "whole")["eval_losses_per_row"],
        rtol=0,
        atol=1e-5,
    )


def test_groups():
    """`test_optim.py` has all that `param_groups` promises."""
    model = build_model(llama_config(ModelConfig(hidden_size=24), vocab_size=31, sequence_length=5), seed=0)
    options = OptimizerConfig(shift_lr_multiplier=0.5, weight_decay=0.07, beta2=0.93, epsilon=1e-7)
    groups = {group["name"]: group for group in adamw(model, options, torch.device("cpu")).param_groups}
    assert {name: (group["lr"], group["weight_decay"]) for name, group in groups.items()} == {
        "decay": (2e-3, 0.07),
        "no_decay": (2e-3, 0.0),
        "shift": (1e-3, 0.0),
    }
    assert all(group["betas"] == (0.9, 0.93) and group["eps"] == 1e-7 for group in groups.values())


def _with(config, **optimizer):
    return replace(config, optimizer=replace(config.optimizer, **optimizer))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"warmup_steps": 4}, [0, 0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1, 1]),
        (
            {"schedule": "wsd", "warmup_steps": 2, "decay_fraction": 0.5, "min_lr_ratio": 0.4},
            [0.4, 0.7, 1, 1, 1, 1, 1, 0.9, 0.8, 0.7, 0.6, 0.5],
        ),
        (
            {"schedule": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.1},
            [0, 0.5, *(0.1 + 0.9 * (0.5 + 0.5 * math.cos(math.pi * i / 10)) for i in range(10))],
        ),
    ],
    ids=["constant", "wsd", "cosine"],
)
def test_schedules(corpus, tmp_path, options, expected):
    short = {"model": {"num_hidden_layers": 1}, "eval_every": 12, "save_every": 12}
    train(_with(tiny(corpus, tmp_path, **short), learning_rate=0.01, **options))
    rates = [line["learning_rate"] / 0.01 for line in metrics(tmp_path, "train")]
    assert rates == pytest.approx(expected, abs=1e-9)


def test_clamped_coefficients_stay_in_their_interval(corpus, tmp_path):
    config = tiny(corpus, tmp_path, model={"shift_constraint": "clamp"}, steps=4)
    train(_with(config, shift_lr_multiplier=100, warmup_steps=0))
    raw = [tensor for name, tensor in weights(tmp_path).items() if ".shift." in name]
    assert all(((tensor >= 0) & (tensor <= 1)).all() for tensor in raw)
    assert any((tensor == 0).any() or (tensor == 1).any() for tensor in raw)


def test_gradient_checkpointing_changes_no_bit(corpus, tmp_path, finished):
    train(tiny(corpus, tmp_path, gradient_checkpointing=True))
    assert losses(tmp_path) == losses(finished)
    assert_same_bits(weights(tmp_path), weights(finished))


def test_bf16_where_asked_for(corpus, tmp_path, finished):
    train(tiny(corpus, tmp_path, bf16="yes"))
    assert losses(tmp_path) != losses(finished)
    torch.testing.assert_close(losses(tmp_path), losses(finished), rtol=0.02, atol=0)
    assert all(tensor.dtype == torch.float32 for tensor in weights(tmp_path).values())


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")  # torch raises it itself
@pytest.mark.slow
def test_compiled_model_learns_the_same(corpus, tmp_path):
    plain, compiled = tmp_path / "plain", tmp_path / "compiled"
    small = {"model": {"num_hidden_layers": 1}, "steps": 3, "eval_rows": 4}
    train(tiny(corpus, plain, **small))
    train(tiny(corpus, compiled, compile=True, **small))
    torch.testing.assert_close(losses(compiled), losses(plain), rtol=1e-5, atol=0)
    assert result(compiled)["eval_loss"] == pytest.approx(result(plain)["eval_loss"], rel=1e-5)
    assert weights(compiled).keys() == weights(plain).keys()
