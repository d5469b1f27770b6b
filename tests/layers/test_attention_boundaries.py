"""Documents in one row give separate rows' results. `FED` in `test_attention_state.py` covers sequences and padding."""

import itertools

import pytest
import torch

from tests.covering import covering
from tests.layers.attention_cases import (
    BOUNDS,
    DOCUMENTS,
    GQA,
    NUMBERS,
    VARIED,
    B,
    T,
    close,
    close_all,
    gradients,
    make,
    tokens,
)


@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
@pytest.mark.parametrize("lengths", [DOCUMENTS, [1], [0]], ids=str)
def test_packed_documents_equal_separate_ones(options, lengths):
    layer, length = make(**options), sum(lengths)
    x, weights = tokens(1, length).requires_grad_(), tokens(1, length, seed=1)
    packed, state = layer(x, seq_idx=NUMBERS[None, :length])
    assert state.sequences == 1
    separate = torch.cat([layer(part)[0] for part in x.split(lengths, dim=1)], dim=1)
    close(packed, separate)
    close_all(gradients(packed, weights, layer, x), gradients(separate, weights, layer, x))


def test_sequences_of_a_batch_have_documents_of_their_own():
    layer = make(GQA, sliding_window=5)
    lengths = [[4, 7], [11], [1, 2, 8]]
    x = tokens(B, T)
    seq_idx = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    expected = [torch.cat([layer(part)[0] for part in x[b : b + 1].split(lengths[b], dim=1)], dim=1) for b in range(B)]
    close(layer(x, seq_idx=seq_idx)[0], torch.cat(expected))


@covering(options=VARIED, boundaries=["cu_seqlens", "seq_idx"], dtype=[torch.float32, torch.float64, torch.bfloat16])
def test_no_bit_of_a_document_depends_on_the_one_before(options, boundaries, dtype):
    layer = make(dtype=dtype, **options)
    where = {"cu_seqlens": BOUNDS} if boundaries == "cu_seqlens" else {"seq_idx": NUMBERS.unsqueeze(0)}
    results = []
    for changed in (False, True):
        x = tokens(1, T, dtype=dtype)
        if changed:
            x[:, 8] = 100 * tokens(1, seed=9, dtype=dtype)  # the last token of the fourth document
        x.requires_grad_()
        out, _ = layer(x, **where)
        (grad,) = torch.autograd.grad((out * tokens(1, T, seed=1, dtype=dtype)).sum(), x)
        results.append((out, grad))
    (out, grad), (changed_out, changed_grad) = results
    for before, after in ((out, changed_out), (grad, changed_grad)):
        assert torch.equal(before[:, 9:], after[:, 9:])
        assert torch.equal(before[:, :4], after[:, :4])
    assert not torch.equal(out[:, 8], changed_out[:, 8])


@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_padding_inside_documents(options):
    layer = make(**options)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0]], dtype=torch.bool)
    # Padding may have any document number.
    numbers = torch.where(mask[0], NUMBERS, torch.tensor([5, 0, 0, 3, 0, -8, 0, 0, 2, 0, 7]))
    x = torch.where(mask.unsqueeze(2), tokens(1, T), torch.inf)
    expected = torch.zeros_like(x)
    for start, end in itertools.pairwise(BOUNDS.tolist()):
        real = [t for t in range(start, end) if mask[0, t]]
        expected[:, real] = layer(x[:, real])[0]
    # A document whose only token is padding vanishes, and its neighbours, both numbered 7, become one document.
    assert not mask[0, 3]
    joined = [1, 2, 4, 6, 7]
    expected[:, joined] = layer(x[:, joined])[0]
    close(layer(x, mask=mask, seq_idx=numbers.unsqueeze(0))[0], expected)
