"""Grammars with few sentences, and the list of all their sentences."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import pytest

from kvshift_lab.tasks import CFGGrammar, cfg

DRAWN = CFGGrammar(rules=("5 -> 4 3 | 3 4 4", "4 -> 1 2 | 2", "3 -> 1 1 | 4 2"))
RAGGED = CFGGrammar(rules=("9 -> 6 7 6 | 7 7 | 6 3", "6 -> 1 | 2 3 | 1", "7 -> 6 6 | 3 | 2"))
TINY = {"drawn": DRAWN, "ragged": RAGGED}
"""Some sentences have several derivations. The second grammar has rules of one part, and its levels mix."""


def written_out(grammar: CFGGrammar) -> dict[tuple[int, ...], float]:
    """Return each sentence with its probability, from the lines of the grammar."""
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


def windows(grammar: CFGGrammar, length: int) -> dict[tuple[int, ...], float]:
    """Return each window of the endless stream with its probability, over all sentences, starts and continuations."""
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
