"""CFG: sequences and questions against the grammar."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections import Counter

import pytest
import torch

from kvshift_lab.tasks import CFG3F, CFG3S, CFGConfig, CFGGrammar, CFGTask, QuestionTask, cfg

from ..cases import check_shape, drawn_numbers, seeded
from .grammars import DRAWN, RAGGED, TINY, windows, written_out

FIELDS = ("input_ids", "labels", "slices")


def split(tokens: list[int]) -> list[list[int]]:
    """Split a stream into the parts before the first BOS, between two, and after the last."""
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
    """In batches of one sequence, the first token and the labels of each slice follow their laws."""
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
        # This is the standard error of a ratio of sums over independent sequences.
        right = ((labels == best) & (slices == index)).sum(dim=1).double()
        residual = right - task.chance[name] * (slices == index).sum(dim=1)
        assert abs(residual.mean()) < 3.5 * residual.std() / rows**0.5


def test_chance_of_cut_labels_written_out():
    """The count is over each sentence with its probability, each start, and each cut label."""
    task = CFGTask(CFGConfig(grammar=RAGGED, length=4, prefix=1))
    weights = Counter()
    for sentence, chance in written_out(RAGGED).items():
        places = [cfg.BOS, *sentence, cfg.BOS]
        for first in range(1, len(places) - 1):
            for token in places[first + 1 : first + 4]:
                weights[token] += chance
    assert task.chance["cut"] == pytest.approx(max(weights.values()) / sum(weights.values()), rel=1e-12)


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
    """An answer that is cut off there is no sentence, whether it continues the start or a prefix."""
    task = CFGTask(CFGConfig(grammar=grammar, prefix=1))
    assert task.max_new_tokens == grammar.lengths.longest + 1
    for question in task.questions(seeded(11), 2):
        cut_off = torch.ones(task.max_new_tokens, dtype=torch.int64)
        assert task.judge(question, cut_off) == {question.truth: False}


@pytest.mark.parametrize("grammar", TINY.values(), ids=TINY)
def test_the_floor_of_the_loss_by_all_windows(grammar: CFGGrammar):
    probable, first = windows(grammar, 6), windows(grammar, 1)
    task = CFGTask(CFGConfig(grammar=grammar, length=6, prefix=1))
    batch = task.batch(seeded(12), 40)
    least = [math.log(first[text[:1]] / probable[text]) for text in map(tuple, batch.input_ids.tolist())]
    assert task.loss_floor(batch) == pytest.approx(sum(least) / (40 * 5), rel=1e-12)


def test_from_the_beginning_of_a_sentence_the_floor_is_what_sentences_say():
    """The chain of windows and the chart of sentences give exactly one number, for a large grammar, too."""
    task = CFGTask(CFGConfig(grammar=CFG3S, length=6, prefix=1))
    sentences = CFG3S.sentences(seeded(13), 20)
    bos = torch.tensor([cfg.BOS])
    stream = torch.cat([bos, *(part for sentence in sentences for part in (sentence, bos))])
    said = -sum(map(CFG3S.log_probability, sentences))
    batch = dataclasses.replace(task.batch(seeded(14), 1), input_ids=stream[None])
    assert task.loss_floor(batch) == pytest.approx(said / (len(stream) - 1), rel=1e-12)


@pytest.mark.parametrize("grammar", TINY.values(), ids=TINY)
def test_the_floor_falls_to_the_entropy_of_the_stream(grammar: CFGGrammar):
    """A long window has this floor; that of a short one is higher, as the beginning of a cut sentence is not known."""
    entropy = -sum(p * math.log(p) for p in written_out(grammar).values()) / (grammar.lengths.mean + 1)
    short, long = (CFGTask(CFGConfig(grammar=grammar, length=length, prefix=1)) for length in (6, 1000))
    assert long.loss_floor(long.batch(seeded(14), 40)) == pytest.approx(entropy, rel=0.02)
    assert short.loss_floor(short.batch(seeded(14), 2000)) > 1.05 * entropy


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
    first, *whole, _ = split(stream)
    assert all(DRAWN.parses(torch.tensor(sentence)) for sentence in whole)
    assert any(list(sentence[-len(first) :]) == first for sentence in written_out(DRAWN))
