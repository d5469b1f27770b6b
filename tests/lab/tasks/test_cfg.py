"""CFG: the grammar against its sentences written out one by one; sequences and questions against the grammar."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from kvshift.lab.core.errors import LabError
from kvshift.lab.core.options import from_json, to_json
from kvshift.lab.tasks import CFG3F, CFG3S, CFGConfig, CFGGrammar, CFGTask, QuestionTask, TaskBatches, cfg

from .cases import check_shape, drawn_numbers, seeded

pytestmark = pytest.mark.no_models

DRAWN = CFGGrammar(rules=("5 -> 4 3 | 3 4 4", "4 -> 1 2 | 2", "3 -> 1 1 | 4 2"))
RAGGED = CFGGrammar(rules=("9 -> 6 7 6 | 7 7 | 6 3", "6 -> 1 | 2 3 | 1", "7 -> 6 6 | 3 | 2"))
TINY = {"drawn": DRAWN, "ragged": RAGGED}
"""Of few sentences, some with several derivations; the second has rules of one part and levels that mix."""
PAGE = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")
FIELDS = ("input_ids", "labels", "slices")


def written_out(grammar: CFGGrammar) -> dict[tuple[int, ...], float]:
    """Each sentence with its probability, from the lines of the grammar."""
    lines = (line.split("->") for line in grammar.rules)
    sides = {left.strip(): [side.split() for side in right.split("|")] for left, right in lines}

    def of(symbol: str) -> dict[tuple[int, ...], float]:
        if symbol not in sides:
            return {(int(symbol),): 1.0}
        found: dict[tuple[int, ...], float] = defaultdict(float)
        for side in sides[symbol]:
            for parts in itertools.product(*(of(part).items() for part in side)):
                sentence = tuple(itertools.chain.from_iterable(words for words, _ in parts))
                found[sentence] += math.prod(chance for _, chance in parts) / len(sides[symbol])
        return found

    sentences = of(grammar.rules[0].split("->")[0].strip())
    assert sum(sentences.values()) == pytest.approx(1, abs=1e-12)
    return sentences


def neighbours(text: tuple[int, ...], tokens: range) -> set[tuple[int, ...]]:
    """All texts that one token more, less or other makes of it."""
    longer = {(*text[:at], token, *text[at:]) for at in range(len(text) + 1) for token in tokens}
    shorter = {text[:at] + text[at + 1 :] for at in range(len(text))}
    other = {(*text[:at], token, *text[at + 1 :]) for at in range(len(text)) for token in tokens}
    return (longer | shorter | other) - {text}


@pytest.mark.parametrize("grammar", TINY.values(), ids=TINY)
def test_what_is_a_sentence_and_how_probable(grammar: CFGGrammar):
    """All sentences; of other texts all that are short, and all that are one token from a sentence; BOS included."""
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
    by_cell = [(0, 0.0)]  # the rare ones together
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
    """Mean 249 and 117 ... 459 in a sample; the grammar itself: 249.86, and 64 ... 729 at the utmost."""
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
        sizes = [len(side) for sides in grammar.rules_of.values() for side in sides]
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


def split(tokens: list[int]) -> list[list[int]]:
    """Of a stream: what stands before the first BOS, between two, and after the last."""
    parts: list[list[int]] = [[]]
    for token in tokens:
        parts.append([]) if token == cfg.BOS else parts[-1].append(token)
    return parts


@pytest.mark.parametrize(
    ("grammar", "length"), [(DRAWN, 11), (RAGGED, 3), (CFG3S, 64), (CFG3F, 512)], ids=["drawn", "ragged", "3s", "3f"]
)
def test_sequences_are_windows_of_one_stream_of_sentences(grammar: CFGGrammar, length: int):
    task = CFGTask(CFGConfig(grammar=grammar, length=length, prefix=1))
    batch = task.batch(seeded(3), 17)
    check_shape(task, batch, 17)
    assert torch.equal(batch.labels[:, 1:], batch.input_ids[:, 1:])
    for ids, slices in zip(batch.input_ids.tolist(), batch.slices.tolist(), strict=True):
        begun = False
        for at, (token, index) in enumerate(zip(ids, slices, strict=True)):
            assert index == (-1 if at == 0 else 0 if begun else 1)
            begun = begun or token == cfg.BOS
    sentences = split(batch.input_ids.flatten().tolist())
    assert len(sentences) > 4
    assert all(grammar.parses(torch.tensor(sentence)) for sentence in sentences[1:-1])


@pytest.mark.parametrize("length", [*(pytest.param(n, marks=pytest.mark.slow) for n in (2, 23)), 5])
def test_a_sequence_begins_anywhere_in_the_stream_and_chance_follows(length: int):
    """Sequences alone, one in a batch: the law of their first token, and of the labels in each slice."""
    task = CFGTask(CFGConfig(grammar=DRAWN, length=length, prefix=2))
    rows = 4000
    generator = seeded(4)
    batches = [task.batch(generator, 1) for _ in range(rows)]
    ids, labels, slices = (torch.cat([getattr(batch, name) for batch in batches]) for name in FIELDS)

    tokens = DRAWN.lengths.mean + 1
    expected = [1 / tokens, *(DRAWN.lengths.token_at.sum(axis=1)[1:] / tokens)]
    assert sum(expected) == pytest.approx(1)
    for column in (0, length - 1):
        seen = ids[:, column].bincount(minlength=3)
        for token, share in enumerate(expected):
            assert abs(seen[token] - rows * share) < 3.5 * (rows * share * (1 - share)) ** 0.5

    for index, name in enumerate(task.slice_names):
        counts = labels[slices == index].bincount(minlength=3)
        best = int(counts.argmax())
        # of a ratio of sums over sequences, which are independent
        right = ((labels == best) & (slices == index)).sum(dim=1).double()
        residual = right - task.chance[name] * (slices == index).sum(dim=1)
        assert abs(residual.mean()) < 3.5 * residual.std() / rows**0.5


def test_chance_of_cut_labels_written_out():
    """Each sentence with its probability, each place to begin at, each cut label."""
    task = CFGTask(CFGConfig(grammar=RAGGED, length=4, prefix=1))
    weights = Counter()
    for sentence, chance in written_out(RAGGED).items():
        places = [cfg.BOS, *sentence, cfg.BOS]
        for first in range(1, len(places) - 1):
            for token in places[first + 1 : first + 4]:
                weights[token] += chance
    assert task.chance["cut"] == pytest.approx(max(weights.values()) / sum(weights.values()), rel=1e-12)


def test_a_batch_depends_on_its_generator_alone():
    task = CFGTask(CFGConfig(grammar=CFG3S, length=64, prefix=8))
    torch.manual_seed(5)
    one = task.batch(seeded(6), 7)
    torch.manual_seed(7)
    again = task.batch(seeded(6), 7)
    assert all(torch.equal(getattr(one, name), getattr(again, name)) for name in FIELDS)
    assert not torch.equal(one.input_ids, task.batch(seeded(8), 7).input_ids)
    training, evaluation = (
        {tuple(row) for row in TaskBatches(task, split=split, seed=0, batch_size=97, batches=1)[0].input_ids.tolist()}
        for split in ("training", "evaluation")
    )
    assert len(training) == len(evaluation) == 97
    assert not training & evaluation


def test_questions_alternate():
    task = CFGTask(CFGConfig(grammar=CFG3S, length=64, prefix=11, temperature=0.5))
    assert isinstance(task, QuestionTask)
    assert (task.end_token, task.temperature) == (0, 0.5)
    questions = task.questions(seeded(9), 7)
    sentences = CFG3S.sentences(seeded(9), 7)
    assert [question.truth for question in questions] == ["from_start", "from_prefix"] * 3 + ["from_start"]
    for question, sentence in zip(questions, sentences, strict=True):
        known = sentence[:11].tolist() if question.truth == "from_prefix" else []
        assert question.prompt.dtype == torch.int64
        assert question.prompt.tolist() == [0, *known]
    with pytest.raises(ValueError, match="count must be 1 or more, got 0"):
        task.questions(seeded(9), 0)


def test_the_judge_wants_one_whole_sentence():
    task = CFGTask(CFGConfig(grammar=DRAWN, prefix=2))
    start, prefix = task.questions(seeded(10), 2)
    known = prefix.prompt[1:].tolist()
    for text in itertools.chain.from_iterable(itertools.product((1, 2), repeat=length) for length in range(8)):
        right = text in written_out(DRAWN)
        assert task.judge(start, torch.tensor(text, dtype=torch.int64)) == {"from_start": right}
        if list(text[:2]) == known:
            assert task.judge(prefix, torch.tensor(text[2:], dtype=torch.int64)) == {"from_prefix": right}
    one = torch.tensor(next(iter(written_out(DRAWN))))
    assert task.judge(start, torch.cat([one, torch.tensor([0]), one])) == {"from_start": False}


@pytest.mark.parametrize("grammar", [*TINY.values(), CFG3S, CFG3F], ids=[*TINY, "cfg3s", "cfg3f"])
def test_an_answer_may_be_as_long_as_the_longest_sentence_and_its_end(grammar: CFGGrammar):
    """And one that is cut off there, from the start or from a prefix, is no sentence."""
    task = CFGTask(CFGConfig(grammar=grammar, prefix=1))
    assert task.max_new_tokens == grammar.lengths.longest + 1
    for question in task.questions(seeded(11), 2):
        cut_off = torch.ones(task.max_new_tokens, dtype=torch.int64)
        assert task.judge(question, cut_off) == {question.truth: False}


def windows(grammar: CFGGrammar, length: int) -> dict[tuple[int, ...], float]:
    """Each window of the endless stream with its probability: each sentence, each place to begin, all that follows."""
    sentences = {(cfg.BOS, *sentence): chance for sentence, chance in written_out(grammar).items()}
    tokens = sum(len(sentence) * chance for sentence, chance in sentences.items())
    found: dict[tuple[int, ...], float] = defaultdict(float)
    ahead = Counter[tuple[int, ...]]()
    for sentence, chance in sentences.items():
        for first in range(len(sentence)):
            ahead[sentence[first:]] += chance / tokens
    while ahead:
        text, weight = ahead.popitem()
        if len(text) >= length:
            found[text[:length]] += weight
            continue
        for sentence, chance in sentences.items():
            ahead[(text + sentence)[:length]] += weight * chance
    assert sum(found.values()) == pytest.approx(1, abs=1e-12)
    return found


@pytest.mark.parametrize("length", [1, 2, 7])
@pytest.mark.parametrize("grammar", TINY.values(), ids=TINY)
def test_how_probable_each_token_of_a_window_is(grammar: CFGGrammar, length: int):
    """Of all texts of that length, those that are no window of a stream included."""
    probable = windows(grammar, length)
    texts = list(itertools.product(range(grammar.vocab_size), repeat=length))
    found = grammar.window_log_probability(torch.tensor(texts))
    assert found.shape == (len(texts), length)
    assert not found.isnan().any()
    for text, row in zip(texts, found, strict=True):
        assert math.exp(row.sum()) == pytest.approx(probable.get(text, 0), rel=1e-12, abs=0)
    shorter = {text[:-1]: row[:-1] for text, row in zip(texts, found, strict=True)}
    for text, row in zip(texts, found, strict=True):  # what comes later changes nothing
        assert torch.equal(row[:-1], shorter[text[:-1]])
    assert length == 1 or (found == -math.inf).any()


@pytest.mark.parametrize("grammar", TINY.values(), ids=TINY)
def test_the_floor_of_the_loss_by_all_windows(grammar: CFGGrammar):
    probable, first = windows(grammar, 6), windows(grammar, 1)
    task = CFGTask(CFGConfig(grammar=grammar, length=6, prefix=1))
    batch = task.batch(seeded(12), 40)
    least = [math.log(first[text[:1]] / probable[text]) for text in map(tuple, batch.input_ids.tolist())]
    assert task.loss_floor(batch) == pytest.approx(sum(least) / (40 * 5), rel=1e-12)


@pytest.mark.parametrize("grammar", [*TINY.values(), CFG3S], ids=[*TINY, "cfg3s"])
def test_the_floor_falls_to_the_entropy_of_the_stream(grammar: CFGGrammar):
    """In a window without an end; in a short one it is higher, for a cut sentence's beginning is not known."""
    drawn = grammar.sentences(seeded(13), 4000)
    each = torch.tensor([-grammar.log_probability(sentence) for sentence in drawn], dtype=torch.float64)
    entropy = float(each.mean()) / (grammar.lengths.mean + 1)
    short, long = (CFGTask(CFGConfig(grammar=grammar, length=length, prefix=1)) for length in (6, 5000))
    assert long.loss_floor(long.batch(seeded(14), 8)) == pytest.approx(entropy, rel=0.02)
    assert short.loss_floor(short.batch(seeded(14), 2000)) > 1.05 * entropy


def test_the_chain_of_a_large_grammar():
    """Its tokens are those of the law of lengths, its stream's mean sentence too."""
    chain, lengths = CFG3F.chain, CFG3F.lengths
    np.testing.assert_allclose(chain.following.sum(axis=1), 1, rtol=1e-12)
    np.testing.assert_allclose(chain.stationary @ chain.following, chain.stationary, rtol=0, atol=1e-15)
    shares = np.bincount(chain.token, weights=chain.stationary)
    expected = np.array([1, *lengths.token_at.sum(axis=1)[1:]]) / (lengths.mean + 1)
    np.testing.assert_allclose(shares, expected, rtol=1e-11)


def test_a_config_goes_through_json():
    config = CFGConfig(grammar=RAGGED, length=31, prefix=1)
    assert from_json(CFGConfig, json.loads(json.dumps(to_json(config)))) == config
    assert CFGConfig().grammar == CFG3F


def test_the_sequences_that_the_docstring_draws():
    rules = tuple(re.findall(r"^    (\d+ -> .*)$", cfg.__doc__ or "", flags=re.MULTILINE))
    assert rules == DRAWN.rules
    lines = (drawn_numbers(cfg, name) for name in FIELDS)
    stream = []
    for row, labels, slices in zip(*lines, strict=True):
        begun = [cfg.BOS in row[:at] for at in range(16)]
        assert labels == [-100, *row[1:]]
        assert slices == [-1, *(0 if has_begun else 1 for has_begun in begun[1:])]
        stream += row
    drawn = re.findall(r"^    (?:input_ids|labels|slices)  .*$", cfg.__doc__ or "", flags=re.MULTILINE)
    assert len(drawn) == 6
    assert "\n".join(drawn) in PAGE
    first, *whole, _ = split(stream)
    assert all(DRAWN.parses(torch.tensor(sentence)) for sentence in whole)
    assert any(list(sentence[-len(first) :]) == first for sentence in written_out(DRAWN))


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
        (("5 -> 1 2", "4 -> 1 1"), "nothing becomes 4; the first symbol is the root"),
        (("5 -> 4 1", "4 -> 1 5 | 2"), "no symbol may come back in what it becomes, got [45] <- [45] <- [45]"),
        (("5 -> 5 1",), "no symbol may come back"),
        (
            (*(f"{k} -> {k - 1} {k - 1} | {k - 1} {k - 1} {k - 1}" for k in range(12, 2, -1)), "2 -> 1"),
            r"probability that float64 can hold, got one of exp\(-\d+\)",
        ),
    ],
)
def test_what_is_no_grammar_is_refused(rules: tuple[str, ...], message: str):
    with pytest.raises(LabError, match=rf"^grammar\.rules.*{message}"):
        CFGGrammar(rules=rules)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 1}, "cfg.length must be 2 or more, got 1"),
        ({"prefix": 0}, "cfg.prefix must be 1 or more, got 0"),
        ({"prefix": 64}, "cfg.prefix must be below 64, the shortest sentence of cfg.grammar, got 64"),
        ({"temperature": -1.0}, "cfg.temperature must be 0 or more, got -1.0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(LabError, match=message):
        CFGConfig(**options)


def test_a_batch_without_sequences_is_refused():
    with pytest.raises(ValueError, match="batch_size must be 1 or more, got 0"):
        CFGTask(CFGConfig()).batch(torch.Generator(), 0)
