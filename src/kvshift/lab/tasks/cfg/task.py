"""The task: windows of a stream of sentences to train on, beginnings of sentences to ask for the rest of.

Shapes: B sequences, T positions in a sequence, V tokens, N longest sentence, n of one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvshift.lab.core.errors import require
from kvshift.lab.tasks.batch import IGNORED, Batch
from kvshift.lab.tasks.cfg.grammar import BOS, CFG3F, CFGGrammar
from kvshift.lab.tasks.option_checks import check_at_least, check_batch_size
from kvshift.lab.tasks.questions import Question

Measure = Literal["from_start", "from_prefix"]


@dataclass(frozen=True, kw_only=True)
class CFGConfig:
    """The grammar, the windows and the questions; the defaults are those of Part 1 for cfg3f."""

    grammar: CFGGrammar = CFG3F
    """The language."""
    length: int = 512
    """Tokens in a sequence, T."""
    prefix: int = 50
    """Tokens of a true sentence that every second question gives; fewer than the shortest sentence has."""
    temperature: float = 1.0
    """Of the answers."""

    def __post_init__(self) -> None:
        check_at_least("cfg", self, length=2, prefix=1)
        shortest = self.grammar.lengths.shortest
        below = f"below {shortest}, the length of the shortest sentence of cfg.grammar"
        require(self.prefix < shortest, "cfg.prefix", self.prefix, below)
        require(0 <= self.temperature < math.inf, "cfg.temperature", self.temperature, "0 or more")


class CFGTask:
    """Sentences of a grammar, BOS before each: to be continued token by token, and to be written.

    *Sequences.* The sequences of a batch are consecutive windows of one stream of random sentences, so that a sentence
    cut by the end of one sequence continues in the next. The stream begins at a uniformly random token of an endless
    one: of any window alone, the first token is BOS with probability 1 / (mean length + 1), and every other position of
    a sentence is as likely. Every token but the first of a sequence has a label; BOS is also the end of the sentence
    before it.

    Slices: "next_token", labels in sentences that begin in the sequence; "cut", those before the first BOS of the
    sequence, where the model cannot know how the sentence began.

    Chance, for each slice: the guesser always names the token that is most frequent in it. Exact.

    *Questions*, alternately: "from_start" gives BOS; "from_prefix" BOS and the first `prefix` tokens of a sentence.
    An answer is right if all together, up to the next BOS, is a sentence. The answer may be as long as the longest
    sentence and its end; what is cut off there is never right.

    What seeds guarantee: questions of the evaluation split come from random numbers that training never draws. What
    they do not: that a text is new. BOS alone is the beginning of every sentence, and a prefix is a random draw, as
    the sentences of the training sequences are. How probable it is that it came there, too, follows from their entropy;
    see docs/tasks.md.
    """

    slice_names = ("next_token", "cut")
    end_token = BOS

    def __init__(self, config: CFGConfig) -> None:
        self.config = config
        self.grammar = config.grammar
        self.vocab_size = config.grammar.vocab_size
        self.length = config.length
        self.temperature = config.temperature
        self.max_new_tokens = config.grammar.lengths.longest + 1
        self.chance: dict[str, float] = dict(zip(self.slice_names, _chances(config), strict=True))

    def batch(self, generator: torch.Generator, batch_size: int) -> Batch:
        """The next `batch_size` sequences; see `Task.batch`."""
        check_batch_size(batch_size)
        needed = batch_size * self.length
        parts = [self._rest_of_a_sentence(generator)]
        while (missing := needed - sum(map(len, parts))) > 0:
            parts.append(self.grammar.stream(generator, 1 + math.ceil(missing / (self.grammar.lengths.mean + 1))))
        ids_BT = torch.from_numpy(np.concatenate(parts)[:needed]).reshape(batch_size, self.length)
        labels_BT = ids_BT.clone()
        labels_BT[:, 0] = IGNORED
        begun_BT = (ids_BT == BOS).cumsum(dim=1)
        slices_BT = torch.full_like(ids_BT, -1)
        slices_BT[:, 1:] = (begun_BT[:, :-1] == 0).long()
        return Batch(input_ids=ids_BT, labels=labels_BT, slices=slices_BT)

    def questions(self, generator: torch.Generator, count: int) -> list[Question]:
        """The next `count` questions: the first from the start, the second from a prefix, and so on."""
        if count < 1:
            raise ValueError(f"count must be 1 or more, got {count}")
        bos = torch.tensor([BOS])
        questions = []
        for number, sentence in enumerate(self.grammar.sentences(generator, count)):
            measure: Measure = "from_prefix" if number % 2 else "from_start"
            known = sentence[: self.config.prefix if number % 2 else 0]
            questions.append(Question(prompt=torch.cat([bos, known]), truth=measure))
        return questions

    def judge(self, question: Question, answer: Tensor) -> Mapping[str, bool]:
        """Whether prompt and answer together are a sentence, by the name of the kind of question."""
        return {question.truth: self.grammar.parses(torch.cat([question.prompt[1:], answer.cpu()]))}

    def loss_floor(self, batch: Batch) -> float:
        """The least loss that can be expected on these sequences, in nats per label.

        It is that of a model which knows the grammar, and of each sequence what stands before a label: the mean of
        -log P(label | tokens before it in its sequence), exactly. The entropy of the stream per token is lower, because
        it lets a model see how the sentence began that the sequence cuts.
        """
        return -float(self.grammar.window_log_probability(batch.input_ids)[:, 1:].mean())

    def _rest_of_a_sentence(self, generator: torch.Generator) -> np.ndarray:
        """A token drawn uniformly from an endless stream, and what follows it up to the end of its sentence.

        A position out of the longest sentence's N + 1 is drawn for each sentence (BOS is position 0). The first
        sentence that has its position is taken: so the longer ones are taken more often, as a random token is more
        often theirs.
        """
        positions = self.grammar.lengths.longest + 1
        while True:
            for sentence in self.grammar.sentences(generator, 4):
                position = int(torch.randint(positions, (), generator=generator))
                if position <= len(sentence):
                    return np.concatenate([[BOS], sentence.numpy()])[position:]


def _chances(config: CFGConfig) -> tuple[float, float]:
    """Share of the most frequent token in "next_token" and in "cut".

    Position q of a sentence's n + 2 (q = 0 is BOS, q = n + 1 the BOS after it) is a cut label where the sequence begins
    at a position in 1 ... q - 1 of the same sentence, at most T - 1 columns before. So, with m the mean length, a
    sequence has

        sum_q P(token x at q) min(q - 1, T - 1) / (m + 1)

    cut labels x, and (T - 1) sum_{q >= 1} P(token x at q) / (m + 1) labels x in all.
    """
    lengths = config.grammar.lengths
    at_VQ = np.zeros((config.grammar.vocab_size, lengths.longest + 2))
    at_VQ[:, 1:-1] = lengths.token_at
    at_VQ[BOS, 1:] = lengths.probability
    columns = config.length - 1
    cut_V = at_VQ @ np.clip(np.arange(-1, lengths.longest + 1), 0, columns)
    begun_V = columns * at_VQ.sum(axis=1) - cut_V
    return float(begun_V.max() / begun_V.sum()), float(cut_V.max() / cut_V.sum())
