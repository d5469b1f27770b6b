"""Does KV shift help a model pretrained without it? Coefficients, LoRA or both are trained for a few minutes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

from kvshift_lab.core.atomic import remove_folder, write_json
from kvshift_lab.core.errors import LabError
from kvshift_lab.data.config import DataConfig, find_shared
from kvshift_lab.data.text import load_text_data
from kvshift_lab.recipes.retrofit import ENTRY
from kvshift_lab.recipes.retrofit.held_out import HeldOut, measure
from kvshift_lab.recipes.retrofit.retrofit_claims import ALL, BOTH, CONTROL, LORA, NOTHING, claims, plot, tables
from kvshift_lab.runs.folder import RunFolder
from kvshift_lab.runs.loading import load_tokenizer, load_weights
from kvshift_lab.runs.smollm2 import find_smollm2
from kvshift_lab.study.arm import Arm
from kvshift_lab.study.jobs import Computation, TextJob
from kvshift_lab.study.recipe import Job, Recipe
from kvshift_lab.training.train_config import OptimizerConfig, TrainConfig, config_hash
from kvshift_lab.variants.building import build_model, llama_config
from kvshift_lab.variants.model_config import ModelConfig

SMOLLM2 = "smollm2"  # placeholder for the model's folder, which differs between machines
PARTS: Mapping[str, Any] = {ALL: "shift", CONTROL: "current", LORA: "lora", BOTH: "shift+lora"}

WIKI, BOOKS = "wiki2014-en", "classic-books"
_SHIFT = ModelConfig(shift_targets=("k", "v"), shift_init="identity")

LAPTOP = TrainConfig(
    out=Path(),
    init_from=SMOLLM2,
    model=_SHIFT,
    data=DataConfig(
        corpus=f"{WIKI}/train-00.jsonl.xz", validation=f"{WIKI}/valid.jsonl.xz", vocab_size=49_152, sequence_length=256
    ),
    optimizer=OptimizerConfig(warmup_steps=4, weight_decay=0.0),
    steps=96,
    batch_size=4,
    eval_every=24,
    eval_rows=16,
    save_every=12,
    log_every=8,
    report_to=(),
    progress=False,
)
PAPER = replace(
    LAPTOP,
    data=replace(LAPTOP.data, corpus=f"{WIKI}/train-*.jsonl.xz", sequence_length=1024),
    optimizer=replace(LAPTOP.optimizer, warmup_steps=50),
    steps=1000,
    batch_size=8,
    eval_every=100,
    eval_rows=128,
)
LONGER = replace(
    LAPTOP, optimizer=replace(LAPTOP.optimizer, learning_rate=8e-3), steps=3 * LAPTOP.steps, eval_every=LAPTOP.steps
)
SMOKE = replace(
    LAPTOP,
    init_from=None,
    model=replace(_SHIFT, hidden_size=16, num_attention_heads=2),
    data=DataConfig(vocab_size=257, sequence_length=16),
    optimizer=OptimizerConfig(warmup_steps=1, weight_decay=0.0),
    steps=8,
    batch_size=2,
    eval_every=2,
    eval_rows=4,
    save_every=4,
    log_every=2,
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """The training options of a preset, its measurements and the parts that it trains."""

    config: TrainConfig
    held_out: HeldOut
    parts: Sequence[str] = tuple(PARTS)


_TEXTS = ((WIKI, f"{WIKI}/valid.jsonl.xz"), (BOOKS, f"{BOOKS}/valid.jsonl.xz"))
_MINUTES = HeldOut(texts=_TEXTS, sequences=48, begin=16)
SIZES = {
    "paper": Size(config=PAPER, held_out=HeldOut(texts=_TEXTS, sequences=256, begin=128, sequence_length=1024)),
    "laptop": Size(config=LAPTOP, held_out=_MINUTES),
    "longer": Size(config=LONGER, held_out=_MINUTES, parts=(ALL, CONTROL)),
    "smoke": Size(
        config=SMOKE,
        held_out=HeldOut(
            texts=(("tinyshakespeare", "tinyshakespeare"),), sequences=6, begin=4, sequence_length=16, repeated=2
        ),
    ),
}
TUNING = 4  # runs of the learning-rate search take 1 / TUNING of the steps


@dataclass(frozen=True, kw_only=True)
class Untrained:
    """Options of the measurement before any training, of the model that `config` starts from."""

    config: TrainConfig
    held_out: HeldOut


@dataclass(frozen=True, kw_only=True)
class RetrofitJob(TextJob):
    """Train a part of a model, then measure the model on held-out text. Its weights are not kept.

    Attributes:
        held_out: the data of the measurement; None: nothing is measured, as in runs of the learning-rate search.
    """

    held_out: HeldOut | None = field(default=None)

    def tuning(self, rate: float, *, steps: int | None = None) -> Self:
        """See `RunJob`; the run is shorter, is evaluated once at its end, and is not measured on held-out text."""
        job = super().tuning(rate, steps=steps)
        shorter = max(1, job.config.steps // TUNING)
        return replace(job, held_out=None, config=replace(job.config, steps=shorter, eval_every=shorter))

    def is_finished(self, out: Path) -> bool:
        """See `Job`; raise a LabError early if the model or the text is not on this machine."""
        self._with_local_paths()
        return super().is_finished(out) and (self.held_out is None or (out / _MEASURED).exists())

    def run(self, out: Path) -> None:
        super().run(out)
        if self.held_out is not None and not (out / _MEASURED).exists():
            model, tokenizer = load_weights(out / "model"), load_tokenizer(out / "model")
            write_json(out / _MEASURED, measure(model, tokenizer, _with_local_texts(self.held_out)))
        remove_folder(out / "model")

    def on_bundled_text(self) -> Self:
        """Return this job: the model was pretrained on real text and may have seen the small bundled corpus."""
        return self

    def record(self, out: Path) -> dict[str, Any]:
        """See `Job`; add the measurements, and replace local paths of model and tokenizer by their names."""
        measured = {} if self.held_out is None else RunFolder(out).read(out / _MEASURED)
        if measured is None:
            raise LabError(f"{out} contains a finished run, but no {_MEASURED}")
        found = super().record(out)
        data = found["options"]["data"] | {"tokenizer": self.config.data.tokenizer}
        options = found["options"] | {"init_from": self.config.init_from, "data": data}
        digits = config_hash({name: value for name, value in options.items() if name != "data_facts"})
        return {**found, "options": options, "config_hash": digits, "result": {**found["result"], **measured}}

    def _with_local_paths(self) -> TrainConfig:
        config = super()._with_local_paths()
        return replace(config, init_from=str(find_smollm2())) if config.init_from == SMOLLM2 else config


_MEASURED = "measured.json"


def _with_local_texts(held_out: HeldOut) -> HeldOut:
    """Return the options with the paths of the texts on this machine."""
    return replace(held_out, texts=tuple((name, cast(str, find_shared(text))) for name, text in held_out.texts))


def measure_untrained(work: Untrained) -> dict[str, Any]:
    """Measure the model before training; see `measure`."""
    config = work.config
    if config.init_from is not None:
        folder = find_smollm2()
        return measure(load_weights(folder), load_tokenizer(folder), _with_local_texts(work.held_out))
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer = load_text_data(config.data, seed=config.seed, tokenizer_folder=Path(scratch)).tokenizer
    size = llama_config(config.model, vocab_size=len(tokenizer), sequence_length=config.data.sequence_length)
    return measure(build_model(size, seed=config.seed), tokenizer, work.held_out)


def arms(preset: str) -> list[Job]:
    """Return a job for each part (seeds are those of data order and LoRA weights), and one for the base model."""
    size = SIZES[preset]
    untrained = Untrained(config=size.config, held_out=size.held_out)
    return [
        *(
            RetrofitJob(arm=Arm(case=label), config=replace(size.config, tune=PARTS[label]), held_out=size.held_out)
            for label in size.parts
        ),
        Computation(arm=Arm(case=NOTHING), config=untrained, function=measure_untrained),
    ]


RECIPE = Recipe(
    entry=ENTRY,
    source="No figure of the paper: its models were trained with the shift from the start",
    arms=arms,
    plot=plot,
    claims=claims,
    tables=tables,
)
