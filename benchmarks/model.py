"""Measure whole language models beside transformers' Llama: a training step, a prompt, a token of generation.

    python benchmarks/model.py [train] [prefill] [decode] [--preset laptop] [--layers 8] [--out FOLDER]

train: forward, backward and AdamW; then the same with plain operations in place of the kernels, which is the baseline
of those rows. prefill: a prompt into a cache. decode: a token of greedy generation with a cache; on CUDA also for 8
sequences, and with a static cache, uncompiled and compiled. The models of a case have the same values in all parameters
that they share, and each is compared with itself in float64 before it is timed (`exact.py`). The shape of 0.2B has
QK-norm, which transformers' Llama lacks: there the baseline is ours without shift.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from exact import SLICE, compare, to_reference, use_backend
from timing import Benchmark, Implementation, arguments, positive
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvshift import param_groups
from kvshift.models.llama import SIZES as PAPER
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM

THEIRS, WITHOUT, OURS = "transformers' Llama", "without shift", "kv shift"
PLAIN = "kv shift, plain operations"
PROMPT = 16
# About a million parameters per layer: two cores train it in under a second per step.
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
}
WIDER = {**SMALL, "hidden_size": 512, "intermediate_size": 1376, "num_attention_heads": 8}
TINY = {**SMALL, "vocab_size": 61, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2}
# Name, configuration, (batch, length) of training and prompts, tokens to decode; dtype, rounds.
SIZES: dict[str, Any] = {
    "smoke": ([("tiny Llama", TINY, (2, 37), 5)], "float32", 2),
    "laptop": ([("small Llama", SMALL, (8, 512), 64), ("wider Llama", WIDER, (4, 512), 64)], "float32", 30),
    "paper": ([("2.9B", PAPER["2.9B"], (2, 4096), 64), ("0.2B", PAPER["0.2B"], (8, 4096), 64)], "bfloat16", 20),
}

Make = Callable[[Any], Implementation]


def names_of(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the implementations, baseline first."""
    return (WITHOUT, OURS) if fields.get("qk_norm") else (THEIRS, WITHOUT, OURS)


def build(name: str, fields: Mapping[str, Any], dtype: torch.dtype, device: torch.device, *classes: Any) -> Any:
    """Build the model of an implementation; `classes` are transformers' and ours, by default with a head."""
    theirs, ours = classes or (LlamaForCausalLM, KVShiftLlamaForCausalLM)
    torch.manual_seed(0)
    with device:
        if name == THEIRS:
            return theirs(LlamaConfig(**fields)).to(dtype)
        return ours(KVShiftLlamaConfig(**fields, shift_targets=() if name == WITHOUT else ("k", "v"))).to(dtype)


def to_exact(model: Any) -> Any:
    """Return our model in float64 with the reference shift and the weights of `model`, which may be transformers'."""
    fields = {name: value for name, value in model.config.to_dict().items() if name not in ("model_type", "dtype")}
    with model.device:
        exact = to_reference(KVShiftLlamaForCausalLM(KVShiftLlamaConfig(**{"shift_targets": (), **fields})))
    exact.load_state_dict(model.state_dict())
    return exact.double().train(model.training)  # the coefficients of a checkpoint load in float32


def draw(model: Any, batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    # Without 0, which `generate` treats as padding.
    return torch.randint(1, model.config.vocab_size, (batch, length), generator=generator).to(model.device)


def training(shape: tuple[int, int], compiled: bool, model: Any) -> Implementation:
    model.train()
    ids = draw(model, *shape)
    call = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-4), fused=model.device.type == "cuda")

    def check() -> float:
        labels = torch.full_like(ids, -100)
        labels[SLICE] = ids[SLICE]
        exact = to_exact(model)
        results = []
        for run, owner, tokens, targets in ((call, model, ids, labels), (exact, exact, ids[SLICE], labels[SLICE])):
            loss = run(input_ids=tokens, labels=targets, use_cache=False).loss
            loss.backward()
            found = {f"gradient of {name}": part.grad for name, part in owner.named_parameters() if part.requires_grad}
            results.append({"loss": loss.detach(), **found})
            owner.zero_grad()
        return compare(*results, model.dtype)

    def step(_: int) -> None:
        call(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    weights = sum(parameter.nbytes for parameter in model.parameters())
    return Implementation(run=step, check=check, resident_bytes=3 * weights)


def prefill(shape: tuple[int, int], model: Any) -> Implementation:
    model.eval()
    ids = draw(model, *shape)

    @torch.no_grad()
    def logits_at(model: Any, ids: Tensor, position: int) -> Tensor:
        keep = torch.tensor([position], device=ids.device)
        return model(input_ids=ids, use_cache=True, logits_to_keep=keep).logits

    def check() -> float:
        few = ids[SLICE]
        last = few.shape[1] - 1
        found, exact = logits_at(model, ids, last)[SLICE[0]], logits_at(to_exact(model), few, last)
        return compare({"logits": found}, {"logits": exact}, model.dtype)

    return Implementation(run=lambda _: logits_at(model, ids, ids.shape[1] - 1), check=check)


def decoding(batch: int, tokens: int, more: Mapping[str, Any], model: Any) -> Implementation:
    model.eval()
    prompt = draw(model, batch, PROMPT)
    count = {"max_new_tokens": tokens, "min_new_tokens": tokens}
    generate = functools.partial(model.generate, prompt, do_sample=False, pad_token_id=0, **count, **more)

    def check() -> float:
        out = generate(output_logits=True, return_dict_in_generate=True)
        with torch.no_grad():  # the exact model reads the generated tokens
            exact = to_exact(model)(input_ids=out.sequences[:, :-1], use_cache=False).logits
        return compare({"logits": torch.stack(out.logits, dim=1)}, {"logits": exact[:, PROMPT - 1 :]}, model.dtype)

    return Implementation(run=lambda _: generate(), check=check, per_call=tokens)


def main() -> None:
    parser = arguments(__doc__ or "")
    parts = ("train", "prefill", "decode")
    parser.add_argument("parts", nargs="*", default=parts, help="some of train, prefill and decode (default: all)")
    parser.add_argument(
        "--layers", type=positive, default=8, help="most layers of a model of the paper's sizes (default: 8)"
    )
    options = parser.parse_args()
    if not {*options.parts} <= {*parts}:
        parser.error(f"parts must be some of {', '.join(parts)}, got {' '.join(options.parts)}")
    bench, (sizes, dtype, rounds) = Benchmark(options), SIZES[options.preset]
    on_gpu = bench.device.type == "cuda"

    def case(part: str, size: Any, way: str, make: Make, names: tuple[str, ...] = (), compiled: bool = False) -> None:
        name, fields, shape = size[:3]
        fields = dict(fields)
        if options.preset == "paper":
            fields["num_hidden_layers"] = min(options.layers, fields["num_hidden_layers"])
        weights: dict[str, Tensor] = {}

        def implementation(name: str) -> Implementation:
            model = build(name, fields, getattr(torch, dtype), bench.device)
            if name == PLAIN:
                use_backend("eager", model)
            if weights:
                model.load_state_dict(weights, strict=False)
            weights.update({} if weights else model.state_dict())
            return make(model)

        layers = fields["num_hidden_layers"]
        bench.case(
            part,
            f"{name}, {layers} layers, {shape}, {dtype}" + (f", {way}" if way else ""),
            lambda: {name: functools.partial(implementation, name) for name in names or names_of(fields)},
            rounds=options.rounds or rounds,
            model=name,
            layers=layers,
            shape=list(shape),
            dtype=dtype,
            way=way,
        )
        weights.clear()

    for size in sizes if "train" in options.parts else ():
        for compiled in (False, True) if bench.compiled and on_gpu else (False,):
            make = functools.partial(training, size[2], compiled)
            case("train", size, "compiled" if compiled else "", make)
            case("train", size, "compiled, kernel" if compiled else "kernel", make, (PLAIN, OURS))
    for size in sizes if "prefill" in options.parts else ():
        case("prefill", size, "", functools.partial(prefill, size[2]))
    for (*size, tokens), batch in itertools.product(
        sizes if "decode" in options.parts else (), (1, 8) if on_gpu else (1,)
    ):
        generated = (*size[:2], (batch, tokens))
        case("decode", generated, "", functools.partial(decoding, batch, tokens, {}))
        if on_gpu:
            static = {"cache_implementation": "static"}
            eager = {**static, "disable_compile": True}
            case("decode", generated, "static cache", functools.partial(decoding, batch, tokens, eager))
        if on_gpu and bench.compiled:
            case("decode", generated, "static cache, compiled", functools.partial(decoding, batch, tokens, static))
    bench.finish()


if __name__ == "__main__":
    main()
