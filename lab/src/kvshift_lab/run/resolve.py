"""Resolve the options of a run: fill in, once, what depends on the machine, on the data, or on the start model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from kvshift_lab.core.messages import no_log
from kvshift_lab.core.options import to_json
from kvshift_lab.data.text import TextData, load_text_data
from kvshift_lab.data.tokenizers import vocab_size_of
from kvshift_lab.run.pretrained import Pretrained, find_pretrained, fitting_config, with_tokenizer
from kvshift_lab.run.processes import Processes
from kvshift_lab.run.resume import resolved_model
from kvshift_lab.run.train_config import RunConfig, TrainConfig
from kvshift_lab.variants.building import llama_config
from kvshift_lab.variants.by_name import resolve_variant

_Config = TypeVar("_Config", bound=RunConfig)


@dataclass(frozen=True)
class ResolvedRun:
    """A run on text whose options are all known.

    Attributes:
        config: the options, resolved.
        options: the options as JSON, with the model's values in place of those that were not given.
        data: sequences and tokenizer.
        model_config: configuration of the model.
        source: the model to start from, or None.
        accumulation: number of forward passes of each device per optimizer step.
    """

    config: TrainConfig
    options: dict[str, Any]
    data: TextData
    model_config: Any
    source: Pretrained | None
    accumulation: int


def resolve(config: TrainConfig, processes: Processes, *, tokenizer: Path, log: Callable[[str], Any]) -> ResolvedRun:
    """Find the start model, load the data, and resolve all options of a run on text.

    Args:
        config: options of the run, as given.
        processes: processes of the run, all of which must call this function.
        tokenizer: folder from which the tokenizer is loaded, or in which it is created.
        log: reports which checkpoint of an unfinished run is used to start from.

    Raises:
        LabError: an option contradicts the model or the data, or the data cannot be read.
    """
    source = None if config.init_from is None else find_pretrained(config.init_from, log)
    accumulation = config.accumulation(processes.count)
    config = resolve_defaults(
        config,
        data=config.data if source is None else with_tokenizer(source, config.data),
        tokens_per_step=accumulation * config.batch_size * config.data.sequence_length * processes.count,
    )
    data = _load(config, tokenizer, processes)
    model_config = _model_config(config, source, vocab_size=vocab_size_of(data.tokenizer))
    model_config.bos_token_id = cast(int | None, data.tokenizer.bos_token_id)
    model_config.eos_token_id = cast(int | None, data.tokenizer.eos_token_id)
    options = to_json(config)
    options["model"] |= resolved_model(model_config)
    return ResolvedRun(config, options, data, model_config, source, accumulation)


def expected_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options as JSON, resolved as far as neither the data nor the devices are needed for it."""
    warmup = dataclasses.replace(config.optimizer, warmup_steps=config.warmup_steps)
    config = dataclasses.replace(config, model=resolve_variant(config.model), optimizer=warmup)
    source = None if config.init_from is None else find_pretrained(config.init_from, no_log)
    options = to_json(config)
    options["model"] |= resolved_model(_model_config(config, source, vocab_size=config.model.vocab_size or 1))
    if options["model"]["vocab_size"] == 1:  # it is that of the tokenizer
        options["model"]["vocab_size"] = config.model.vocab_size
    return options


def resolve_defaults(config: _Config, **values: Any) -> _Config:
    """Return the options of a run on text or a task with `values`, and with what variant and machine imply."""
    cpu = uses_cpu(config)
    bf16 = (not cpu and torch.cuda.is_bf16_supported()) if config.bf16 == "auto" else config.bf16 == "yes"
    return dataclasses.replace(
        config,
        model=resolve_variant(cast(Any, config).model),
        bf16="yes" if bf16 else "no",
        device="cpu" if cpu else "cuda",
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=config.warmup_steps),
        **values,
    )


def uses_cpu(config: RunConfig) -> bool:
    """Return True if the run uses the CPU."""
    return config.device == "cpu" or not torch.cuda.is_available()


def _model_config(config: TrainConfig, source: Pretrained | None, *, vocab_size: int) -> Any:
    """Return the configuration of the model, which starts from `source` if there is one."""
    size: dict[str, Any] = {"vocab_size": vocab_size, "sequence_length": config.data.sequence_length}
    return fitting_config(source, config.model, **size) if source else llama_config(config.model, **size)


def _load(config: TrainConfig, tokenizer: Path, processes: Processes) -> TextData:
    """Load the data in the first process, which trains the tokenizer and fills the cache, and then in the others."""
    loaded: list[TextData] = []

    def load() -> None:
        loaded.append(load_text_data(config.data, seed=config.seed, tokenizer_folder=tokenizer))

    processes.main_first(load)
    if not processes.is_main:
        load()
    return loaded[0]
