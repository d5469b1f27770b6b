"""Check that kept launches are those that Triton would make, and print a line of JSON for each check and mutant.

    python tests/ops/triton/check_launches.py

A launch is kept for calls of one geometry. Each check makes two calls that differ in one property. The second must
reach the driver as it does if nothing was kept: the same compiled kernel, grid and arguments. This needs a separate
process, because Triton chooses between compiler and interpreter when it is imported.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from kvshift.ops import ShiftState, dispatch, kv_shift
from kvshift.ops.arguments import TENSORS, Call
from kvshift.ops.attention_inputs import shift_norm_rope
from kvshift.ops.triton import launch as triton_launch
from kvshift.ops.triton import next_token
from tests.ops.mutants import Mutant
from tests.ops.triton.stub_driver import Recorded, StubDriver

# Calls ----------------------------------------------------------------------------------------------------------------


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, trained: bool = True) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=trained)


def inputs(
    batch: int = 2, positions: int = 16, queries: int = 8, heads: int = 4, size: int = 32, window: int = 2, **given: Any
) -> dict[str, Any]:
    """Return the arguments of a call that shifts, normalises and rotates."""
    dtype = given.pop("dtype", torch.bfloat16)
    shape = batch, positions, heads, size
    tables = {"cos": numbers(1, positions, 1, size // 2, dtype=dtype, trained=False)}
    coefficients = {name: numbers(heads, window, dtype=torch.float32) for name in ("alpha", "beta")}
    return {
        "q": numbers(batch, positions, queries, size, dtype=dtype),
        "k": numbers(*shape, dtype=dtype),
        "v": numbers(*shape, dtype=dtype),
        **coefficients,
        "cos": tables["cos"],
        "sin": tables["cos"].clone(),
        "q_scale": numbers(size, dtype=dtype),
        "k_scale": numbers(size, dtype=dtype),
        "eps": 1e-6,
        **given,
    }


def run(x: dict[str, Any], *, backward: bool, rotated: bool) -> tuple[Tensor, ...]:
    """Make the call of the layer (`rotated`) or of the operator, forward or also backward; return its results."""
    with torch.set_grad_enabled(backward):
        if rotated:
            norms = None
            if x["q_scale"] is not None:
                norms = tuple(nn.RMSNorm(x["k"].shape[3], x["eps"]) for _ in "qk")
                for norm, scale in zip(norms, (x["q_scale"], x["k_scale"]), strict=True):
                    norm.weight = nn.Parameter(scale) if not isinstance(scale, nn.Parameter) else scale
            where = {"rotary": (x["cos"], x["sin"]), "norms": norms, "keep_state": x.get("keep_state", False)}
            *results, _ = shift_norm_rope(
                x["q"], x["k"], x["v"], x["alpha"], x["beta"], state=x.get("state"), backend="triton", **where
            )
        else:
            *results, _ = kv_shift(x["k"], x["v"], x["alpha"], x["beta"], state=x.get("state"), backend="triton")
        if backward:
            torch.autograd.backward(results, [x.get("grad", torch.ones_like)(y) for y in results])
    return tuple(results)


# Checks ---------------------------------------------------------------------------------------------------------------


def forget() -> None:
    for kept in (dispatch._KEYS, triton_launch._FORWARD, triton_launch._BACKWARD):
        kept.clear()


def same_launch(
    driver: StubDriver, first: dict[str, Any], then: dict[str, Any], *, backward: bool = False, rotated: bool = True
) -> None:
    """Assert that the second call reaches the driver, kept or not, as it does if it is the first of its kind."""
    kernel = getattr(triton_launch.kernels(), "backward" if backward else "forward")

    def launched(x: dict[str, Any]) -> Recorded:
        run(x, backward=backward, rotated=rotated)
        return driver.last(kernel, {name: y for name, y in x.items() if isinstance(y, Tensor)})

    with driver.recording():
        forget()
        for _ in range(3):
            launched(first)
        found = [launched(then) for _ in range(3)]
        forget()
        expected = launched(then)
    for one in found:
        assert one == expected, f"{one} instead of {expected}"


def unaligned(x: Tensor, by: int = 1) -> Tensor:
    """Return a copy of x at an address that lies `by` elements beyond a multiple of 64 bytes."""
    memory = torch.empty(x.numel() + 64, dtype=x.dtype)
    start = (-memory.data_ptr() // x.element_size()) % 32 + by
    return memory[start : start + x.numel()].view(x.shape).copy_(x.detach()).requires_grad_(x.requires_grad)


def strided(x: Tensor, *stride: int) -> Tensor:
    """Return ones of the shape of x with these strides."""
    end = 1 + sum((size - 1) * step for size, step in zip(x.shape, stride, strict=True))
    return torch.ones(end, dtype=x.dtype).as_strided(x.shape, stride).requires_grad_(x.requires_grad)


def check_alignment(driver: StubDriver) -> None:
    x = inputs()
    for name in ("q", "k", "v", "alpha", "cos", "k_scale"):
        for by in (1, 4):  # 4 elements of 16 bits are aligned by 8 bytes
            moved = {**x, name: unaligned(x[name], by)}
            same_launch(driver, x, moved)
            same_launch(driver, moved, x)
        same_launch(driver, x, moved, backward=True)


def check_sizes(driver: StubDriver) -> None:
    """Sizes of 1 and multiples of 16, and others; strides of q, k and v stay the same."""
    x = inputs(batch=3, positions=32)
    for batch, positions in ((1, 32), (3, 16), (3, 7), (3, 1)):
        cut = {name: x[name].detach()[:batch, :positions].requires_grad_() for name in "qkv"}
        tables = {name: x[name][:, :positions] for name in ("cos", "sin")}
        for backward in (False, True):
            same_launch(driver, x, {**x, **cut, **tables}, backward=backward)
            same_launch(driver, {**x, **cut, **tables}, x, backward=backward)
        same_launch(driver, x, {**x, **cut}, rotated=False)
    same_launch(driver, x, inputs(batch=3, positions=32, heads=1), rotated=False)
    same_launch(driver, x, inputs(batch=3, positions=32, size=64))
    same_launch(driver, x, inputs(batch=3, positions=32, window=3))


def check_strides(driver: StubDriver) -> None:
    """Strides of 1, of other units, and beyond 32 bits (of an axis of size 1, which takes no memory)."""
    x = inputs(batch=1, positions=8, heads=1, queries=1)
    k = x["k"]
    for stride in ((256, 32, 32, 1), (1, 32, 1, 1), (3, 33, 7, 1), (512, 64, 32, 2), (2**40, 32, 2**33, 1)):
        moved = {**x, "k": strided(k, *stride)}
        for rotated in (False, True):
            same_launch(driver, x, moved, rotated=rotated)
            same_launch(driver, moved, x, rotated=rotated)
        same_launch(driver, x, moved, backward=True)
    grads = {**x, "grad": lambda y: torch.ones(1, dtype=y.dtype).expand(y.shape)}
    same_launch(driver, x, grads, backward=True)


def check_dtypes(driver: StubDriver) -> None:
    x = inputs()
    same_launch(driver, x, inputs(dtype=torch.float16))
    same_launch(driver, x, inputs(dtype=torch.float32), backward=True)
    same_launch(driver, x, {**x, "k_scale": x["k_scale"].detach().float().requires_grad_()})
    same_launch(driver, x, {**x, "alpha": x["alpha"].detach().bfloat16().requires_grad_()}, rotated=False)
    same_launch(driver, x, {**x, "alpha": None})
    same_launch(driver, x, {**x, "q_scale": None, "k_scale": None})


def check_constants(driver: StubDriver) -> None:
    """The epsilon of the norms, and the tiling; both also for calls of the operators of torch.library."""
    x = inputs()
    for backward in (False, True):
        same_launch(driver, x, {**x, "eps": 1e-5}, backward=backward)
    args = Call(None, *(x[name].detach() for name in ("k", "v", "alpha")))
    kernel, present = triton_launch.kernels().forward, triton_launch.TILING["forward"]
    try:
        with driver.recording():
            functions = set()
            for heads in (1, 2):
                triton_launch.TILING["forward"] = replace(present, heads=heads)
                for _ in range(2):
                    triton_launch._shift(*args[:TENSORS], 0.0, 0)
                functions.add(driver.last(kernel, {}).function)
    finally:
        triton_launch.TILING["forward"] = present
    assert len(functions) == 2, "two tilings share a compiled kernel"
    tables = x["cos"].squeeze(2), x["cos"].squeeze(2)
    normed = args._replace(cos=tables[0], sin=tables[1], k_scale=x["k_scale"].detach())
    with driver.recording():
        functions = set()
        for eps in (1e-6, 1e-5):
            triton_launch._shift(*normed[:TENSORS], eps, 0)
            functions.add(driver.last(kernel, {}).function)
    assert len(functions) == 2, "two epsilons share a compiled kernel"


@torch.no_grad()
def check_rows(driver: StubDriver) -> None:
    """The next state: none, or as many rows as the state of the call asks for."""
    x = inputs()
    one = ShiftState.zeros(2, 4, 32, rows=1, dtype=torch.bfloat16)
    three = replace(one, max_rows=3)
    for state in (None, one, three):
        for other in (None, one, three):
            same_launch(driver, {**x, "state": state}, {**x, "state": other}, rotated=False)
            kept = {"state": other, "keep_state": True}
            same_launch(driver, {**x, "state": state, "keep_state": False}, {**x, **kept})
    args = [None if y is None else y.detach() for y in Call(None, x["k"], x["v"], x["alpha"], x["beta"])[:TENSORS]]
    forget()
    for rows in (0, 1, 2, 0):
        k_next = triton_launch._shift(*args, 0.0, rows)[3]
        assert (0 if k_next is None else k_next.shape[1]) == rows, "rows of another call"


class Elsewhere(Tensor):
    """A tensor that says that it is on another device."""

    def get_device(self) -> int:
        return 1


@torch.no_grad()
def check_devices(driver: StubDriver) -> None:
    """The kernel of another device is launched on that device, which is current only meanwhile."""
    x = inputs()
    kernel = triton_launch.kernels().forward
    here = Call(None, *(x[name].detach() for name in ("k", "v", "alpha", "beta")))[:TENSORS]
    there = [None if y is None else y.as_subclass(Elsewhere) for y in here]
    forget()
    with driver.recording(), switching_devices(driver):
        for tensors, device in ((here, 0), (there, 1), (there, 1), (here, 0)):
            triton_launch._shift.launch(*tensors, 0.0, 0)
            function = driver.last(kernel, {}).function
            of_device = {compiled.function for compiled in kernel.device_caches[device][0].values()}
            assert function in of_device, f"a kernel of another device was launched on {device}"
            assert driver.device == 0


@contextmanager
def switching_devices(driver: StubDriver) -> Any:
    """Let `torch.cuda` switch between devices of the stub."""

    @contextmanager
    def on(device: int) -> Any:
        before, driver.device = driver.device, device
        try:
            yield
        finally:
            driver.device = before

    real = torch.cuda.current_device, torch.cuda.device
    torch.cuda.current_device, torch.cuda.device = (lambda: driver.device), on  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.device = real  # type: ignore[misc]


def check_gradients(driver: StubDriver) -> None:
    """Whether gradients are recorded is not kept from a call that records none."""
    x = inputs()
    alone = {name: y.detach() if isinstance(y, Tensor) else y for name, y in x.items()}
    alone |= {name: x[name].detach() for name in "qkv"}
    for rotated in (False, True):
        for recorded in (False, True, False):
            forget()
            if recorded:
                run_times(x, False, rotated)
            else:
                run_times(alone, True, rotated, backward=False)
            results = forward(x, rotated)
            assert all(y.requires_grad for y in results), "gradients are lost"
            with torch.no_grad():
                assert not any(y.requires_grad for y in forward(x, rotated))


def forward(x: dict[str, Any], rotated: bool) -> tuple[Tensor, ...]:
    if rotated:
        return shift_norm_rope(
            x["q"], x["k"], x["v"], x["alpha"], x["beta"], rotary=(x["cos"], x["sin"]), keep_state=False,
            backend="triton",
        )[:3]  # fmt: skip  # type: ignore[return-value]
    return kv_shift(x["k"], x["v"], x["alpha"], x["beta"], backend="triton")[:2]


def run_times(x: dict[str, Any], grad: bool, rotated: bool, backward: bool = False) -> None:
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            forward(x, rotated)


@torch.no_grad()
def check_lazy_tensors(driver: StubDriver) -> None:
    """A negative view has the geometry of other tensors, but not its numbers in memory."""
    x = inputs()
    plain = torch.ones(2, 16, 4, 32)
    negative = torch.complex(plain, plain).conj().imag
    assert negative.is_neg()
    like = torch.complex(plain, plain).imag
    x |= {"v": plain}
    kernel = triton_launch.kernels().forward
    with driver.recording():
        forget()
        for k in (like, like, negative):
            kv_shift(k, plain, x["alpha"], x["beta"], backend="triton")
            read = driver.last(kernel, {"k": k}).arguments["k"]
    assert read == "new", "the memory of a negative view was read"


def check_wrapped_tensors(driver: StubDriver) -> None:
    """A tensor that a transform has left behind looks like others, but has no address."""
    x, left = inputs(dtype=torch.float32), []
    torch.func.grad(lambda k: (left.append(k), k.sum())[1])(x["k"].detach())
    plain = torch.ones_like(x["k"])
    forget()
    for k in (plain, plain, left[0]):
        assert kv_shift(k, plain, x["alpha"], x["beta"], backend="triton")[0].shape == k.shape


@contextmanager
def counted_searches() -> Any:
    """Count the launches for which Triton looks for the compiled kernel."""
    from triton.runtime.jit import JITFunction

    counted, real = [0], JITFunction.run

    def search(self: Any, *args: Any, **kwargs: Any) -> Any:
        counted[0] += 1
        return real(self, *args, **kwargs)

    JITFunction.run = search
    try:
        yield counted
    finally:
        JITFunction.run = real


def check_kept(driver: StubDriver) -> None:
    """After the first call of a geometry Triton is not asked, in the forward and in the backward pass."""
    for rotated in (False, True):
        x = inputs()
        forget()
        run(x, backward=True, rotated=rotated)
        with counted_searches() as searches:
            before = driver.count()
            run(x, backward=True, rotated=rotated)
            assert driver.count() == before + 2
            assert searches == [0], "Triton was asked for the kernel of a kept launch"


def check_unknown_versions(driver: StubDriver) -> None:
    """Kernels of versions that were not tested are launched by Triton itself; so are those with hooks."""
    import triton

    x, real = inputs(), triton.__version__
    for version in ("3.3.1", "4.0.0"):
        forget()
        triton.__version__ = version
        try:
            with counted_searches() as searches:
                for _ in range(3):
                    run(x, backward=False, rotated=True)
            assert searches == [3], f"a kernel of Triton {version} was kept"
        finally:
            triton.__version__ = real
    hooked: list[int] = []
    kernel = triton_launch.kernels().forward
    forget()
    run(x, backward=False, rotated=True)
    kernel.add_pre_run_hook(lambda *args, **kwargs: hooked.append(1))
    try:
        run(x, backward=False, rotated=True)
    finally:
        kernel.pre_run_hooks.clear()
    assert hooked == [1], "a hook of the kernel was left out"


def check_launch_hooks(driver: StubDriver) -> None:
    """Hooks of all launches, as a profiler adds them, are called with what they are told of the kernel."""
    from triton import knobs

    x, runtime = inputs(), knobs.runtime
    forget()
    run(x, backward=False, rotated=True)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        hooked: list[str] = []
        add = getattr(getattr(runtime, name), "add", lambda hook, name=name: setattr(runtime, name, hook))
        remove = getattr(getattr(runtime, name), "remove", lambda hook, name=name: setattr(runtime, name, None))

        def hook(metadata: Any, hooked: list[str] = hooked) -> None:
            hooked.append("forward" if metadata is None else metadata.get()["name"])  # 3.4 may tell nothing

        add(hook)
        try:
            run(x, backward=False, rotated=True)
        finally:
            remove(hook)
        assert hooked == ["forward"], f"{name} was left out"


@torch.no_grad()
def check_next_token(driver: StubDriver) -> None:
    """One compiled kernel for all positions and sizes of the cache, and others where it would be wrong."""
    G, H, D = 2, 4, 32
    kernel = next_token.kernel()
    one = {name: numbers(1, 1, heads, D, trained=False) for name, heads in (("q", H), ("k", G), ("v", G))}
    one |= {name: numbers(1, 1, 1, D, trained=False) for name in ("cos", "sin")}

    def layer(x: dict[str, Tensor], room: int = 48, **given: Tensor) -> tuple[next_token.NextToken, dict[str, Tensor]]:
        fixed = {"keys": numbers(1, G, room, D, trained=False), "values": numbers(1, G, room, D, trained=False)}
        fixed |= {name: numbers(1, 1, G, D, trained=False) for name in ("k_state", "v_state")}
        fixed |= {name: numbers(G, 2, dtype=torch.float32, trained=False) for name in ("alpha", "beta")}
        fixed |= given
        state = ShiftState(fixed["k_state"], fixed["v_state"], 1)
        call = next_token.NextToken(x["q"], x["k"], x["v"], state, fixed["alpha"], fixed["beta"])
        assert call.write_to(fixed["keys"], fixed["values"])
        return call, fixed

    def launched(call: next_token.NextToken, x: dict[str, Tensor], fixed: dict[str, Tensor], at: int) -> Recorded:
        tables = next_token.TokenTables((x["cos"], x["sin"]))
        assert call.takes(x["q"], x["k"], x["v"], tables)
        call(x["q"], x["k"], x["v"], tables, at)
        return driver.last(kernel, {**x, **fixed})

    kept, fixed = layer(one)
    others: list[tuple[dict[str, Tensor], int]] = [(one, at) for at in (0, 1, 16, 17, 47)]
    others += [({**one, name: unaligned(one[name], by)}, 5) for name in one for by in (1, 4)]
    half = {name: one[name][..., : D // 2] for name in ("cos", "sin")}
    others += [({**one, **half}, 5), (one, 5)]
    with driver.recording():
        for _ in range(2):
            launched(kept, one, fixed, 5)
        with counted_searches() as searches:
            first = launched(kept, one, fixed, 5)
            assert searches == [0], "Triton was asked for the kernel of a kept launch"
        for x, at in others:
            found = [launched(kept, x, fixed, at) for _ in range(2)]
            expected = launched(layer(x, **fixed)[0], x, fixed, at)
            for one_found in found:
                assert one_found == expected, f"{one_found} instead of {expected}"
            assert (expected.function == first.function) == (x is one), "another kernel"
        for stride in (H * D, 2**40):
            far = {**one, "q": one["q"].as_strided(one["q"].shape, (stride, *one["q"].stride()[1:]))}
            call, _ = layer(far, **fixed)
            for _ in range(2):
                found_stride = launched(call, far, fixed, 5).arguments["q_b"]
                assert found_stride == stride // 16, "a number of 64 bits was cut"
        large = {name: numbers(1, G, 1 << 20, D, trained=False) for name in ("keys", "values")}
        assert kept.write_to(large["keys"], large["values"])
        assert launched(kept, one, {**fixed, **large}, 2**19 + 1).function == first.function, (
            "compiled for a larger cache"
        )


CHECKS: dict[str, Callable[[StubDriver], None]] = {
    name.removeprefix("check_").replace("_", " "): check
    for name, check in list(vars().items())
    if name.startswith("check_")
}

KEPT, LAUNCH, DISPATCH = "triton/compiled_launch.py", "triton/launch.py", "dispatch.py"
ALIGNED = "math.gcd(_ALIGNMENT, *addresses) == _ALIGNMENT"
GEOMETRY = "(x.shape, x.stride(), x.dtype, x.get_device())"
KEY = "key = (id(kernel), tiling, eps, rows, key or tuple(map(geometry, inputs)))"
MUTANTS: dict[str, tuple[Mutant, str]] = {
    "sizes of another call": (Mutant(KEPT, GEOMETRY, "(x.stride(), x.dtype, x.get_device())"), "sizes"),
    "strides of another call": (Mutant(KEPT, GEOMETRY, "(x.shape, x.dtype, x.get_device())"), "strides"),
    "dtypes of another call": (Mutant(KEPT, GEOMETRY, "(x.shape, x.stride(), x.get_device())"), "dtypes"),
    "device of another call": (Mutant(KEPT, GEOMETRY, "(x.shape, x.stride(), x.dtype)"), "devices"),
    "current device": (Mutant(KEPT, "self._device >= 0 and self._device", "False and self._device"), "devices"),
    "alignment ignored": (Mutant(KEPT, ALIGNED, "True"), "alignment"),
    "alignment by 8": (Mutant(KEPT, ALIGNED, "math.gcd(8, *addresses) == 8"), "alignment"),
    "alignment of the first tensor": (
        Mutant(KEPT, ALIGNED, ALIGNED.replace("*addresses", "addresses[0]")),
        "alignment",
    ),
    "epsilon of another call": (Mutant(LAUNCH, KEY, KEY.replace(" eps,", "")), "constants"),
    "tiling of another call": (Mutant(LAUNCH, KEY, KEY.replace(" tiling,", "")), "constants"),
    "rows of another call": (Mutant(LAUNCH, KEY, KEY.replace(" rows,", "")), "rows"),
    "rows of a call with another state": (
        Mutant(DISPATCH, "_AUTO, call.max_rows, torch", "_AUTO, torch"),
        "rows",
    ),
    "epsilon of another layer's norm": (
        Mutant(LAUNCH, "key = (id(kernel), tiling, args[-1], *map", "key = (id(kernel), tiling, *map"),
        "constants",
    ),
    "gradients forgotten": (
        Mutant(DISPATCH, "parts += geometry(x), x.requires_grad", "parts += (geometry(x),)"),
        "gradients",
    ),
    "gradients under no_grad": (
        Mutant(DISPATCH, "call.max_rows, torch.is_grad_enabled()]", "call.max_rows]"),
        "gradients",
    ),
    "lazy tensors": (Mutant(DISPATCH, "            or is_lazy(x)\n", ""), "lazy tensors"),
    "position of another token": (
        Mutant(KEPT, "self._run(*addresses, *numbers,", "self._run(*addresses, *(0,) * len(numbers),"),
        "next token",
    ),
    "tables of another geometry": (
        Mutant("triton/next_token.py", "if of_launch != self._of_launch:", "if self._of_launch is None:"),
        "next token",
    ),
    "wrapped tensors": (Mutant(DISPATCH, "            or _is_wrapped(x)\n", ""), "wrapped tensors"),
    "any version": (Mutant(KEPT, "if not _TESTED[0] <= version <= _TESTED[1] or", "if"), "unknown versions"),
    "hooks left out": (Mutant(KEPT, " and not self._kernel.pre_run_hooks", ""), "unknown versions"),
    "hooks of all launches left out": (Mutant(KEPT, "if getattr(enter", "if False and getattr(enter"), "launch hooks"),
    "hooks after all launches left out": (Mutant(KEPT, ' or getattr(leave, "calls", leave):', ":"), "launch hooks"),
    "nothing kept": (Mutant(KEPT, "self._run = _without_hooks(compiled, self._grid, self._device)", "pass"), "kept"),
}


def outcome(check: Callable[[], None]) -> str | None:
    try:
        check()
    except Exception as error:  # a mutant may also end in another error
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        driver = StubDriver(Path(folder))
        for name, check in CHECKS.items():
            print(json.dumps({"check": name, "error": outcome(partial(check, driver))}), flush=True)
        for name, (mutant, check) in MUTANTS.items():
            with mutant.in_place(Path(folder)):
                error = outcome(partial(CHECKS[check], driver))
            forget()
            print(json.dumps({"mutant": name, "error": error}), flush=True)


if __name__ == "__main__":
    main()
