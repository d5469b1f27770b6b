"""CONTRIBUTING's steps for a task, a recipe and a variant, tried on toys; `models/test_decoder.py` adds a family."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
from huggingface_hub.dataclasses import strict
from matplotlib.figure import Figure

from kvshift import KVShift, ShiftOptions
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab import cli
from kvshift_lab.core.errors import LabError
from kvshift_lab.recipes import catalogue
from kvshift_lab.recipes.catalogue import CATALOGUE
from kvshift_lab.run.finished import read_run
from kvshift_lab.run.train_task import TaskTrainConfig, train_task
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.claims import Claim, percent
from kvshift_lab.study.entry import Entry, Preset
from kvshift_lab.study.jobs import TrainingJob
from kvshift_lab.study.recipe import Recipe, accuracy_curve
from kvshift_lab.study.records import read_records
from kvshift_lab.tasks import Batch, concatenate, make_task
from kvshift_lab.tasks.batch import IGNORED
from kvshift_lab.tasks.option_checks import check_at_least, check_batch_size
from kvshift_lab.tasks.registry import TASKS
from kvshift_lab.variants.by_name import VARIANTS, VariantEntry
from kvshift_lab.variants.model_classes import prepend_class
from kvshift_lab.variants.model_config import ModelConfig
from kvshift_lab.variants.small_gpt2 import GPT2Options
from kvshift_lab.variants.uncached import UncachedConfig, UncachedDecoder, UncachedGeneration
from kvshift_lab.variants.variant import ModelVariant

from .tasks.cases import check_shape, seeded


@dataclass(frozen=True, kw_only=True)
class CopyConfig:
    """Options of a task in which letters must be repeated."""

    letters: int = 5
    """Number of letters of a sequence, before the blank and again after it."""
    alphabet: int = 3
    """Number of different letters."""

    def __post_init__(self) -> None:
        check_at_least("copy", self, letters=1, alphabet=2)


class CopyTask:
    """Uniform letters, a blank, and the same letters again, which the model must predict. Chance: 1 / alphabet.

    input_ids    2  0  2  3  2  0  2
    labels       -  -  -  -  2  0  2
    slices       .  .  .  .  0  0  0
    """

    slice_names = ("copied",)

    def __init__(self, config: CopyConfig) -> None:
        self.config = config
        self.vocab_size = config.alphabet + 1
        self.length = 2 * config.letters + 1
        self.chance = {"copied": 1 / config.alphabet}

    def batch(self, generator: torch.Generator, batch_size: int) -> Batch:
        check_batch_size(batch_size)
        letters = torch.randint(self.config.alphabet, (batch_size, self.config.letters), generator=generator)
        blank = torch.full((batch_size, 1), self.config.alphabet)
        input_ids = torch.cat([letters, blank, letters], dim=1)
        labels = input_ids.clone()
        labels[:, : self.config.letters + 1] = IGNORED
        return Batch(input_ids=input_ids, labels=labels, slices=torch.where(labels == IGNORED, -1, 0))


def arms(preset):
    return [
        TrainingJob(
            arm=Arm(case=f"window {window}"),
            config=TaskTrainConfig(
                task=CopyConfig(),
                model=ModelConfig(
                    hidden_size=12,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    intermediate_size=16,
                    shift_window=window,
                ),
                steps=2,
                batch_size=7,
                eval_rows=11,
                eval_every=1,
                device="cpu",
            ),
        )
        for window in (2, 3)
    ]


def claims(records):
    final = [accuracy_curve(record, "copied")[1][-1] for record in records]
    return [Claim(statement="Copies", paper="nothing", ours=percent(final), direction="not shown", note="a toy")]


def plot(records):
    figure = Figure()
    for record in records:
        figure.add_subplot().plot(*accuracy_curve(record, "copied"))
    return figure


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "copy", (CopyConfig, CopyTask))


@pytest.fixture
def recipe(task: None, monkeypatch: pytest.MonkeyPatch) -> None:
    presets = {"smoke": Preset(seeds=1, cost="seconds")}
    entry = Entry(name="toy", title="copying", presets=presets)
    monkeypatch.setitem(CATALOGUE, "toy", entry)
    monkeypatch.setitem(catalogue._FOLDERS, "toy", ("toy", entry))
    module = ModuleType("kvshift_lab.recipes.toy.study")
    module.__file__ = __file__  # a folder without notes
    module.RECIPE = Recipe(entry=entry, source="no figure", arms=arms, plot=plot, claims=claims)
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.usefixtures("task")
def test_a_task_is_a_module_and_an_entry(tmp_path: Path):
    made = make_task(CopyConfig())
    batch = made.batch(seeded(0), 13)
    check_shape(made, batch, 13)
    assert (concatenate([batch])["labels"][:, 6:] == batch.input_ids[:, :5]).all()
    found = train_task(
        TaskTrainConfig(
            out=tmp_path,
            task=CopyConfig(),
            model=arms("smoke")[0].config.model,
            steps=2,
            batch_size=7,
            eval_rows=11,
            eval_every=1,
            device="cpu",
        )
    )
    assert 0 <= found["evaluation"]["accuracy"]["copied"] <= 1


@pytest.mark.usefixtures("recipe")
def test_a_recipe_is_a_module_and_an_entry(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert cli.main(["reproduce"]) == 0
    assert "toy" in capsys.readouterr().out
    command = ["reproduce", "toy", "--preset", "smoke", "--jobs", "1"]
    assert cli.main([*command, "--out", str(tmp_path), "--results", str(tmp_path / "kept")]) == 0
    records = read_records(tmp_path / "kept" / "toy" / "smoke.jsonl")
    assert [record.arm.label for record in records] == ["window 2", "window 3"]
    (claim,) = claims(records)
    assert (
        f"| Copies | nothing | {claim.ours} | a toy | **not shown** |" in (tmp_path / "toy/smoke/report.md").read_text()
    )


class Reversed(KVShift):
    """An attention's shift module that reverses the dimensions of each value head."""

    def __init__(self, num_kv_heads: int) -> None:
        super().__init__(num_kv_heads, ShiftOptions(targets=()))

    def forward(self, q, k, v, **where):
        return super().forward(q, k, v.flip(-1), **where)


@strict
class ReversedConfig(UncachedConfig, KVShiftLlamaConfig):
    model_type = "toy_reversed"
    loaded_by = "lab.tests.test_extending.ReversedLlama"


class ReversedLlama(UncachedGeneration, KVShiftLlamaForCausalLM):
    config_class = ReversedConfig

    def __init__(self, config: ReversedConfig) -> None:
        super().__init__(config)
        prepend_class(self.model, UncachedDecoder)
        for layer in self.model.layers:
            layer.self_attn.shift = Reversed(config.num_key_value_heads)


@pytest.fixture
def variant(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kvshift_lab.variants.upside_down")
    models = {KVShiftLlamaConfig: ReversedLlama}
    module.MODEL_VARIANTS = (ModelVariant(name="upside-down", models=models),)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(
        VARIANTS, "upside-down", VariantEntry("upside-down", "reversed values", "#000000", "upside_down")
    )


@pytest.mark.usefixtures("task", "variant")
def test_a_variant_is_a_module_and_a_line(tmp_path: Path, capsys: pytest.CaptureFixture):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number * number} is the square of {number}.\n" for number in range(300)))
    small = ["--steps", "2", "--batch-size", "2", "--eval-rows", "3", "--report-to", "--device", "cpu"]
    small += ["--model.hidden-size", "12", "--model.num-attention-heads", "2", "--data.vocab-size", "281"]
    command = ["train", "--model.variant", "upside-down", "--data.corpus", str(text), "--data.sequence-length", "17"]
    assert cli.main([*command, *small, "--out", str(tmp_path / "run")]) == 0
    assert "reversed values: " in capsys.readouterr().err
    assert read_run(tmp_path / "run").name == "reversed values"
    assert cli.main(["generate", str(tmp_path / "run"), "--prompt", "7 is", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("7 is")
    config = TaskTrainConfig(
        out=tmp_path / "task", task=CopyConfig(), model=GPT2Options(variant="upside-down"), steps=1, device="cpu"
    )
    with pytest.raises(LabError, match=r"model\.variant upside-down does not support model_type kvshift_lab_gpt2; it"):
        train_task(config)
