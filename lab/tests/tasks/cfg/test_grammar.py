"""The grammars of the CFG task against their sentences, listed one by one."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from kvshift_lab.core.errors import LabError
from kvshift_lab.tasks import CFG3F, CFG3S, CFGGrammar

from ..cases import seeded
from .grammars import TINY, windows, written_out


def neighbours(text: tuple[int, ...], tokens: range) -> set[tuple[int, ...]]:
    """Return all texts that result from inserting, deleting or changing one token."""
    longer = {(*text[:at], token, *text[at:]) for at in range(len(text) + 1) for token in tokens}
    shorter = {text[:at] + text[at + 1 :] for at in range(len(text))}
    other = {(*text[:at], token, *text[at + 1 :]) for at in range(len(text)) for token in tokens}
    return (longer | shorter | other) - {text}


@pytest.mark.parametrize("grammar", TINY.values(), ids=TINY)
def test_what_is_a_sentence_and_how_probable(grammar: CFGGrammar):
    """Check all sentences, all other short texts, and all texts one token away from a sentence, with BOS included.

    `parses` only compares the same probability, so it is called for every tenth of the other texts.
    """
    sentences = written_out(grammar)
    tokens = range(grammar.vocab_size)
    for sentence, chance in sentences.items():
        assert math.exp(grammar.log_probability(torch.tensor(sentence))) == pytest.approx(chance, rel=1e-12)
        assert grammar.parses(torch.tensor(sentence))
    others = {text for length in range(4) for text in itertools.product(tokens, repeat=length)}
    others = others.union(*(neighbours(sentence, tokens) for sentence in sentences)) - sentences.keys()
    assert len(others) > 5 * len(sentences)
    for text in others:
        assert grammar.log_probability(torch.tensor(text, dtype=torch.int64)) == -math.inf
    for text in sorted(others)[::10]:
        assert not grammar.parses(torch.tensor(text, dtype=torch.int64))


@pytest.mark.parametrize("grammar", TINY.values(), ids=TINY)
def test_the_law_of_lengths_and_tokens(grammar: CFGGrammar):
    sentences = written_out(grammar)
    lengths = grammar.lengths
    probability = np.zeros(lengths.longest + 1)
    token_at = np.zeros((grammar.vocab_size, lengths.longest))
    for sentence, chance in sentences.items():
        probability[len(sentence)] += chance
        token_at[list(sentence), range(len(sentence))] += chance
    np.testing.assert_allclose(lengths.probability, probability, rtol=0, atol=1e-15)
    np.testing.assert_allclose(lengths.token_at, token_at, rtol=0, atol=1e-15)
    assert (lengths.shortest, lengths.longest) == (min(map(len, sentences)), max(map(len, sentences)))
    assert lengths.mean == pytest.approx(sum(len(sentence) * chance for sentence, chance in sentences.items()))


@pytest.mark.parametrize("grammar", TINY.values(), ids=TINY)
def test_sentences_are_drawn_with_their_probabilities(grammar: CFGGrammar):
    sentences = written_out(grammar)
    count = 20_000
    found = Counter(tuple(sentence.tolist()) for sentence in grammar.sentences(seeded(0), count))
    assert found.keys() <= sentences.keys()
    expected = {sentence: count * chance for sentence, chance in sentences.items()}
    by_cell = [(0, 0.0)]  # all rare sentences together
    for sentence, times in expected.items():
        if times < 10:
            by_cell[0] = (by_cell[0][0] + found[sentence], by_cell[0][1] + times)
        else:
            by_cell.append((found[sentence], times))
    cells = [cell for cell in by_cell if cell[1] > 0]
    assert len(cells) >= 15
    statistic = sum((seen - times) ** 2 / times for seen, times in cells)
    assert statistic < chi2.ppf(0.999, len(cells) - 1)


def test_the_published_lengths_of_cfg3f():
    """A sample has mean 249 and lengths 117 ... 459; the grammar itself has mean 249.86 and lengths 64 ... 729."""
    lengths = CFG3F.lengths
    assert lengths.mean == pytest.approx(249.860, abs=5e-4)
    assert (lengths.shortest, lengths.longest) == (64, 729)
    assert lengths.probability[117:460].sum() > 0.999
    sample = torch.tensor([len(sentence) for sentence in CFG3F.sentences(seeded(1), 6000)], dtype=torch.float64)
    error = float(sample.std()) / 6000**0.5
    assert error < 1
    assert abs(float(sample.mean()) - lengths.mean) < 3 * error


def test_the_small_grammar_has_the_shape_of_the_large_one():
    lengths = CFG3S.lengths
    assert CFG3S.vocab_size == CFG3F.vocab_size == 4
    assert (lengths.shortest, lengths.longest) == (12, 27)
    for grammar in (CFG3F, CFG3S):
        sizes = [len(side) for sides in grammar.rules_by_symbol.values() for side in sides]
        assert set(sizes) == {2, 3}


@pytest.mark.parametrize(("grammar", "count"), [(CFG3F, 20), (CFG3S, 60)], ids=["cfg3f", "cfg3s"])
def test_sentences_parse_and_with_one_token_changed_mostly_do_not(grammar: CFGGrammar, count: int):
    refused = 0
    generator = seeded(2)
    for sentence in grammar.sentences(generator, count):
        assert grammar.parses(sentence)
        changed = sentence.clone()
        at = torch.randint(len(sentence), (), generator=generator)
        changed[at] = 1 + (sentence[at] + torch.randint(2, (), generator=generator)) % 3
        assert changed[at] != sentence[at]
        refused += not grammar.parses(changed)
    assert refused > 0.8 * count


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("grammar", TINY.values(), ids=TINY)
def test_how_probable_each_token_of_a_window_is(grammar: CFGGrammar, length: int):
    """This holds for all texts of that length, including those that are no window of a stream."""
    probable = windows(grammar, length)
    texts = list(itertools.product(range(grammar.vocab_size), repeat=length))
    found = grammar.window_log_probability(torch.tensor(texts))
    assert found.shape == (len(texts), length)
    assert not found.isnan().any()
    for text, row in zip(texts, found, strict=True):
        assert math.exp(row.sum()) == pytest.approx(probable.get(text, 0), rel=1e-12, abs=0)
    shorter = {text[:-1]: row[:-1] for text, row in zip(texts, found, strict=True)}
    for text, row in zip(texts, found, strict=True):  # later tokens change nothing
        assert torch.equal(row[:-1], shorter[text[:-1]])
    assert length == 1 or (found == -math.inf).any()


def test_the_chain_of_a_large_grammar():
    """The shares of tokens in its stream are those that the law of lengths gives."""
    chain, lengths = CFG3F.chain, CFG3F.lengths
    np.testing.assert_allclose(chain.following.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(chain.stationary @ chain.following, chain.stationary, rtol=0, atol=1e-15)
    shares = np.bincount(chain.token, weights=chain.stationary)
    expected = np.array([1, *lengths.token_at.sum(axis=1)[1:]]) / (lengths.mean + 1)
    np.testing.assert_allclose(shares, expected, rtol=1e-11)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ((), "must have 1 line or more, got none"),
        (("5 - 1 2",), "must be lines such as .*, got '5 - 1 2'"),
        (("5 -> 1 | ",), r"must be lines such as .*, got '5 -> 1 \| '"),
        (("5 -> 1 a",), "must be lines such as .*, got '5 -> 1 a'"),
        (("5 -> 1", "5 -> 2"), "one line for each symbol, got two for 5"),
        (("5 -> 1 3",), r"without rules must be 1, 2, .*, got \[1, 3\]"),
        (("5 -> 0 1",), r"without rules must be 1, 2, .*, got \[0, 1\]"),
        (("5 -> 1 0", "0 -> 1"), "must be 1, 2"),
        (("5 -> 1 2", "4 -> 1 1"), "no rule produces 4, and the root is the first symbol"),
        (("5 -> 4 1", "4 -> 1 5 | 2"), "no symbol may produce itself, got [45] <- [45] <- [45]"),
        (("5 -> 5 1",), "no symbol may produce itself, got 5 <- 5"),
        (
            (*(f"{k} -> {k - 1} {k - 1} | {k - 1} {k - 1} {k - 1}" for k in range(12, 2, -1)), "2 -> 1"),
            r"must be representable in float64, got exp\(-\d+\)",
        ),
    ],
)
def test_what_is_no_grammar_is_refused(rules: tuple[str, ...], message: str):
    with pytest.raises(LabError, match=rf"^grammar\.rules.*{message}"):
        CFGGrammar(rules=rules)
