"""Shift, QK-norm and RoPE in one launch compared with the reference in fp64, beyond `test_attention_inputs.py`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvshift.ops.arguments import TENSORS
from kvshift.ops.triton import launch as triton_launch
from kvshift.ops.triton.launch import Tiling

from ..cases import DTYPES, LAYOUTS, assert_same_bits
from ..conftest import skip_unless_built
from ..fused_cases import (
    HOLES,
    LEAVES,
    MODES,
    FusedCase,
    by_loops,
    call_of,
    launched,
    outcome,
    random_fused,
    without_state,
)
from ..fused_rounding import assert_within_rounding, results_with_bounds

pytestmark = pytest.mark.interpreted


@pytest.fixture(autouse=True)
def kernels_that_run() -> None:
    skip_unless_built("triton")


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("mode", MODES)
def test_results_and_gradients_are_exact_but_for_rounding(mode, norm):
    dtype = DTYPES[(list(MODES).index(mode) + 2 * norm) % 4]
    assert_within_rounding(random_fused(2, dtype=dtype, norm=norm, **MODES[mode]))


@pytest.mark.parametrize("mode", ["plain", "pack, window 4", "documents, padding"])
def test_the_bounds_are_those_of_the_reference(mode):
    case = random_fused(3, dtype=torch.float64, **MODES[mode])
    expected = outcome(case, without_state)
    by_hand = results_with_bounds(case, 2.0**-53)
    assert by_hand.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(by_hand[name].value.reshape(x.shape), x, rtol=1e-12, atol=1e-12)


# States


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cut", [1, 2, 4])
def test_a_sequence_in_two_pieces_has_the_bits_of_the_whole(cut, dtype):
    case = random_fused(11, dtype=dtype, window=3, tables=2)
    whole = launched(case)
    rows = [torch.cat([torch.zeros_like(x[:, :2]), x[:, :cut]], dim=1)[:, -2:] for x in (case.k, case.v)]
    first, second = (
        replace(case, **{name: getattr(case, name)[:, part] for name in ("q", "k", "v", "cos", "sin")})
        for part in (slice(cut), slice(cut, None))
    )
    pieces = launched(first), launched(replace(second, k_state=rows[0], v_state=rows[1]))
    for x, before, after in zip(whole, *pieces, strict=True):
        assert x is not None
        assert before is not None
        assert after is not None
        assert torch.equal(torch.cat([before, after], dim=1), x)


def test_gradients_are_not_recorded_with_a_state():
    case = random_fused(1, 1, 3, rows=1)
    for trained in ("q", "k", "v", "alpha", "beta"):
        leaf = getattr(case, trained).detach().requires_grad_()
        with pytest.raises(ValueError, match="k_state and v_state must be None where gradients are recorded"):
            launched(replace(case, **{trained: leaf}))


# Changes that must not affect any bit


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "mode", [pytest.param({}, id="rows", marks=pytest.mark.slow), pytest.param({"lengths": [2, 0, 3]}, id="pack")]
)
def test_strides(layout, mode):
    for grad_layout in (layout, "expanded"):
        case = random_fused(13, 1, 3, layout=layout, grad_layout=grad_layout, **mode)
        assert_same_bits(outcome(case), outcome(case.map(lambda x: x.clone(memory_format=torch.contiguous_format))))


@pytest.mark.slow
def test_tables_that_are_views():
    case = random_fused(17, 2, 3, queries=1, dtype=torch.bfloat16, tables=2)
    expected = outcome(case)

    def half_of_wider(x: Tensor) -> Tensor:
        return torch.cat([torch.full_like(x, torch.nan), x], dim=2)[..., 3:]

    views = {
        "half": half_of_wider,
        "positions first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
        "elements first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    }
    for cos in views.values():
        assert_same_bits(outcome(replace(case, cos=cos(case.cos), sin=cos(case.sin))), expected)
        assert_same_bits(outcome(replace(case, cos=cos(case.cos))), expected)
    same = replace(case, cos=case.cos[1:], sin=case.sin[1:])
    for cos, sin in ((same.cos.expand(2, -1, -1), same.sin.expand(2, -1, -1)), (same.cos, same.sin.float())):
        assert_same_bits(outcome(replace(case, cos=cos, sin=sin)), outcome(same))


@pytest.mark.parametrize("tiling", [Tiling(positions=2), Tiling(positions=4, heads=2), Tiling(elements=16, heads=8)])
@pytest.mark.parametrize("mode", [{"window": 3}, {"lengths": [3, 0, 1, 3]}, {"mask": [[1, 0, 1, 1, 0, 1, 1]]}], ids=str)
def test_tiles(tiling, mode, monkeypatch):
    """Tiles end inside a document, a hole or a group of heads; only sums over all positions depend on the tiles."""
    case = random_fused(19, 1, 7, queries=3, **mode)
    expected = outcome(case)
    for name in triton_launch.TILING:
        monkeypatch.setitem(triton_launch.TILING, name, tiling)
    own = assert_within_rounding(case)
    for name in ("q", "k", "v", "gradient of q", "gradient of k", "gradient of v"):
        assert torch.equal(own[name], expected[name]), name


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "norm"])
def test_what_stands_in_the_padding(norm):
    """Neither the content of the padding nor its upstream gradients have an effect."""
    case = random_fused(29, norm=norm, mask=HOLES, window=3)
    assert case.mask is not None
    padding = ~case.mask[:, :, None, None]

    def filled(x: float) -> FusedCase:
        k, v, *grads = (y.masked_fill(padding, x) for y in (case.k, case.v, *case.grads[1:]))
        return replace(case, k=k, v=v, grads=(case.grads[0], *grads))

    expected = outcome(filled(-29.0))
    assert_same_bits(outcome(filled(torch.nan)), expected)
    for name in ("k", "v", "gradient of k", "gradient of v"):
        assert not expected[name].masked_select(padding).any(), name


# Autograd


@pytest.mark.parametrize(
    ("trained", "shifted"), [(name, "kv") for name in LEAVES] + [(name, "v") for name in LEAVES if name != "alpha"]
)
def test_a_single_input_may_need_its_gradient_alone(trained, shifted):
    case = random_fused(31, 1, 3, shifted=shifted)
    leaf = getattr(case, trained)
    expected = outcome(case)[f"gradient of {trained}"]
    leaf.requires_grad_()
    pairs = [(y, grad) for y, grad in zip(launched(case), case.grads, strict=True) if y is not None and y.requires_grad]
    ys, grads = zip(*pairs, strict=True)
    torch.autograd.backward(ys, grads)
    assert torch.equal(leaf.grad, expected)


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("only", [0, 1, 2])
def test_a_gradient_may_come_back_to_a_single_result(only, norm):
    case = random_fused(37, 1, 4, dtype=torch.float64, norm=norm)
    leaves = [x.requires_grad_() for name in LEAVES if (x := getattr(case, name)) is not None]
    results = []
    for op in (launched, by_loops):
        y = op(case)[only]
        assert y is not None
        results.append(torch.autograd.grad(y, leaves, case.grads[only], allow_unused=True, materialize_grads=True))
    for x, expected in zip(*results, strict=True):
        torch.testing.assert_close(x, expected, rtol=1e-6 if x.dtype == torch.float32 else 1e-12, atol=1e-12)


@pytest.mark.parametrize("norm", [False, True], ids=["no norm", "norm"])
@pytest.mark.parametrize("mode", [{}, {"mask": HOLES}, {"lengths": [2, 0, 3]}], ids=["sequences", "padding", "pack"])
def test_memory_kept_for_backward_is_the_inputs(mode, norm):
    """Queries are saved only with a norm; with boundaries, some 32-bit integers are saved for each token."""
    case = random_fused(41, **mode, norm=norm)
    wanted = [name for name in LEAVES if getattr(case, name) is not None]
    for name in wanted:
        getattr(case, name).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        launched(case)
    addresses = {name: getattr(case, name).data_ptr() for name in (*wanted, "cos", "sin")}
    assert (addresses["q"] in {x.data_ptr() for x in kept}) == norm
    others = [x for x in kept if x.data_ptr() not in addresses.values()]
    (batch, positions), sequences = case.k.shape[:2], len(mode.get("lengths", "bb"))
    rows = positions + sequences // batch
    sizes = [2 * batch * positions, 2 * batch * rows] if mode else []
    assert [(x.dtype, x.numel()) for x in others] == [(torch.int32, size) for size in sizes]


@pytest.mark.slow
def test_operators_keep_the_rules_of_torch_library():
    case = random_fused(47, 2, 3, mask=[[0, 1, 1], [1, 0, 1]])
    for name in LEAVES:
        getattr(case, name).requires_grad_()
    torch.library.opcheck(torch.ops.kvshift.shift.default, (*call_of(case)[:TENSORS], case.eps, 0))
