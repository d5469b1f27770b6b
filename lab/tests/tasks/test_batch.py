"""What holds for every task: where labels belong, how transformers uses them, and configurations as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EvalPrediction, GPT2Config, GPT2LMHeadModel, PreTrainedModel, Trainer, TrainingArguments

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.core.options import from_json, to_json
from kvshift_lab.tasks import TaskBatches, concatenate, config_class, count_correct, make_task, task_name

from .cases import TASKS, check_shape


def llama(vocab_size: int) -> KVShiftLlamaForCausalLM:
    torch.manual_seed(0)
    return KVShiftLlamaForCausalLM(
        KVShiftLlamaConfig(
            vocab_size=vocab_size,
            hidden_size=8,
            intermediate_size=11,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.5,
        )
    ).eval()


def gpt2(vocab_size: int) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocab_size, n_positions=307, n_embd=8, n_layer=1, n_head=2, initializer_range=0.5)
    config.bos_token_id = config.eos_token_id = None
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_the_loss_of_the_model_is_that_of_the_output_before_each_label(make: Any, task: Any):
    model: PreTrainedModel = make(task.vocab_size)
    batch = TaskBatches(task, split="training", seed=0, batch_size=5, batches=1)[0]
    with torch.no_grad():
        output = model(input_ids=batch.input_ids, labels=batch.labels)
    chances = output.logits.double().log_softmax(-1)
    losses = [
        -chances[row, column - 1, batch.labels[row, column]]
        for row in range(5)
        for column in range(task.length)
        if batch.labels[row, column] != -100
    ]
    assert output.loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_no_label_is_read_off_the_column_it_stands_in(task: Any):
    """The output before a label cannot see its column: the loss does not change with the tokens there and later."""
    model = llama(task.vocab_size)
    batch = TaskBatches(task, split="training", seed=1, batch_size=3, batches=1)[0]
    last = int((batch.labels[0] != -100).nonzero().max())
    changed = batch.input_ids[:1].clone()
    changed[:, last:] = (changed[:, last:] + 1) % task.vocab_size
    only_last = torch.full_like(batch.labels[:1], -100)
    only_last[:, last] = batch.labels[0, last]
    with torch.no_grad():
        one, other = (model(input_ids=ids, labels=only_last).loss for ids in (batch.input_ids[:1], changed))
    assert one == other


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_a_config_goes_through_json_and_makes_the_same_task(task: Any):
    values = json.loads(json.dumps(to_json(task.config)))
    config = from_json(config_class(task_name(task.config)), values)
    assert config == task.config
    batch, again = (
        TaskBatches(made, split="training", seed=2, batch_size=3, batches=1)[0] for made in (task, make_task(config))
    )
    check_shape(task, batch, 3)
    assert all(torch.equal(getattr(batch, name), getattr(again, name)) for name in vars(batch))


def test_right_answers_of_each_slice():
    labels = torch.tensor([[-100, 5, 6, 7], [-100, -100, 8, 9]])
    slices = torch.tensor([[-1, 0, 2, -1], [-1, -1, 0, 0]])
    predicted = torch.tensor([[5, 1, 7, 0], [0, 8, 1, 9]])  # right: 5, 7 (in no slice) and 8
    right, total = count_correct(predicted, labels, slices, 4)
    assert right.tolist() == [2, 0, 0, 0]
    assert total.tolist() == [3, 0, 1, 0]


def test_answers_that_are_not_as_many_as_labels():
    labels = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"one shape \(B, T\), got \(2, 3\), \(2, 4\) and \(2, 4\)"):
        count_correct(labels[:, 1:], labels, labels, 1)


def test_all_right_and_all_wrong():
    for task in TASKS.values():
        batch = TaskBatches(task, split="evaluation", seed=0, batch_size=13, batches=1)[0]
        oracle = batch.labels.roll(-1, dims=1)
        names = len(task.slice_names)
        right, total = count_correct(oracle, batch.labels, batch.slices, names)
        assert torch.equal(right, total)
        assert total.sum() == (batch.slices != -1).sum()
        assert not count_correct(torch.full_like(oracle, -7), batch.labels, batch.slices, names)[0].any()


class SlicedTrainer(Trainer):
    """A Trainer that gives the slices to the metrics but not to the model, which has no such argument."""

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, {k: v for k, v in inputs.items() if k != "slices"}, *args, **kwargs)


def test_trainer_trains_and_evaluates_on_them(tmp_path: Path):
    task = TASKS["script"]
    training = TaskBatches(task, split="training", seed=0, batch_size=6, batches=4)
    evaluation = TaskBatches(task, split="evaluation", seed=0, batch_size=10, batches=3)

    def accuracy(prediction: EvalPrediction) -> dict[str, float]:
        labels, slices = (torch.from_numpy(array) for array in prediction.label_ids)
        right, total = count_correct(torch.from_numpy(prediction.predictions), labels, slices, len(task.slice_names))
        assert total[0] == 30
        return {"first_repeat": float(right[0] / total[0])}

    model = llama(task.vocab_size)
    trainer = SlicedTrainer(
        model,
        TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=1,
            per_device_eval_batch_size=1,
            max_steps=4,
            learning_rate=1e-2,
            remove_unused_columns=False,
            label_names=["labels", "slices"],
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=training,
        eval_dataset=evaluation,
        data_collator=concatenate,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1),
    )
    before = trainer.evaluate()
    with torch.no_grad():
        expected = [model(input_ids=b.input_ids, labels=b.labels).loss.item() for b in evaluation]
        guesses = [model(input_ids=b.input_ids).logits.argmax(-1) for b in evaluation]
    assert before["eval_loss"] == pytest.approx(sum(expected) / 3, rel=1e-5)
    right = sum(
        int(count_correct(guess, b.labels, b.slices, 2)[0][0]) for guess, b in zip(guesses, evaluation, strict=True)
    )
    assert before["eval_first_repeat"] == pytest.approx(right / 30)
    trainer.train()
    assert trainer.state.global_step == 4
    assert trainer.evaluate()["eval_loss"] < before["eval_loss"]
