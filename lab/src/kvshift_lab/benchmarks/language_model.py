"""Parts "train", "prefill" and "decode": whole language models compared with transformers' own.

train: forward, backward and AdamW; prefill: a prompt into a cache; decode: a token of greedy generation with a cache.
The models of a case have the same values in all parameters that they share.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvshift.layers import param_groups
from kvshift.models.llama import SIZES, KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift.ops import dispatch
from kvshift_lab.benchmarks.cases import Case, Implementation, Session
from kvshift_lab.benchmarks.float64_parity import SLICE, compare_tensors, gradients, to_reference, use_backend
from kvshift_lab.benchmarks.presets import ModelSize
from kvshift_lab.study.cost import count_parameters, training_memory

THEIRS, WITHOUT, OURS = "transformers' Llama", "without shift", "kv shift"
PLAIN = "kv shift, plain operations"
_PROMPT = 16

Make = Callable[[Any], Implementation]


def train_cases(session: Session) -> Iterator[Case]:
    """Yield two cases per model, the second comparing kernels with plain operations; on CUDA also compiled."""
    for size in session.preset.models:
        for compiled in (False, True) if session.compiled and session.device.type == "cuda" else (False,):
            way = ", compiled" if compiled else ""
            make = _training(session, size, compiled=compiled)
            yield _case(session, "train", size, way, make, compiled=compiled)
            yield _case(session, "train", size, f"{way}, kernel", make, compiled=compiled, names=(PLAIN, OURS))


def prefill_cases(session: Session) -> Iterator[Case]:
    """Yield a case for each model of the preset."""
    for size in session.preset.models:
        yield _case(session, "prefill", size, "", _prefill(size))


def decode_cases(session: Session) -> Iterator[Case]:
    """Yield a case for each model; on CUDA also for 8 sequences, and with a static cache, uncompiled and compiled."""
    for size in session.preset.models:
        for batch in (1, 8) if session.device.type == "cuda" else (1,):
            alone = replace(size, batch=batch, length=size.tokens)
            yield _case(session, "decode", alone, "", _decoding(alone))
            if session.device.type == "cuda":
                static = {"cache_implementation": "static"}
                make = _decoding(alone, **static, disable_compile=True)
                yield _case(session, "decode", alone, ", static cache", make)
                if session.compiled:
                    yield _case(session, "decode", alone, ", static cache, compiled", _decoding(alone, **static))


def model_fields(size: ModelSize) -> dict[str, Any]:
    """Return the fields of the model's configuration."""
    return {**({} if size.size is None else SIZES[size.size]), **size.fields}


def implementations(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the implementations, baseline first; transformers' Llama is excluded with QK-norm, which it lacks."""
    return (WITHOUT, OURS) if fields.get("qk_norm") else (THEIRS, WITHOUT, OURS)


def _case(
    session: Session,
    part: str,
    size: ModelSize,
    way: str,
    make: Make,
    *,
    compiled: bool = False,
    names: Sequence[str] = (),
) -> Case:
    fields = model_fields(size)
    if size.fit_memory and part == "train":
        fields["num_hidden_layers"] = _fitting_layers(session, size, fields)
    elif size.fit_memory and session.layers is not None:
        fields["num_hidden_layers"] = min(session.layers, fields["num_hidden_layers"])
    names = names or implementations(fields)
    shape = [size.batch, size.length]
    dtype = str(size.dtype).removeprefix("torch.")
    layers = fields["num_hidden_layers"]

    def build() -> dict[str, Callable[[], Implementation]]:
        torch.compiler.reset()
        weights: dict[str, Tensor] = {}

        def implementation(name: str) -> Implementation:
            model = build_llama(name, fields, size.dtype, session.device)
            if compiled and name == PLAIN:
                use_backend("eager", model)
            if weights:
                model.load_state_dict(weights, strict=False)
            else:
                weights.update(model.state_dict())
            made = make(model)
            return _with_eager_backend(made) if name == PLAIN and not compiled else made

        return {name: functools.partial(implementation, name) for name in names}

    return Case(
        part=part,
        name=f"{size.name}, {layers} layers, {tuple(shape)}, {dtype}{way}",
        baseline=names[0],
        build=build,
        facts={"model": size.name, "layers": layers, "shape": shape, "dtype": dtype, "way": way.removeprefix(", ")},
        clock=session.wall_clock,
        rounds=session.model_rounds,
    )


def _with_eager_backend(made: Implementation) -> Implementation:
    """Return the implementation with the backend "eager"; it differs in nothing else (recomputation included)."""
    eager: Any = patch.object(dispatch, "_AUTO", "eager")
    return replace(made, run=eager(made.run), check=eager(made.check))


def build_llama(
    name: str,
    fields: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    classes: tuple[type, type] = (LlamaForCausalLM, KVShiftLlamaForCausalLM),
) -> Any:
    """Build the model of an implementation; `classes` are transformers' and ours, with or without a head."""
    theirs, ours = classes
    torch.manual_seed(0)
    with device:
        if name == THEIRS:
            model = theirs(LlamaConfig(**fields))
        else:
            model = ours(KVShiftLlamaConfig(**fields, shift_targets=() if name == WITHOUT else ("k", "v")))
    return model.to(dtype)


def _reference_model(model: Any) -> Any:
    """Return our model in float64 with the reference shift and the weights of `model`, which may be transformers'."""
    fields = {name: value for name, value in model.config.to_dict().items() if name not in ("model_type", "dtype")}
    with model.device:
        exact = to_reference(KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**{"shift_targets": (), **fields})))
    exact.load_state_dict(model.state_dict())
    return exact.double().train(model.training)  # the coefficients of a checkpoint load in float32


def _fitting_layers(session: Session, size: ModelSize, fields: dict[str, Any]) -> int:
    """Return the largest depth at which three models, their optimizers and the check in float64 fit in memory."""
    most = fields["num_hidden_layers"]
    if session.layers is not None:
        return min(session.layers, most)
    if session.device.type != "cuda":
        return most
    free = 0.85 * torch.cuda.mem_get_info(session.device)[0]

    def needed(layers: int) -> float:
        config = KVShiftLlamaConfig(**{**fields, "num_hidden_layers": layers})
        memory = training_memory(config, rows=size.batch, sequence_length=size.length)
        weights = count_parameters(config).total * (3 * 4 * size.dtype.itemsize + 2 * 8)
        return weights + memory.kept + memory.working

    return max((layers for layers in range(1, most + 1) if needed(layers) <= free), default=1)


def _ids(model: Any, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    # Without 0, which `generate` treats as padding.
    return torch.randint(1, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def _training(session: Session, size: ModelSize, *, compiled: bool) -> Make:
    def make(model: Any) -> Implementation:
        model.train()
        ids = _ids(model, size.batch, size.length)
        call = torch.compile(model, dynamic=False) if compiled else model
        fused = session.device.type == "cuda"
        optimizer = torch.optim.AdamW(param_groups(model, lr=1e-4), fused=fused)

        def check() -> dict[str, Any]:
            labels = torch.full_like(ids, -100)
            labels[SLICE] = ids[SLICE]
            exact = _reference_model(model)
            names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
            results = []
            for path, tokens, targets in ((call, ids, labels), (exact, ids[SLICE], labels[SLICE])):
                loss = path(input_ids=tokens, labels=targets, use_cache=False).loss
                loss.backward()
                owner = model if path is call else exact
                results.append({"loss": loss.detach(), **gradients(owner, names)})
            return compare_tensors(results[0], results[1], size.dtype)

        def step(_: int) -> None:
            call(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        weights = sum(parameter.nbytes for parameter in model.parameters())
        return Implementation(run=step, check=check, resident_bytes=3 * weights)

    return make


def _prefill(size: ModelSize) -> Make:
    def make(model: Any) -> Implementation:
        model.eval()
        ids = _ids(model, size.batch, size.length)

        @torch.no_grad()
        def logits_at(model: Any, ids: Tensor, position: int) -> Tensor:
            keep = torch.tensor([position], device=ids.device)
            return model(input_ids=ids, use_cache=True, logits_to_keep=keep).logits

        def check() -> dict[str, Any]:
            few = ids[SLICE]
            last = few.shape[1] - 1
            found = logits_at(model, ids, last)[SLICE[0]]
            return compare_tensors(
                {"logits": found}, {"logits": logits_at(_reference_model(model), few, last)}, size.dtype
            )

        return Implementation(run=lambda _: logits_at(model, ids, ids.shape[1] - 1), check=check)

    return make


def _decoding(size: ModelSize, **more: Any) -> Make:
    def make(model: Any) -> Implementation:
        model.eval()
        prompt = _ids(model, size.batch, _PROMPT)
        options: dict[str, Any] = {
            "do_sample": False,
            "max_new_tokens": size.tokens,
            "min_new_tokens": size.tokens,
            "pad_token_id": 0,
            **more,
        }

        def check() -> dict[str, Any]:
            out = model.generate(prompt, **options, output_logits=True, return_dict_in_generate=True)
            found = torch.stack(out.logits, dim=1)
            with torch.no_grad():  # the exact model reads the generated tokens
                exact = _reference_model(model)(input_ids=out.sequences[:, :-1], use_cache=False).logits
            return compare_tensors({"logits": found}, {"logits": exact[:, _PROMPT - 1 :]}, size.dtype)

        return Implementation(run=lambda _: model.generate(prompt, **options), check=check, per_call=size.tokens)

    return make
