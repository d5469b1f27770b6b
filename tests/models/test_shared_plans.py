"""With documents or padding, one plan of the shift serves all layers of a call."""

import pytest
import torch

from kvshift.ops import boundaries

from .llama.tiny import left_padded, random_tokens, tiny_model


def batches():
    ids, mask = left_padded([random_tokens(length, seed=length) for length in (11, 4)])
    documents = torch.tensor([[0] * 5 + [1] * 6, [3] * 8 + [1] * 3])
    packed = {"input_ids": random_tokens(1, 11), "cu_seq_lens_q": torch.tensor([0, 4, 11], dtype=torch.int32)}
    return {
        "plain": {"input_ids": random_tokens(2, 11)},
        "padded": {"input_ids": ids, "attention_mask": mask},
        "documents": {"input_ids": random_tokens(2, 11), "seq_idx": documents},
        "packed": packed,
    }


@pytest.mark.parametrize("batch", ["padded", "documents", "packed"])
def test_one_plan_serves_all_layers(batch, monkeypatch):
    made, real = [], boundaries.ShiftPlan
    monkeypatch.setattr(boundaries, "ShiftPlan", lambda *parts: made.append(real(*parts)) or made[-1])
    model = tiny_model().train()
    for calls in (1, 2):
        model(**batches()[batch], use_cache=False).logits.square().sum().backward()
        assert len(made) == calls
    with torch.no_grad():
        model(**batches()[batch], use_cache=False)
    assert [plan.readers is not None for plan in made] == [True, True, False]  # only calls with gradients need readers


def test_a_plan_is_shared_by_the_same_tensors_alone():
    mask = torch.tensor([[True, False, True]])

    def plan(mask, window=2):
        return boundaries.plan_shift(1, 3, window, window - 1, mask.device, mask=mask)

    assert plan(mask) is not plan(mask)
    with boundaries.shared_plans():
        first = plan(mask)
        assert plan(mask) is first
        assert plan(mask, window=3).sources.shape == (1, 3, 3)
        assert plan(torch.ones_like(mask)).sources.tolist() != first.sources.tolist()
        with boundaries.shared_plans():
            assert plan(mask) is not first
        assert plan(mask) is first
    assert plan(mask) is not first
