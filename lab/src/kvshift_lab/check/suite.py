"""The check of a model for all properties, or for a selection."""

from __future__ import annotations

import copy
import platform
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import kvshift
from kvshift import KVShift
from kvshift_lab.check.findings import Comparison, NotSupportedError, Report, Verdict, WrongShapeError, origin
from kvshift_lab.check.properties import PROPERTIES
from kvshift_lab.check.subject import Subject, evaluation_mode
from kvshift_lab.core.environment import environment

_WINDOWS = ("sliding_window", "attention_window_size")  # configuration fields
_CHUNKS = ("attention_chunk_size", "mamba_chunk_size", "chunk_size", "block_size")


def check_model(
    model: Any,
    tokenizer: Any = None,
    *,
    properties: Sequence[str] | None = None,
    length: int = 24,
    dtype: torch.dtype | None = None,
    seed: int = 0,
    log: Callable[[Verdict], Any] = lambda verdict: None,
) -> Report:
    """Check a causal language model of transformers at its edges: documents, padding, caches, generation, causality.

    Each property compares logits, position by position, with a simple reference: the sequence alone, without a cache,
    in one forward pass. A difference counts as wrong if it exceeds the effect of rounding, which is measured for this
    model.

    Args:
        model: a model whose `forward` takes input_ids and that has `generate`; of a PEFT model, the wrapped model is
            checked, adapters included. Training mode, configuration, generation_config and the random number
            generators are restored afterwards.
        tokenizer: its special tokens are excluded from the random tokens; None: those of the configuration are.
        properties: names from `PROPERTIES`; None: all.
        length: number of tokens in the longest sequences, 12 or more. They do not reach longer windows and chunks; the
            report notes these.
        dtype: dtype of the check; None: float32 for a model in half precision, else the model's dtype. If it differs
            from the model's dtype, a copy is checked.
        seed: seed of the random tokens.
        log: function that is called with each verdict as soon as it is known.

    Raises:
        TypeError: the model is not a causal language model of transformers.
        ValueError: properties or length are wrong, or the model is spread over several devices.
    """
    chosen = _select_properties(properties)
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    _require_causal(model)
    text = model.config.get_text_config(decoder=True)
    _require_length(length, text)
    notes = [
        f"{name}={value} is not reached by sequences of {length} tokens"
        for name in (*_WINDOWS, *_CHUNKS)
        if isinstance(value := getattr(text, name, None), int) and value >= length
    ]
    named = ((name, module) for name, module in model.named_modules() if ".original_module" not in name)  # PEFT's copy
    if idle := sum(_shifts_nothing_yet(module) for _, module in named):
        notes.append(f"the shift of {idle} layers gives earlier tokens no weight yet: its faults cannot be seen")
    own = model.dtype
    wanted = dtype or (torch.float32 if own in (torch.bfloat16, torch.float16) else own)
    if wanted != own and not getattr(model, "is_quantized", False):
        notes.append(f"checked in {_short(wanted)}; the model is in {_short(own)}")
        model = copy.deepcopy(model).to(wanted)
    verdicts = []
    with evaluation_mode(model):
        subject = Subject(model, length, seed, _special_tokens(model, tokenizer))
        if subject.tolerance > subject.spread / 100:
            notes.append(f"errors below {subject.tolerance:.2g} cannot be distinguished from rounding or chance")
        for name in chosen:
            verdicts.append(_verdict(subject, name))
            log(verdicts[-1])
    return Report(
        model=type(model).__name__,
        model_type=str(model.config.model_type),
        attn_implementation=str(model.config._attn_implementation),
        dtype=_short(model.dtype),
        device=str(model.device),
        length=length,
        spread=subject.spread,
        noise=subject.noise,
        tolerance=subject.tolerance,
        verdicts=verdicts,
        notes=notes,
        versions={"kvshift": kvshift.__version__, "python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers")},
    )


def report_with_environment(report: Report, device: torch.device) -> dict[str, Any]:
    """Return the report as JSON values, with the environment in which it was made."""
    found = environment(device, processes=1)
    return {**report.as_dict(), **found, "versions": {**found["versions"], **report.versions}}


def _verdict(subject: Subject, name: str) -> Verdict:
    subject.result, raised = Comparison(subject.tolerance), None
    subject.reseed()
    try:
        PROPERTIES[name](subject)
    except Exception as error:  # an error of the model is a result; an error of this package is not
        ours = Path(origin(error).filename).parent == Path(__file__).parent
        if ours and not isinstance(error, (NotSupportedError, WrongShapeError)):
            raise
        raised = error
    return subject.result.verdict(name, subject.spread, raised)


def _shifts_nothing_yet(module: Any) -> bool:
    """Return whether a module is a shift whose coefficients of earlier tokens are all 0, as after `add_kv_shift`."""
    return (
        isinstance(module, KVShift)
        and len(module.targets) > 0
        and not any(each[:, 1:].any() for each in module.coefficients().values())
    )


def _select_properties(properties: Sequence[str] | None) -> list[str]:
    unknown = [name for name in properties or () if name not in PROPERTIES]
    if unknown or (properties is not None and not properties):
        raise ValueError(f"properties must be one or more of {'; '.join(PROPERTIES)}, got {list(properties or ())}")
    return [name for name in PROPERTIES if properties is None or name in properties]


def _require_causal(model: Any) -> None:
    name = type(model).__name__
    generates = getattr(model, "can_generate", None)
    if generates is None or not generates() or not hasattr(model, "get_input_embeddings"):
        raise TypeError(f"model must be a causal language model of transformers, which can generate; got {name}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise TypeError(f"model must be a causal language model without an encoder, got {name}")
    if len({parameter.device for parameter in model.parameters()}) > 1:
        raise ValueError(f"model must be on one device, got {name} spread over several")


def _require_length(length: int, config: Any) -> None:
    if length < 12:
        raise ValueError(f"length must be 12 or more, got {length}")
    most = getattr(config, "max_position_embeddings", None)
    if isinstance(most, int) and 0 <= most < 2 * length + 16:  # XLNet has no limit, which it calls -1
        raise ValueError(
            f"length must be at most {(most - 16) // 2} for a model with max_position_embeddings={most}, got {length}"
        )


def _special_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids of tokens with a special meaning, and of rows of the embedding that belong to no token."""
    if tokenizer is not None:
        size = model.get_input_embeddings().weight.shape[0]
        return [*tokenizer.all_special_ids, *range(len(tokenizer), size)]
    fields = chain(vars(model.config).items(), vars(model.config.get_text_config()).items())
    values = [value for name, value in fields if name.endswith(("_token_id", "_token_index"))]
    return [token for value in values if value is not None for token in (value if isinstance(value, list) else [value])]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
