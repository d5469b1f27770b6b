"""Measure `kv_shift` of keys and values beside a copy of the same bytes, the paper's code and plain PyTorch.

    python benchmarks/kv_shift.py [--preset laptop] [--sweep] [--out FOLDER]

Forward must read k and v and write as many bytes: 2 n, for n bytes of k and v together, like a copy. Backward reads the
incoming gradients and, for those of the coefficients, k and v, and writes the gradients of k and v: 3 n. GB/s count
these bytes, whatever an implementation really moves. Part "op" has all implementations, without and with the rotary
embedding of k; part "sweep" (--sweep) changes one of T, B, G and D at a time, for `kv_shift` alone.

An implementation is timed only if its results and gradients, all of them, agree with the formula in float64.

Shapes: B batch, T positions, G KV heads, D head size, (B, T, G, D).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from allocated import bytes_saved
from timing import Benchmark, Implementation, LeftOutError, arguments
from torch import Tensor

from kvshift import kv_shift
from kvshift.layers.positions import rotary_table
from kvshift.ops import BACKENDS
from kvshift.ops.arguments import Call
from kvshift.ops.boundaries import shared_plans
from kvshift.ops.rope import half_tables, rotate_half
from kvshift.ops.triton.call import shift_triton, triton_unsupported_reason

Pair = tuple[Tensor, Tensor]
Function = Callable[[Tensor, Tensor, Tensor, Tensor], Pair]
Shape = tuple[int, int, int, int]

SIZES: dict[str, Any] = {  # shapes, dtypes and rounds; base shape, values of each axis and dtypes of the sweep
    "smoke": {
        "shapes": [(2, 67, 3, 16)], "dtypes": ["float32", "bfloat16"], "rounds": 3,
        "base": (2, 64, 2, 16), "axes": {"T": (64, 128), "D": (8, 16)}, "swept": ["float32"],
    },
    "laptop": {
        "shapes": [(4, 2048, 4, 128), (8, 1024, 16, 64)], "dtypes": ["float32", "bfloat16"], "rounds": 30,
        "base": (1, 4096, 4, 64), "swept": ["float32", "bfloat16"],
        "axes": {
            "T": (512, 2048, 8192, 32_768, 131_072), "B": (1, 2, 4, 8, 16), "G": (1, 2, 4, 8, 16),
            "D": (32, 64, 128, 256),
        },
    },
    "paper": {
        "shapes": [(8, 4096, 4, 128), (16, 2048, 16, 64)], "dtypes": ["bfloat16"], "rounds": 50,
        "base": (4, 4096, 4, 128), "swept": ["bfloat16", "float16", "float32"],
        "axes": {
            "T": (512, 2048, 8192, 32_768, 131_072), "B": (1, 4, 16, 64), "G": (1, 4, 16, 64),
            "D": (32, 64, 128, 256),
        },
    },
}  # fmt: skip
PASSES = {"forward": 2, "forward and backward": 5}  # bytes moved / bytes of k and v
COPY = "copy of k and v"
DOCUMENT = 25  # tokens


@dataclass(frozen=True, kw_only=True)
class Formulation:
    """One implementation of the operator.

    Attributes:
        function: (k, v, alpha, beta) -> (k_hat, v_hat).
        rounded: whether it takes coefficients in the dtype of k, in which it then computes; those of `kv_shift` stay in
            float32.
        roundings: how many times a result is rounded to the dtype of k on its way: 1 if sums are in float32.
        fixed: True if it does not shift.
        table: cosines and sines with which it rotates k after the shift.
        boundaries: `seq_idx` or `mask` of `kv_shift`, (B, T).
        computes: what it computes if that is not the plain shift.
        left_out: why it cannot run here, or None.
    """

    name: str
    function: Function
    rounded: bool = False
    roundings: int = 1
    fixed: bool = False
    table: Pair | None = None
    boundaries: Mapping[str, Tensor] = field(default_factory=dict)
    computes: str | None = None
    left_out: str | None = None


def appendix_m(x: Tensor, coefficients: Tensor) -> Tensor:
    """Shift as in the paper's appendix M: pad, unfold, multiply, sum. Its kernel has the oldest lag first."""
    windows = F.pad(x, (0, 0, 0, 0, coefficients.shape[1] - 1, 0)).unfold(1, coefficients.shape[1], 1)
    return (windows * coefficients.flip(1)[:, None, :]).sum(-1)


def pad_multiply_add(x: Tensor, coefficients: Tensor) -> Tensor:
    """Shift by the two lines that most people would write."""
    before = F.pad(x, (0, 0, 0, 0, 1, 0))[:, :-1]
    return x * coefficients[:, 0, None] + before * coefficients[:, 1, None]


def by_kv_shift(backend: str = "auto", **boundaries: Any) -> Function:
    return lambda k, v, alpha, beta: kv_shift(k, v, alpha, beta, backend=backend, **boundaries)[:2]


def on_both(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    return lambda k, v, alpha, beta: (function(k, alpha), function(v, beta))


def in_a_later_layer(function: Function) -> Function:
    """Return `function` with the first call's plan of the boundaries: a model makes the plan once for all layers."""
    plans: dict[Any, Any] = {}

    def shift(*inputs: Tensor) -> Pair:
        with shared_plans(plans):
            return function(*inputs)

    return shift


def without_rotary(k: Tensor, compiled: bool) -> Iterator[Formulation]:
    batch, positions = k.shape[:2]
    plain = Formulation(name="pad, multiply, add", function=on_both(pad_multiply_add), rounded=True, roundings=3)
    ours = Formulation(name="kv_shift", function=by_kv_shift())
    yield replace(plain, name="appendix M", function=on_both(appendix_m))
    yield plain
    yield by_compiler(plain, compiled)
    yield ours
    position_T = torch.arange(positions, device=k.device)
    pads_B1 = torch.arange(1, batch + 1, device=k.device).clamp(max=positions // 2)[:, None]
    for what, boundaries in (
        ("documents", {"seq_idx": (position_T // DOCUMENT).expand(batch, -1)}),
        ("left padding", {"mask": position_T >= pads_B1}),
    ):
        first = by_kv_shift(**boundaries)
        one = Formulation(name=f"kv_shift, {what}", function=first, boundaries=boundaries)
        yield replace(one, computes=f"kv_shift with {what}")
        yield replace(
            one,
            name=f"{one.name}, plan kept",
            function=in_a_later_layer(first),
            computes=f"kv_shift with {what}, its plan kept",
        )
    for backend in BACKENDS:
        if backend not in ("auto", "reference"):
            refusal = why_not(backend, k)
            yield Formulation(name=f"kv_shift, {backend}", function=by_kv_shift(backend), left_out=refusal)
    yield by_compiler(ours, compiled)


def with_rotary(k: Tensor, compiled: bool) -> Iterator[Formulation]:
    """Yield the formulations of shift and rotary embedding; the first, without a shift, is their lower bound."""
    angles = rotary_table(torch.arange(k.shape[1], device=k.device).unsqueeze(0), k.shape[3], 10_000.0, torch.float32)
    table = half_tables(*(torch.cat([part, part], dim=-1).squeeze(2).to(k.dtype) for part in angles))
    half = k.shape[3] // 2
    cos, sin = table[0].squeeze(2)[..., :half], table[1].squeeze(2)[..., half:]  # the first half of sin is negated

    def unshifted(k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor) -> Pair:
        return k, v.clone()  # v must be read and written at least once

    def then_rotate(function: Function) -> Function:
        def rotated(*inputs: Tensor) -> Pair:
            k_hat, v_hat = function(*inputs)
            return rotate_half(k_hat, table), v_hat

        return rotated

    def in_one_launch(k: Tensor, v: Tensor, alpha: Tensor | None, beta: Tensor | None) -> Pair:
        results: Any = shift_triton(Call(None, k, v, alpha, beta, cos=cos, sin=sin, max_rows=0))
        return results[1:3]

    alone = Formulation(
        name="rotary embedding, v copied",
        function=then_rotate(unshifted),
        roundings=4,
        fixed=True,
        table=table,
        computes="no shift",
    )
    both = Formulation(name="kv_shift, then rotary", function=then_rotate(by_kv_shift()), roundings=4, table=table)
    refusal = triton_unsupported_reason(table[0], 2) if k.is_cuda else "needs a CUDA device"
    yield from (alone, both, by_compiler(alone, compiled), by_compiler(both, compiled))
    yield replace(
        alone,
        name=f"{alone.name}, triton",
        function=lambda k, v, alpha, beta: in_one_launch(k, v.clone(), None, None),
        roundings=1,
        left_out=refusal,
    )
    one = replace(both, name="kv_shift and rotary in one launch, triton", function=in_one_launch)
    yield replace(one, roundings=1, left_out=refusal)


def by_compiler(formulation: Formulation, compiled: bool) -> Formulation:
    name = f"{formulation.name}, compiled"
    if not compiled:
        return replace(formulation, name=name, left_out="torch.compile is not measured: preset smoke or --no-compile")
    return replace(formulation, name=name, function=torch.compile(formulation.function, dynamic=False))


def why_not(backend: str, k: Tensor) -> str | None:
    """Return why a backend does not take tensors like k, or None if it does."""
    if backend == "triton" and not k.is_cuda:  # Triton's interpreter would accept them
        return "needs a CUDA device"
    few, coefficients = k.detach()[:1, :2], torch.ones(k.shape[2], 2, device=k.device)
    try:
        kv_shift(few, few, coefficients, coefficients, backend=backend)
    except (ValueError, ImportError) as error:
        return str(error)
    return None


def by_formula(
    formulation: Formulation, x: Tensor, c: Tensor, grad: Tensor, table: Pair | None, backward: bool, size: bool
) -> list[Tensor]:
    """Return results and gradients in float64: y[t] = c[0] x[t] + c[1] x[t-1], without x[t-1] of another document.

    With `size`, every term has its absolute value, as the error of a sum is bounded by the sum of these.
    """
    signed: Callable[[Tensor], Tensor] = (lambda x: x.double().abs()) if size else (lambda x: x.double())
    x, c = signed(x.detach()).requires_grad_(backward), signed(c.detach()).requires_grad_(backward)
    keeps = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    real = formulation.boundaries.get("mask", keeps)[..., None, None]
    if (seq_idx := formulation.boundaries.get("seq_idx")) is not None:
        keeps = torch.cat([keeps[:, :1], seq_idx[:, 1:] == seq_idx[:, :-1]], dim=1)
    before = F.pad(x * real, (0, 0, 0, 0, 1, 0))[:, :-1] * keeps[..., None, None]
    y = (c[:, 0, None] * x + c[:, 1, None] * before) * real
    if table is not None:
        y = rotate_half(y, (signed(table[0]), signed(table[1])))
    return [y.detach(), *(torch.autograd.grad(y, (x, c), signed(grad)) if backward else ())]


def worst_error(formulation: Formulation, inputs: list[Tensor], grads: Pair, backward: bool) -> float:
    """Compare a formulation with the formula in float64, element by element; return the worst error of its results.

    An element may be off by `roundings` times the unit roundoff of the dtype times the sum of the absolute values of
    its terms, and by the error of sums in float32. Heads are compared one by one, which takes less memory.

    Raises:
        ArithmeticError: an element is off by more; the tensor is named.
    """
    with torch.set_grad_enabled(backward):
        found = list(formulation.function(*inputs))
    if backward:
        found += torch.autograd.grad(found, inputs[:2] if formulation.fixed else inputs, grads)
    unit, single = (torch.finfo(dtype).eps / 2 for dtype in (inputs[0].dtype, torch.float32))
    worst = 0.0
    for at, head in itertools.product((0, 1), range(inputs[0].shape[2])):  # keys, then values
        one = slice(head, head + 1)
        given = (inputs[at][:, :, one], inputs[2 + at][one], grads[at][:, :, one], None if at else formulation.table)
        exact, sizes = (by_formula(formulation, *given, backward, size) for size in (False, True))
        names = (f"{'kv'[at]}_hat", f"gradient of {'kv'[at]}", f"gradient of {('alpha', 'beta')[at]}")
        for name, result, value, size in zip(names, found[at::2], exact, sizes, strict=False):
            bound = formulation.roundings * unit + 8 * single
            if name == names[2]:  # rounded last to its own dtype; the sum is in blocks or as a tree
                bound = (formulation.roundings - 1) * unit + torch.finfo(result.dtype).eps / 2 + 512 * single
            error = ((result[one] if name == names[2] else result[:, :, one]).detach().double() - value).abs()
            if (off := ~(error <= 1.01 * bound * size)).any():
                raise ArithmeticError(f"{name}: {int(off.sum())} of {off.numel()} elements of head {head} off")
            if name == names[0]:
                worst = max(worst, float((error / (value.abs() + 1)).max()))
    return worst


def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> list[list[Tensor]]:
    """Return sets of k, v and incoming gradients, which calls use in turn; on a GPU together 3 times its L2 cache."""
    count = 1
    if device.type == "cuda":
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        count = min(32, max(2, math.ceil(3 * cache / (2 * math.prod(shape) * dtype.itemsize)) + 1))
    generator = torch.Generator(device).manual_seed(0)
    sets = [[torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(4)] for _ in range(count)]
    for k, v, *_ in sets:
        k.requires_grad_()
        v.requires_grad_()
    return sets


def make(formulation: Formulation, sets: list[list[Tensor]], what: str) -> Implementation:
    if formulation.left_out is not None:
        raise LeftOutError(formulation.left_out)
    k, v, *grads = sets[0]
    torch.manual_seed(0)
    drawn = torch.rand(2, k.shape[2], 2, device=k.device)
    if formulation.fixed:
        drawn = torch.tensor([1.0, 0.0], device=k.device).expand_as(drawn).clone()
    backward = what != "forward"
    dtype = k.dtype if formulation.rounded else torch.float32
    coefficients = [one.clone().to(dtype).requires_grad_(not formulation.fixed) for one in drawn]
    trained = [] if formulation.fixed else coefficients

    def forward(number: int) -> Pair:
        k, v, *_ = sets[number % len(sets)]
        return formulation.function(k, v, *coefficients)

    def run_forward(number: int) -> None:
        with torch.no_grad():
            forward(number)

    def run_both(number: int) -> None:
        k, v, grad_k, grad_v = sets[number % len(sets)]
        torch.autograd.grad(forward(number), (k, v, *trained), (grad_k, grad_v))

    return Implementation(
        run=run_both if backward else run_forward,
        check=lambda: worst_error(formulation, [k, v, *coefficients], (grads[0], grads[1]), backward),
        moved_bytes=PASSES[what] * 2 * k.nbytes,
        saved=(lambda: bytes_saved(lambda: forward(0), k.device)) if backward else None,
        facts={} if formulation.computes is None else {"computes": formulation.computes},
    )


def copy(sets: list[list[Tensor]]) -> Implementation:
    pairs = [tuple(k.new_ones(2, *k.shape) for _ in range(2)) for k, *_ in sets]

    def run(number: int) -> None:
        source, target = pairs[number % len(pairs)]
        target.copy_(source)

    return Implementation(run=run, moved_bytes=2 * pairs[0][0].nbytes)


def measure(
    bench: Benchmark, part: str, prefix: str, shape: Shape, dtype_name: str, what: str, rounds: int, **facts: Any
) -> None:
    """Measure all implementations at one shape; only `kv_shift` in the sweep."""
    rotary = facts.setdefault("rotary", False)
    dtype = getattr(torch, dtype_name)

    def implementations() -> dict[str, Callable[[], Implementation]]:
        sets = draw(shape, dtype, bench.device)
        if part == "sweep":
            formulations: Any = [Formulation(name="kv_shift", function=by_kv_shift())]
        else:
            formulations = (with_rotary if rotary else without_rotary)(sets[0][0], bench.compiled)
        makes = {one.name: functools.partial(make, one, sets, what) for one in formulations}
        return {COPY: functools.partial(copy, sets), **makes}

    name = f"{prefix}{shape} {dtype_name} {what}" + (", rotary" if rotary else "")
    facts |= {"shape": list(shape), "dtype": dtype_name, "pass": what}
    bench.case(part, name, implementations, rounds=rounds, device_time=True, **facts)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--sweep", action="store_const", const="sweep", default="op", dest="parts")
    options = parser.parse_args()
    bench, sizes = Benchmark(options), SIZES[options.preset]
    rounds = options.rounds or sizes["rounds"]
    if options.parts == "op":
        for shape, dtype, what, rotary in itertools.product(sizes["shapes"], sizes["dtypes"], PASSES, (False, True)):
            measure(bench, "op", "", shape, dtype, what, rounds, rotary=rotary)
    else:
        for dtype, (axis, values) in itertools.product(sizes["swept"], sizes["axes"].items()):
            for value in values:
                at = "BTGD".index(axis)
                shape = (*sizes["base"][:at], value, *sizes["base"][at + 1 :])
                both = "forward and backward"
                measure(bench, "sweep", f"{axis}: ", shape, dtype, both, rounds, axis=axis, value=value)
    bench.finish()


if __name__ == "__main__":
    main()
