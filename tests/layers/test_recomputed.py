"""`recompute_in_backward` on plain tensors: which copies it drops, and what it computes again in their place."""

import itertools

import pytest
import torch

from kvshift.layers.recompute import recompute_in_backward


def outputs_of(x):
    """Return a tensor in attention's layout, (B, G, T, D), and a function that recomputes it from x, (B, T, G, D)."""
    return (2 * x).transpose(1, 2), lambda: [2 * x.detach()]


@pytest.mark.parametrize(
    ("copy", "left_out"),
    [
        (lambda x: x, True),
        (lambda x: x.transpose(2, 3)[:, 1:], True),
        (lambda x: x.bfloat16(), True),
        (lambda x: x.repeat_interleave(3, dim=1), True),
        (lambda x: x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(2, 9, 5, 7).bfloat16(), True),
        (lambda x: x.bfloat16(memory_format=torch.contiguous_format), False),
        (lambda x: x.repeat_interleave(3, dim=1).to(torch.bfloat16, memory_format=torch.channels_last), False),
        (lambda x: x[:, None].expand(-1, 3, -1, -1, -1).reshape(2, 9, 5, 7), False),
        (lambda x: x.repeat_interleave(3, dim=2), False),
        (lambda x: x.repeat(1, 3, 1, 1), False),
        (lambda x: x.contiguous(), False),
        (lambda x: x.neg(), False),
        (lambda x: x.bfloat16().float(), False),
    ],
    ids=itertools.count(),
)
def test_only_what_the_graph_says_is_a_copy_is_left_out(copy, left_out):
    x = torch.randn(2, 5, 3, 7, requires_grad=True)
    made = []
    output, function = outputs_of(x)
    expected = torch.autograd.grad(copy(output).square().sum(), x, retain_graph=True)
    with recompute_in_backward([output], lambda: made.append(None) or function(), [x]):
        y = copy(output).square()  # saves the result of `copy`
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected[0])
    assert len(made) == left_out


@pytest.mark.parametrize(
    "copy", [lambda x: x, lambda x: x.mT[:, 1:], lambda x: x.repeat_interleave(3, dim=1)], ids=itertools.count()
)
def test_what_was_left_out_has_its_second_derivative(copy):
    """In the graph, autograd puts the recomputed tensor in the place of the dropped one."""
    x = torch.randn(2, 5, 3, 7, dtype=torch.float64, requires_grad=True)
    made, results = [], []
    for leaves_out in (False, True):
        output, function = outputs_of(x)
        outputs = [output] if leaves_out else []
        with recompute_in_backward(outputs, lambda function=function: made.append(None) or function(), [x]):
            y = copy(output).pow(3)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        results.append(torch.autograd.grad(first.square().sum(), x)[0])
    assert made
    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(lambda x: x[:, :4] * 2, r"672 bytes of torch.float32, expected 840"), (lambda x: (2 * x).int(), r"torch.int32")],
)
def test_what_is_recomputed_must_have_the_layout_of_the_first(wrong, message):
    x = torch.randn(2, 5, 3, 7, requires_grad=True)
    output, _ = outputs_of(x)
    with recompute_in_backward([output], lambda: [wrong(x.detach())], [x]):
        y = output.square().sum()
    with pytest.raises(RuntimeError, match=f"recomputed for backward has .*{message}"):
        y.backward()


def test_two_uses_of_a_tensor_are_made_once():
    x = torch.randn(2, 5, 3, 7, requires_grad=True)
    output, function = outputs_of(x)
    made = []
    with recompute_in_backward([output], lambda: made.append(None) or function(), [x]):
        y = (output.square() + output.exp() + output.sin()).sum()
    y.backward(retain_graph=True)
    assert len(made) == 1
    y.backward()
    assert len(made) == 2
