"""Head scores: worked by hand, and on models whose weights were set by hand."""

from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.core.errors import LabError
from kvshift_lab.run.head_scores import (
    attention_maps,
    attention_scores,
    measure_heads,
    repeated_sequences,
    sequences_for,
    shares,
)
from kvshift_lab.run.repeat_config import RepeatConfig

N = 11
T = 2 * N


def look_back(back):
    """Return attention (1, 1, T, T) to the token `back` places before, and to nothing where there is none."""
    attention = torch.zeros(1, 1, T, T)
    for t in range(back, T):
        attention[0, 0, t, t - back] = 1
    return attention


def only(attention, **coefficients):
    (score,) = attention_scores(attention, length=N, **coefficients)
    return score


def where_one(values):
    assert set(values.values()) <= {0.0, 1.0}
    return {name for name, value in values.items() if value}


NOW, BEFORE = [[1.0, 0.0]], [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("back", "alpha", "beta", "attended", "matched", "moved", "alone"),
    [
        # The table of the module's docstring, line by line; e = t - N.
        (N, NOW, NOW, "earlier", "earlier", "earlier", 0),
        (N - 1, NOW, NOW, "earlier+1", "earlier+1", "earlier+1", 0),
        (N - 1, BEFORE, NOW, "earlier+1", "earlier", "earlier+1", 1),
        (N - 1, BEFORE, BEFORE, "earlier+1", "earlier", "earlier", 0),
        (N, NOW, BEFORE, "earlier", "earlier", "earlier-1", 0),
        (N - 2, NOW, BEFORE, "earlier+2", "earlier+2", "earlier+1", 0),
        (1, None, NOW, "previous", "previous", "previous", 0),
        (0, None, BEFORE, None, None, "previous", 0),
    ],
)
def test_where_attention_lies_and_what_it_reads(back, alpha, beta, attended, matched, moved, alone):
    score = only(look_back(back), alpha=alpha, beta=beta)
    assert where_one(score.attention) == {attended} - {None}
    assert where_one(score.matched) == {matched} - {None}
    assert where_one(score.moved) == {moved}
    assert score.alone == alone
    assert score.scores == {
        "previous_token": moved == "previous",
        "duplicate_token": moved == "earlier",
        "induction": moved == "earlier+1",
    }


def test_mixtures_are_spread_by_their_shares():
    # alpha (1, -3) has the shares 1/4 and 3/4, beta (0.4, 0.1) the shares 4/5 and 1/5.
    score = only(look_back(N - 1), alpha=[[1.0, -3.0]], beta=[[0.4, 0.1]])
    assert score.matched == pytest.approx(
        {"previous": 0, "earlier-1": 0, "earlier": 0.75, "earlier+1": 0.25, "earlier+2": 0}
    )
    assert score.moved == pytest.approx(
        {"previous": 0, "earlier-1": 0, "earlier": 0.2, "earlier+1": 0.8, "earlier+2": 0}
    )
    assert score.alone == pytest.approx(0.75 * 0.8)
    three = only(look_back(N - 2), alpha=[[0.0, 0.0, 1.0]], beta=[[0.0, 1.0, 0.0]])  # window 3: e + 2 reads e, e + 1
    assert (three.matched["earlier"], three.moved["earlier+1"], three.alone) == (1, 1, 1)
    assert "earlier+3" in three.attention


def test_heads_read_by_their_own_key_value_head():
    attention = look_back(N - 1).expand(1, 4, T, T)
    found = attention_scores(attention, length=N, alpha=None, beta=[[1.0, 0.0], [0.0, 1.0]], layer=3)
    assert [score.scores["induction"] for score in found] == [1, 1, 0, 0]
    assert [score.scores["duplicate_token"] for score in found] == [0, 0, 1, 1]
    assert [(score.layer, score.head) for score in found] == [(3, 0), (3, 1), (3, 2), (3, 3)]


def test_moved_is_the_weight_of_each_raw_value_in_the_output():
    generator = torch.Generator().manual_seed(5)
    attention = torch.rand(2, 1, T, T, generator=generator).tril()
    attention /= attention.sum(-1, keepdim=True)
    beta = [[0.7, 0.3]]
    value = torch.eye(T)  # so the output is the weight of each raw value
    mixed = 0.7 * value + 0.3 * torch.cat([torch.zeros(1, T), value[:-1]])
    output = attention[:, 0] @ mixed
    score = only(attention, beta=beta)
    for name, back in {"earlier-1": N + 1, "earlier": N, "earlier+1": N - 1, "earlier+2": N - 2}.items():
        by_hand = [output[row, t, t - back] for row in range(2) for t in range(N + 1, T)]
        assert score.moved[name] == pytest.approx(float(torch.stack(by_hand).mean()), rel=1e-5), name
    by_hand = [output[row, t, t - 1] for row in range(2) for t in range(1, T)]
    assert score.scores["previous_token"] == pytest.approx(float(torch.stack(by_hand).mean()), rel=1e-5)


def test_shares():
    coefficients = [[2.0, -2.0], [0.0, 0.0], [0.0, 5.0]]
    expected = [[0.5, 0.5]] * 2 + [[0.0, 0.0]] * 2 + [[0.0, 1.0]] * 2
    assert shares(coefficients, 6).tolist() == expected
    assert shares(None, 3).tolist() == [[1.0]] * 3


def test_sequences_too_short_to_tell_positions_apart():
    with pytest.raises(ValueError, match="length must be at least 6; got 22 positions and length 5"):
        attention_scores(look_back(1), length=5, beta=NOW)
    with pytest.raises(ValueError, match="got 22 positions and length 12"):
        attention_scores(look_back(1), length=12)


# Models with weights set by hand. Rotary frequencies fall with the dimension, so tokens use slow dimensions only.

WIDTH, HEADS = 64, 1
SLOW = [*range(16, 32), *range(48, 64)]


def by_hand(*, query=4.0, alpha=(0.0, 1.0), beta=(1.0, 0.0)):
    """Return a model of one layer and head: q = `query` x, k = v = x, output 10 x, logits from the product with x."""
    config = KVShiftLlamaConfig(
        vocab_size=len(SLOW),
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1e8},
        attn_implementation="eager",
    )
    model = KVShiftLlamaForCausalLM(config).eval()
    layer = model.model.layers[0]
    with torch.no_grad():
        eye = torch.eye(WIDTH)
        for name, factor in {"q_proj": query, "k_proj": 1.0, "v_proj": 1.0, "o_proj": 10.0}.items():
            getattr(layer.self_attn, name).weight.copy_(factor * eye)
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(eye[SLOW])
        model.lm_head.weight.copy_(eye[SLOW])
        layer.self_attn.shift.alpha.copy_(torch.tensor([alpha]))
        layer.self_attn.shift.beta.copy_(torch.tensor([beta]))
    return model


ROWS = RepeatConfig(length=N, rows=3, batch_size=2, seed=1)


def test_a_whole_model_with_kv_shift_that_is_an_induction_head():
    found = measure_heads(by_hand(), ROWS)
    (score,) = found.heads
    assert score.scores["induction"] > 0.99
    assert score.alone > 0.99
    assert found.behaviour["second"]["accuracy"] == 1
    assert found.behaviour["second"]["loss"] < found.behaviour["first"]["loss"]
    assert found.behaviour["first"]["accuracy"] < 0.2
    assert found.coefficients == [{"alpha": [[0.0, 1.0]], "beta": [[1.0, 0.0]]}]
    assert (found.length, found.rows) == (N, 3)


def test_a_head_that_tells_nothing_apart_scores_what_uniform_says():
    found = measure_heads(by_hand(query=0.0), ROWS)
    (score,) = found.heads
    harmonic = [1 / (t + 1) for t in range(T)]
    assert found.uniform["earlier"] == pytest.approx(sum(harmonic[N + 1 :]) / (N - 1))
    assert found.uniform["previous"] == pytest.approx(sum(harmonic[1:]) / (T - 1))
    for name, value in score.attention.items():
        assert value == pytest.approx(found.uniform["previous" if name == "previous" else "earlier"], rel=1e-5), name
    assert score.alone == pytest.approx(found.uniform["earlier"], rel=1e-5)


def test_batches_do_not_matter():
    model = by_hand(alpha=(0.4, 0.6), beta=(0.9, -0.1), query=0.5)
    whole, parts = measure_heads(model, replace(ROWS, batch_size=3)), measure_heads(model, ROWS)
    assert parts.heads[0].moved == pytest.approx(whole.heads[0].moved, rel=1e-5)
    assert parts.heads[0].alone == pytest.approx(whole.heads[0].alone, rel=1e-5)
    assert parts.behaviour["second"] == pytest.approx(whole.behaviour["second"], rel=1e-5)


def test_the_half_that_comes_again_is_told_from_the_first_by_one_position_exactly():
    # With a token at the start, every position moves by one; all N - 1 answers of a perfect head must stay right.
    found = measure_heads(by_hand(), replace(ROWS, begin=7))
    assert found.behaviour["second"]["accuracy"] == 1
    assert found.heads[0].alone > 0.99


@pytest.mark.parametrize("begin", [None, 7])
def test_halves_are_all_but_the_first_token_of_each(begin):
    model, config = by_hand(query=0.3), replace(ROWS, begin=begin)
    rows = sequences_for(model, config, window=2)
    with torch.no_grad():
        surprise = -model(rows).logits.log_softmax(-1)
    start = 0 if begin is None else 1
    halves = {"first": range(start + 1, start + N), "second": range(start + N + 1, start + T)}
    found = measure_heads(model, config).behaviour
    for name, tokens in halves.items():
        by_token = [surprise[row, t - 1, rows[row, t]] for row in range(3) for t in tokens]
        assert found[name]["loss"] == pytest.approx(float(torch.stack(by_token).mean()), rel=1e-5), name


def test_models_of_other_families():
    config = GPT2Config(vocab_size=29, n_positions=24, n_embd=15, n_layer=2, n_head=3, attn_implementation="eager")
    found = measure_heads(GPT2LMHeadModel(config).eval(), RepeatConfig(rows=2))
    assert found.length == 12  # two copies fill its 24 positions
    assert found.coefficients == []
    assert [(score.layer, score.head) for score in found.heads] == [(n, h) for n in range(2) for h in range(3)]
    for score in found.heads:
        assert score.attention == score.moved == score.matched
        assert all(0 < value < 1 for value in score.attention.values())


def test_attention_maps_are_those_of_the_heads_asked_for():
    generator = torch.Generator().manual_seed(3)
    config = GPT2Config(vocab_size=29, n_positions=24, n_embd=15, n_layer=2, n_head=3, attn_implementation="eager")
    model = GPT2LMHeadModel(config).eval()
    ids = torch.randint(29, (17,), generator=generator)
    one, other = attention_maps(model, ids.tolist(), [(1, 2), (0, 1)])
    whole = model(ids.unsqueeze(0), output_attentions=True).attentions
    assert torch.equal(one, whole[1][0, 2])
    assert torch.equal(other, whole[0][0, 1])
    assert one.shape == (17, 17)


def test_without_probabilities_nothing_is_measured():
    model = by_hand()
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match='attn_implementation="eager"'):
        measure_heads(model, ROWS)


def test_sequences_are_different_tokens_that_come_twice():
    config = RepeatConfig(length=N, rows=5, lowest_token=3, highest_token=16, begin=9)
    rows = repeated_sequences(config, vocab_size=23, positions=None)
    assert rows.shape == (5, 1 + T)
    assert rows[:, 0].tolist() == [9] * 5
    assert torch.equal(rows[:, 1 : 1 + N], rows[:, 1 + N :])
    for row in rows[:, 1 : 1 + N].tolist():
        assert len(set(row)) == N
        assert set(row) <= set(range(3, 17)) - {9}
    assert len({tuple(row) for row in rows.tolist()}) == 5
    assert torch.equal(rows, repeated_sequences(config, vocab_size=23, positions=None))
    assert not torch.equal(rows, repeated_sequences(replace(config, seed=1), vocab_size=23, positions=None))


@pytest.mark.parametrize(
    ("vocab_size", "positions", "begin", "expected"),
    [(1000, None, None, 64), (50, None, None, 50), (1000, 41, None, 20), (1000, 41, 0, 20), (1000, 40, 0, 19)],
)
def test_length_follows_the_model(vocab_size, positions, begin, expected):
    rows = repeated_sequences(RepeatConfig(rows=1, begin=begin), vocab_size=vocab_size, positions=positions)
    assert rows.shape[1] == 2 * expected + (begin is not None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows must be 1 or more, got 0"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"length": 24}, r"length must be 6 to 23 .*, got 24"),
        ({"length": 5}, r"length must be 6 to 23 .*, got 5"),
        ({"lowest_token": 20}, r"there are 3 tokens to draw from"),
        ({"lowest_token": 23}, "must be token ids of the model, 0 to 22"),
        ({"highest_token": 23}, "must be token ids of the model, 0 to 22"),
        ({"lowest_token": 4, "highest_token": 3}, "ascending"),
        ({"begin": 23}, "begin must be a token id of the model, 0 to 22, got 23"),
    ],
)
def test_sequences_that_cannot_be_made(options, message):
    with pytest.raises(LabError, match=message):
        repeated_sequences(RepeatConfig(**options), vocab_size=23, positions=64, window=2)
