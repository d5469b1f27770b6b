"""Quantized weights of the projections, and 8-bit keys and values in the cache.

Coefficients and raw keys and values are not quantized. The reference is the model in transformers. With 8-bit integers
its projections call vLLM's kernel instead of computing with the dequantized weights: on a processor without VNNI,
oneDNN's sums of products overflow, in vLLM's own models too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.utils import match_name
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm_cpu
from vllm.outputs import RequestOutput

from kvshift.integrations.vllm_plugin.served_models import ServedBaichuanM1
from kvshift.models import baichuan_m1  # noqa: F401  # registers its classes
from kvshift.models.retrofit import load_kv_shift

from .engines import compared, count, drawn, engine

Checkpoint = Callable[[str], Path]

KINDS = {"int": torch.int8, "float": torch.float8_e4m3fn}
GROUP = 32
"""Number of 4-bit weights along the input that share a scale."""

with_avx512 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="vLLM's kernel for CPUs needs AVX-512"
)


def _of_8_bits(kind: str) -> dict[str, Any]:
    """Return the settings that llm-compressor writes: a scale for each output, and for each token of the input."""
    numbers = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": numbers | {"strategy": "channel", "dynamic": False},
        "input_activations": numbers | {"strategy": "token", "dynamic": True},
    }
    return _COMPRESSED | {"format": f"{kind}-quantized", "config_groups": {"group_0": group}}


_COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}


def _packed(**weights: Any) -> dict[str, Any]:
    """Return the settings that llm-compressor writes for 4-bit weights: `_WEIGHTS`, updated by `weights`."""
    group = {"targets": ["Linear"], "weights": _WEIGHTS | weights}
    return _COMPRESSED | {"format": "pack-quantized", "config_groups": {"group_0": group}}


CONFIGS: dict[str, dict[str, Any]] = {
    "int": _of_8_bits("int"),
    "float": _of_8_bits("float"),
    "compressed": _packed(),
    "compressed, one scale an output": _packed(strategy="channel", group_size=None),
    "compressed, with zero points": _packed(symmetric=False),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}
"""The field `quantization_config` of config.json, by kind of quantization."""


def quantize(folder: Path, out: Path, kind: str, exceptions: Sequence[str] = ("lm_head",)) -> Any:
    """Write the model with quantized projections to `out`, and return its equivalent in transformers."""
    shutil.copytree(folder, out)
    model, weights = AutoModelForCausalLM.from_pretrained(folder).eval(), load_file(folder / "model.safetensors")
    for name, module in model.named_modules():
        if not name.endswith(("_proj", "W_pack")) or any(match_name(name, each) for each in exceptions):
            continue
        weight = weights.pop(f"{name}.weight")
        if kind in KINDS:
            weight, scale = eight_bits(weight, kind)
            tensors = {"weight": weight, "weight_scale": scale}
            project = {"int": by_the_kernel, "float": by_the_numbers}[kind]
            module.forward = project(weight, scale, module.bias)
        else:
            module.weight.data, tensors = four_bits(weight, kind)
        weights |= {f"{name}.{key}": value for key, value in tensors.items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    fields, settings = json.loads((out / "config.json").read_text()), CONFIGS[kind]
    if "ignore" in settings:
        settings = settings | {"ignore": [*exceptions]}
    (out / "config.json").write_text(json.dumps(fields | {"quantization_config": settings}))
    return model


def eight_bits(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Return 8-bit numbers and the scale of each row, which maps its largest number to the largest of that kind."""
    scale = x.abs().amax(-1, keepdim=True) / (127 if kind == "int" else torch.finfo(KINDS[kind]).max)
    numbers = x / scale
    return (numbers.round() if kind == "int" else numbers).to(KINDS[kind]), scale


def four_bits(weight: Tensor, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the numbers that the 4-bit weight (out, in) represents, and its tensors in a checkpoint."""
    groups = weight.unflatten(-1, (-1, weight.shape[1] if "one scale" in kind else GROUP))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    has_zero_points = kind in ("awq", "compressed, with zero points")
    if has_zero_points:  # one of 0 to 15 represents zero
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round().clamp(0, 15)
    else:
        scale = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
        zero = torch.full_like(scale, 8)
    integers = ((groups / scale).round() + zero).clamp(0, 15)
    numbers = ((integers - zero) * scale).flatten(1)
    integers, scale, zero = integers.flatten(1), scale[..., 0].half(), zero[..., 0]
    if kind.startswith("compressed"):
        shape = torch.tensor(weight.shape)
        tensors = {"weight_packed": packed(integers, 1), "weight_scale": scale, "weight_shape": shape}
        return numbers, tensors | ({"weight_zero_point": packed(zero, 0)} if has_zero_points else {})
    scales = scale.t().contiguous()
    if kind == "gptq":  # its files store the zero point minus 1
        groups_of_inputs = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
        zeros = packed(zero.t() - 1, 1)
        return numbers, {
            "qweight": packed(integers.t(), 0),
            "qzeros": zeros,
            "scales": scales,
            "g_idx": groups_of_inputs,
        }
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # the order of eight outputs in AWQ
    qweight, qzeros = (x.t().unflatten(1, (-1, 8))[..., order].flatten(1) for x in (integers, zero))
    return numbers, {"qweight": packed(qweight, 1), "qzeros": packed(qzeros, 1), "scales": scales}


def packed(integers: Tensor, dim: int) -> Tensor:
    """Pack each eight numbers from 0 to 15 along `dim` into a 32-bit integer, the first in the lowest bits."""
    return pack_to_int32((integers - 8).to(torch.int8).contiguous(), 4, packed_dim=dim).contiguous()


def by_the_numbers(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a projection by an 8-bit floating-point weight (out, in), with products and sums in float32."""

    def project(x: Tensor) -> Tensor:
        numbers, scales = eight_bits(x, "float")
        return F.linear(numbers.float(), weight.float()) * scales * scale.t() + (0 if bias is None else bias)

    return project


def by_the_kernel(weight: Tensor, scale: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a projection by an 8-bit integer weight (out, in), computed by vLLM's kernel."""
    handler = ops.create_onednn_scaled_mm(weight.t(), scale, torch.float32, True, False, 32)

    def project(x: Tensor, _owned: Tensor = scale) -> Tensor:  # the kernel needs the scales to stay alive
        numbers, scales, _ = ops.onednn_scaled_int8_quant(x.reshape(-1, x.shape[-1]), None, None, True)
        out = torch.empty(numbers.shape[0], weight.shape[0])
        ops.onednn_scaled_mm(handler, numbers, out, scales, None, None, bias)
        return out.view(*x.shape[:-1], -1)

    return project


def answers(folder: Path, **options: Any) -> list[RequestOutput]:
    """Generate twice from prompts that are computed in chunks and, the second time, hit the prefix cache."""
    start, *ends = drawn(70, *range(1, 40, 3), seed=13)
    with engine(folder, max_num_batched_tokens=48, **options) as running:
        outputs = [output for _ in range(2) for output in running.generate([[*start, *end] for end in ends], tokens=24)]
        assert max(running.chunks(output) for output in outputs) > 1
    assert max(count(outputs)) >= 64
    return outputs


def compare(model: PreTrainedModel, outputs: list[RequestOutput]) -> tuple[Tensor, Tensor]:
    """Return the results of `compared` for the tokens of all answers."""
    likeliest, errors = zip(*[compared(model, output) for output in outputs], strict=True)
    return torch.cat(likeliest), torch.cat(errors)


@pytest.mark.parametrize(("name", "kind"), [("llama-retrofit", "int"), ("qwen3", "int"), ("qwen3", "float")])
def test_weights_of_8_bits(
    name: str, kind: str, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sometimes an input lies so close to the middle between two 8-bit numbers that its last bit decides the rounding.
    So some logprobs deviate more than in a model that is not quantized; the tokens are the same.

    On a processor with AMX, vLLM would take another kernel than the model here, and vLLM 0.32 cannot prepare it unless
    the number of outputs is a multiple of 32.
    """
    monkeypatch.setattr(scaled_mm_cpu, "check_cpu_sgl_kernel", lambda n, k, dtype: False)
    model = quantize(checkpoint(name), tmp_path / "quantized", kind)
    likeliest, errors = compare(model, answers(tmp_path / "quantized"))
    assert likeliest.all()
    assert errors.median() < 1e-5
    assert errors.max() < 0.1


@pytest.mark.parametrize(
    "exceptions", [(), ("re:.*W_pack",), tuple(f"model.layers.{i}.self_attn.W_pack" for i in range(4))]
)
def test_projections_of_baichuan_m1(
    exceptions: tuple[str, ...], checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint names its exceptions by its own names; vLLM's name for `W_pack` is another."""
    monkeypatch.setattr(scaled_mm_cpu, "check_cpu_sgl_kernel", lambda n, k, dtype: False)
    model = quantize(checkpoint("baichuan-m1"), tmp_path / "quantized", "int", ("lm_head", *exceptions))
    with engine(tmp_path / "quantized") as running:
        _, errors = compare(model, running.generate(drawn(*range(1, 20))))
    assert errors.median() < 1e-5
    assert errors.max() < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantized_head_of_baichuan_m1(kind: str) -> None:
    """Loading scales its rows to length 1, which 8-bit numbers with scales of their own cannot represent."""
    numbers, scales = eight_bits(torch.randn(9, 4), kind)
    for name, tensor in {"lm_head.weight": numbers, "lm_head.weight_scale": scales}.items():
        with pytest.raises(ValueError, match=rf"must not be quantized, got {name} of {tensor.dtype}"):
            list(ServedBaichuanM1._renamed([(name, tensor)]))


@with_avx512
@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind not in KINDS])
def test_weights_of_4_bits(kind: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """vLLM supports only 16-bit inputs for them, so errors are those of that dtype; see test_half_precision."""
    model = quantize(checkpoint("qwen3-of-4-bits"), tmp_path / "quantized", kind).half()
    _, errors = compare(model, answers(tmp_path / "quantized", dtype="float16"))
    assert errors.mean() < 12 * torch.finfo(torch.float16).eps
    assert errors.max() < 0.1


@with_avx512
@pytest.mark.parametrize(
    ("name", "cache_dtype", "options"),
    [
        ("llama-retrofit", "fp8", {}),
        ("qwen3-sliding", "fp8_e5m2", {}),
        ("llama-window-3-linear", "fp8", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
)
def test_keys_and_values_of_8_bits(
    name: str, cache_dtype: str, options: dict[str, Any], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shifted keys and values are rounded as in vLLM's kernel for CPUs, and nothing is rounded before the shift.

    If a number is very close to an 8-bit number, its last bit decides the rounding; in the prompts' common start that
    affects all answers.
    """
    dtype = torch.float8_e5m2 if cache_dtype == "fp8_e5m2" else torch.float8_e4m3fn

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        return sdpa_attention_forward(module, q, towards_zero(k, dtype), towards_zero(v, dtype), *args, **options)

    model = load_kv_shift(checkpoint(name)).eval()
    outputs = answers(checkpoint(name), kv_cache_dtype=cache_dtype, **options)
    assert compare(model, outputs)[1].mean() > 0.01
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", attend)
    likeliest, errors = compare(model, outputs)
    assert likeliest.all()
    assert errors.median() < 1e-4
    assert errors.max() < 0.01


def towards_zero(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest 8-bit numbers that are not larger in magnitude."""
    nearest = x.to(dtype)
    bits = nearest.view(torch.uint8) - (nearest.to(x.dtype).abs() > x.abs()).to(torch.uint8)
    return bits.view(dtype).to(x.dtype)
