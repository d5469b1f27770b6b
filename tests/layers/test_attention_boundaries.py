"""Documents and padding in one call of the attention layer: as if each sequence were alone."""

import itertools

import pytest
import torch

from tests.covering import covering
from tests.layers.attention_cases import (
    BOUNDS,
    DOCUMENTS,
    GQA,
    MASKS,
    NUMBERS,
    VARIED,
    B,
    E,
    T,
    close,
    close_all,
    gradients,
    make,
    tokens,
)
from tests.layers.attention_reference import reference_attention


@pytest.mark.parametrize("boundaries", ["cu_seqlens", "seq_idx"])
@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_packed_documents_equal_separate_ones(options, boundaries):
    layer = make(**options)
    x, weights = tokens(1, T).requires_grad_(), tokens(1, T, seed=1)
    where = {"cu_seqlens": BOUNDS} if boundaries == "cu_seqlens" else {"seq_idx": NUMBERS.unsqueeze(0)}
    packed, state = layer(x, **where)
    assert state.sequences == (len(DOCUMENTS) if boundaries == "cu_seqlens" else 1)
    separate = torch.cat([layer(part)[0] for part in x.split(DOCUMENTS, dim=1)], dim=1)
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


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_padding_of_any_content_is_as_if_it_were_not_there(options, mask):
    layer = make(**options)
    padding = torch.where(mask, 0.0, torch.nan).unsqueeze(2)
    x, weights = (tokens(B, T) + padding).requires_grad_(), tokens(B, T, seed=1)
    out, _ = layer(x, mask=mask)
    assert not out[~mask].any()
    alone = torch.zeros_like(out)
    for b in range(B):
        alone[b, mask[b]] = layer(x[b : b + 1, mask[b]])[0].squeeze(0)
    close(out, alone)
    close_all(gradients(out, weights, layer, x), gradients(alone, weights, layer, x))


@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_padding_inside_documents(options):
    layer = make(**options)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0]], dtype=torch.bool)
    # On padding the document's number may be anything.
    numbers = torch.where(mask[0], NUMBERS, torch.tensor([5, 0, 0, 3, 0, -8, 0, 0, 2, 0, 7]))
    x = torch.where(mask.unsqueeze(2), tokens(1, T), torch.inf)
    expected = torch.zeros_like(x)
    for start, end in itertools.pairwise(BOUNDS.tolist()):
        real = [t for t in range(start, end) if mask[0, t]]
        expected[:, real] = layer(x[:, real])[0]
    close(layer(x, mask=mask, cu_seqlens=BOUNDS)[0], expected)
    # Without its one token, a document between two others is not there: here both are numbered 7.
    assert not mask[0, 3]
    joined = [1, 2, 4, 6, 7]
    expected[:, joined] = layer(x[:, joined])[0]
    close(layer(x, mask=mask, seq_idx=numbers.unsqueeze(0))[0], expected)


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("options", VARIED.values(), ids=VARIED)
def test_short_sequences(options, length):
    layer = make(**options)
    x = tokens(B, length)
    expected = torch.zeros(B, 0, E, dtype=x.dtype)
    if length:
        expected = torch.stack([reference_attention(layer, row) for row in x])
    for where in (
        {},
        {"mask": torch.ones(B, length, dtype=torch.bool)},
        {"seq_idx": torch.zeros(B, length, dtype=torch.int32)},
    ):
        out, state = layer(x, **where)
        close(out, expected)
        assert state.seen.tolist() == [length] * B
    out, state = layer(x[:1], cu_seqlens=torch.tensor([0, 0, length]))
    close(out, expected[:1])
    assert state.seen.tolist() == [0, length]
