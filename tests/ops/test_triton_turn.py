"""Shift, norm and rotation in one launch, against the plain formula in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvshift.ops.triton import launch as triton_launch
from kvshift.ops.triton.call import Boundaries
from kvshift.ops.triton.launch import Tiling

from .cases import DTYPES, LAYOUTS
from .conftest import skip_unless_built
from .rounding import assert_close
from .turns import LEAVES, Turn, formula, outcome, random_turn, results_with_bounds, turned, unfused

HOLES = [[0, 1, 0, 1, 1], [1, 1, 1, 0, 0]]
DOCUMENTS = [[0, 0, 1, 1, 1], [7, -1, -1, -1, 7]]
MODES: dict[str, dict] = {
    "plain": {},
    "tables of each row": {"tables": 2},
    "tables and gains in fp32": {"table_dtype": torch.float32, "scale_dtype": torch.float32},
    "window 3": {"window": 3},
    "window 4": {"window": 4, "positions": 6},
    "keys alone": {"shifted": "k", "window": 3},
    "values alone": {"shifted": "v"},
    "no shift": {"shifted": ""},
    "no queries": {"queries": None},
    "heads of several programs": {"queries": 9, "heads": 5, "positions": 2},
    "heads of two": {"k_dim": 2, "v_dim": 1},
    "heads of 96": {"k_dim": 96, "v_dim": 33, "queries": 2, "heads": 1, "positions": 3},
    "one token": {"positions": 1, "window": 3},
    "pack": {"lengths": [2, 0, 1, 3]},
    "pack, window 4": {"lengths": [1, 4, 0, 2], "window": 4},
    "pack, padding": {"lengths": [2, 3], "mask": [[1, 0, 0, 1, 1]]},
    "documents": {"seq_idx": DOCUMENTS, "window": 3},
    "padding": {"mask": HOLES, "window": 3},
    "padding, values alone": {"mask": HOLES, "shifted": "v"},
    "documents, padding": {"seq_idx": DOCUMENTS, "mask": HOLES, "tables": 2},
    "nothing but padding": {"mask": [[0] * 5, [0, 0, 0, 0, 1]]},
}


@pytest.fixture(autouse=True)
def kernels_that_run() -> None:
    skip_unless_built("triton")


def assert_within_rounding(turn: Turn) -> dict[str, Tensor]:
    """Every element of every result: the rounding to its dtype, and what rounding did to the numbers it was made of."""
    own = outcome(turn)
    compute = torch.float64 if turn.k.dtype == torch.float64 else torch.float32
    exact = turn.map(lambda x: x.to(compute).double().contiguous())
    expected = outcome(exact, formula)
    # The exact results are in fp64 too, and err as much as results in fp64.
    unit = torch.finfo(compute).eps * (1.0 if compute == torch.float64 else 0.5)
    bounds = results_with_bounds(exact, unit)
    assert own.keys() == expected.keys()
    for name, result in own.items():
        bound = bounds[name].error.reshape(result.shape)
        if result.dtype not in (compute, torch.float64):
            stored = torch.finfo(result.dtype)
            bound = bound + stored.eps / 2 * (expected[name].abs() + bound) + stored.smallest_normal * stored.eps / 2
        assert_close(name, result, expected[name], bound)
    return own


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("mode", MODES)
def test_results_and_gradients_are_exact_but_for_rounding(mode, norm):
    dtype = DTYPES[(list(MODES).index(mode) + 2 * norm) % 4]
    assert_within_rounding(random_turn(2, dtype=dtype, norm=norm, **MODES[mode]))


@pytest.mark.parametrize("mode", ["plain", "pack, window 4", "documents, padding"])
def test_the_bounds_are_those_of_the_formula(mode):
    turn = random_turn(3, dtype=torch.float64, **MODES[mode])
    expected = outcome(turn, formula)
    by_hand = results_with_bounds(turn, 2.0**-53)
    assert by_hand.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(by_hand[name].value.reshape(x.shape), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_error_is_no_larger_than_that_of_one_operation_after_the_other(dtype, norm):
    """In the mean. (In fp32 both round every operation, and which comes nearer is chance.)"""
    turn = random_turn(5, 1, 67, queries=2, heads=2, k_dim=26, dtype=dtype, norm=norm, window=3)
    exact = outcome(turn.map(lambda x: x.double()), formula)
    own, other = outcome(turn), outcome(turn, unfused)
    for name in exact:
        errors = [float((x[name].double() - exact[name]).square().mean()) for x in (own, other)]
        assert errors[0] <= errors[1], name


# Histories

WITH_HISTORY: dict[str, dict] = {
    "rows": {"rows": 3, "window": 3},
    "pack": {"lengths": [2, 0, 1, 3], "rows": 2},
    "documents": {"seq_idx": DOCUMENTS, "rows": 3, "window": 4},
    "padding": {"mask": HOLES, "rows": 2, "window": 3},
    "keys alone": {"rows": 1, "shifted": "k"},
    "one token": {"positions": 1, "rows": 3, "window": 4},
}


@pytest.mark.parametrize("mode", WITH_HISTORY)
def test_histories_are_read(mode):
    turn = random_turn(7, dtype=torch.float64, **WITH_HISTORY[mode])
    expected = outcome(turn, formula)
    for name, x in outcome(turn).items():
        torch.testing.assert_close(x, expected[name], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_a_row_in_two_pieces_has_the_bits_of_the_whole(cut, dtype):
    turn = random_turn(11, dtype=dtype, window=3, tables=2)
    whole = turned(turn)
    rows = [torch.cat([torch.zeros_like(x[:, :2]), x[:, :cut]], dim=1)[:, -2:] for x in (turn.k, turn.v)]
    first, second = (
        replace(turn, **{name: getattr(turn, name)[:, part] for name in ("q", "k", "v", "cos", "sin")})
        for part in (slice(cut), slice(cut, None))
    )
    pieces = turned(first), turned(replace(second, k_past=rows[0], v_past=rows[1]))
    for x, before, after in zip(whole, *pieces, strict=True):
        assert x is not None
        assert before is not None
        assert after is not None
        assert torch.equal(torch.cat([before, after], dim=1), x)


def test_gradients_are_not_recorded_with_a_history():
    turn = random_turn(1, 1, 3, rows=1)
    for trained in ("q", "k", "v", "alpha", "beta"):
        leaf = getattr(turn, trained).detach().requires_grad_()
        with pytest.raises(ValueError, match="k_past and v_past must be None where gradients are recorded"):
            turned(replace(turn, **{trained: leaf}))


# What must change no bit


def assert_same_bits(turn: Turn, expected: dict[str, Tensor]) -> None:
    for name, x in outcome(turn).items():
        assert torch.equal(x, expected[name]), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", [{}, {"lengths": [2, 0, 3]}], ids=["rows", "pack"])
def test_strides(layout, mode):
    for grad_layout in (layout, "expanded"):
        turn = random_turn(13, 1, 3, layout=layout, grad_layout=grad_layout, **mode)
        assert_same_bits(turn, outcome(turn.map(lambda x: x.clone(memory_format=torch.contiguous_format))))


def test_tables_that_are_views():
    turn = random_turn(17, 2, 3, queries=1, dtype=torch.bfloat16, tables=2)
    expected = outcome(turn)

    def half_of_wider(x: Tensor) -> Tensor:
        return torch.cat([torch.full_like(x, torch.nan), x], dim=2)[..., 3:]

    views = {
        "half": half_of_wider,
        "positions first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "elements first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    }
    for cos in views.values():
        assert_same_bits(replace(turn, cos=cos(turn.cos), sin=cos(turn.sin)), expected)
        assert_same_bits(replace(turn, cos=cos(turn.cos)), expected)
    same = replace(turn, cos=turn.cos[1:], sin=turn.sin[1:])
    for cos, sin in ((same.cos.expand(2, -1, -1), same.sin.expand(2, -1, -1)), (same.cos, same.sin.float())):
        assert_same_bits(replace(turn, cos=cos, sin=sin), outcome(same))


@pytest.mark.parametrize("tiling", [Tiling(positions=2), Tiling(positions=4, heads=2), Tiling(elements=16, heads=8)])
@pytest.mark.parametrize("mode", [{"window": 3}, {"lengths": [3, 0, 1, 3]}, {"mask": [[1, 0, 1, 1, 0, 1, 1]]}], ids=str)
def test_tiles(tiling, mode, monkeypatch):
    """Ends inside a document, a hole or a group of heads; only sums over all positions depend on the tiles."""
    turn = random_turn(19, 1, 7, queries=3, **mode)
    expected = outcome(turn)
    for name in triton_launch.TILING:
        monkeypatch.setitem(triton_launch.TILING, name, tiling)
    own = assert_within_rounding(turn)
    for name in ("q", "k", "v", "gradient of q", "gradient of k", "gradient of v"):
        assert torch.equal(own[name], expected[name]), name


def test_a_second_run():
    turn = random_turn(23, 2, 131, queries=1, heads=1, dtype=torch.bfloat16)
    assert_same_bits(turn, outcome(turn))


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "norm"])
def test_what_stands_in_the_padding(norm):
    """And what comes back to it."""
    turn = random_turn(29, norm=norm, mask=HOLES, window=3)
    assert turn.mask is not None
    padding = ~turn.mask[:, :, None, None]

    def filled(x: float) -> Turn:
        k, v, *grads = (y.masked_fill(padding, x) for y in (turn.k, turn.v, *turn.grads[1:]))
        return replace(turn, k=k, v=v, grads=(turn.grads[0], *grads))

    expected = outcome(filled(-29.0))
    assert_same_bits(filled(torch.nan), expected)
    for name in ("k", "v", "gradient of k", "gradient of v"):
        assert not expected[name].masked_select(padding).any(), name


# Autograd


@pytest.mark.parametrize(
    ("trained", "shifted"), [(name, "kv") for name in LEAVES] + [(name, "v") for name in LEAVES if name != "alpha"]
)
def test_a_single_input_may_need_its_gradient_alone(trained, shifted):
    turn = random_turn(31, 1, 3, shifted=shifted)
    leaf = getattr(turn, trained)
    expected = outcome(turn)[f"gradient of {trained}"]
    leaf.requires_grad_()
    pairs = [(y, grad) for y, grad in zip(turned(turn), turn.grads, strict=True) if y is not None and y.requires_grad]
    ys, grads = zip(*pairs, strict=True)
    torch.autograd.backward(ys, grads)
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("only", [0, 1, 2])
def test_a_gradient_may_come_back_to_a_single_result(only, norm):
    turn = random_turn(37, 1, 4, dtype=torch.float64, norm=norm)
    leaves = [x.requires_grad_() for name in LEAVES if (x := getattr(turn, name)) is not None]
    results = []
    for op in (turned, formula):
        y = op(turn)[only]
        assert y is not None
        results.append(torch.autograd.grad(y, leaves, turn.grads[only], allow_unused=True, materialize_grads=True))
    for x, expected in zip(*results, strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-6 if x.dtype == torch.float32 else 1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("mode", [{}, {"mask": HOLES}, {"lengths": [2, 0, 3]}], ids=["rows", "padding", "pack"])
def test_memory_kept_for_backward_is_the_inputs(mode, norm):
    """Queries only with a norm; with padding two 32-bit numbers for each token."""
    turn = random_turn(41, **mode, norm=norm)
    wanted = [name for name in LEAVES if getattr(turn, name) is not None]
    for name in wanted:
        getattr(turn, name).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        turned(turn)
    addresses = {name: getattr(turn, name).data_ptr() for name in (*wanted, "cos", "sin")}
    assert (addresses["q"] in {x.data_ptr() for x in kept}) == norm
    addresses |= {name: x.data_ptr() for name, x in turn.where().items() if x is not None}
    others = [x for x in kept if x.data_ptr() not in addresses.values()]
    assert [(x.dtype, x.numel()) for x in others] == [(torch.int32, 20)] * ("mask" in mode)


@pytest.mark.parametrize("mode", [{"batch": 0}, {"positions": 0}, {"lengths": []}, {"lengths": [0, 0]}], ids=str)
def test_nothing(mode):
    turn = random_turn(43, **mode)
    for name, x in outcome(turn).items():
        of = getattr(turn, name.removeprefix("gradient of "))
        assert x.shape == of.shape
        assert not x.any()


def test_operators_keep_the_rules_of_torch_library():
    turn = random_turn(47, 2, 3, mask=[[0, 1, 1], [1, 0, 1]])
    for name in LEAVES:
        getattr(turn, name).requires_grad_()
    shifted = (turn.q, turn.k, turn.v, turn.alpha, turn.beta, None, None)
    finished = (turn.cos, turn.sin, turn.q_scale, turn.k_scale, turn.eps)
    bounds = Boundaries.of(**turn.where()).tensors()
    torch.library.opcheck(torch.ops.kvshift.shift.default, (*shifted, *finished, *bounds))
