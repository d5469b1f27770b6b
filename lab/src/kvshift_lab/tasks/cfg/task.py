"""The CFG task: training on windows of a stream of sentences, and questions that ask for the rest of a sentence.

Shapes: B sequences, T positions in a sequence, V tokens, N tokens in the longest sentence, n in one sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvshift_lab.core.errors import require
from kvshift_lab.tasks.batch import IGNORED, Batch
from kvshift_lab.tasks.cfg.grammar import BOS, CFG3F, CFGGrammar
from kvshift_lab.tasks.option_checks import check_at_least, check_batch_size
from kvshift_lab.tasks.questions import Question

Measure = Literal["from_start", "from_prefix"]


@dataclass(frozen=True, kw_only=True)
class CFGConfig:
    """Options of the grammar, the windows and the questions; the defaults are those of Part 1 for cfg3f."""

    grammar: CFGGrammar = CFG3F
    """The grammar of the sentences."""
    length: int = 512
    """Tokens per sequence, T."""
    prefix: int = 50
    """Number of tokens of a true sentence in every second prompt; must be less than the shortest sentence has."""
    temperature: float = 1.0
    """Sampling temperature of the answers; 0 means greedy decoding."""

    def __post_init__(self) -> None:
        check_at_least("cfg", self, length=2, prefix=1)
        shortest = self.grammar.lengths.shortest
        below = f"below {shortest}, the length of the shortest sentence of cfg.grammar"
        require(self.prefix < shortest, "cfg.prefix", self.prefix, below)
        require(0 <= self.temperature < math.inf, "cfg.temperature", self.temperature, "0 or more")


class CFGTask:
    """Predict and generate sentences of a grammar, with BOS before each sentence.

    *Sequences.* The sequences of a batch are consecutive windows of one stream of random sentences, so that a sentence
    cut by the end of one sequence continues in the next. The stream begins at a uniformly random token of an endless
    stream: the first token of a single window is BOS with probability 1 / (mean length + 1), and all other positions of
    a sentence are equally likely. Every token except the first of a sequence has a label; BOS also ends the previous
    sentence.

    Slices: "next_token" contains the labels after the first BOS of the sequence; "cut" contains the labels up to the
    first BOS, where the model cannot know how the sentence began.

    Chance, for each slice: the guesser always names its most frequent token. The value is exact.

    *Questions* alternate: the prompt of "from_start" is BOS, that of "from_prefix" is BOS and the first `prefix` tokens
    of a sentence. An answer is right if prompt and answer, up to the next BOS, form a sentence. The answer may be as
    long as the longest sentence and its BOS; an answer that is cut off there is never right.

    Seeds guarantee that questions of the evaluation split come from random numbers that training never draws, but not
    that a text is new. Every sentence starts with BOS, and a prefix is drawn like the sentences of the training
    sequences. Their entropy determines the probability that a prefix also occurred in training; see docs/tasks.md.
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
        """Draw the next `batch_size` sequences; see `Task.batch`."""
        check_batch_size(batch_size)
        needed = batch_size * self.length
        parts = [self._rest_of_sentence(generator)]
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
        """Draw the next `count` questions: the first from the start, the second from a prefix, and so on."""
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
        """Return whether prompt and answer together are a sentence, by the name of the kind of question."""
        return {question.truth: self.grammar.parses(torch.cat([question.prompt[1:], answer.cpu()]))}

    def loss_floor(self, batch: Batch) -> float:
        """Return the lowest loss to be expected on these sequences, in nats per label.

        This is the loss of a model that knows the grammar and the tokens before each label in its sequence: the exact
        mean of -log P(label | tokens before it in its sequence). The entropy of the stream per token is lower, because
        it assumes that the beginning of a cut sentence is known.
        """
        return -float(self.grammar.window_log_probability(batch.input_ids)[:, 1:].mean())

    def _rest_of_sentence(self, generator: torch.Generator) -> np.ndarray:
        """Draw a uniformly random token of an endless stream; return it and the rest of its sentence.

        One of N + 1 positions is drawn for each sentence (BOS is position 0), and the first sentence that has its
        position is returned. Longer sentences are thus returned more often, since more of the stream's tokens are in
        them.
        """
        positions = self.grammar.lengths.longest + 1
        while True:
            for sentence in self.grammar.sentences(generator, 4):
                position = int(torch.randint(positions, (), generator=generator))
                if position <= len(sentence):
                    return np.concatenate([[BOS], sentence.numpy()])[position:]


def _chances(config: CFGConfig) -> tuple[float, float]:
    """Return the share of the most frequent token in "next_token" and in "cut".

    A sentence has n + 2 positions q, from its BOS (q = 0) to the next BOS (q = n + 1). Position q is a cut label if the
    sequence begins at a position in 1 ... q - 1 of the same sentence, at most T - 1 columns earlier. With mean length
    m, the expected number of cut labels x in a sequence is

        sum_q P(token x at q) min(q - 1, T - 1) / (m + 1)

    and the expected number of all labels x is (T - 1) sum_{q >= 1} P(token x at q) / (m + 1).
    """
    lengths = config.grammar.lengths
    at_VQ = np.zeros((config.grammar.vocab_size, lengths.longest + 2))
    at_VQ[:, 1:-1] = lengths.token_at
    at_VQ[BOS, 1:] = lengths.probability
    columns = config.length - 1
    cut_V = at_VQ @ np.clip(np.arange(-1, lengths.longest + 1), 0, columns)
    begun_V = columns * at_VQ.sum(axis=1) - cut_V
    return float(begun_V.max() / begun_V.sum()), float(cut_V.max() / cut_V.sum())
