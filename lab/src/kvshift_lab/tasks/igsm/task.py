"""Grade-school math problems with solutions, for the paper's Table 4.

Source: the paper's Appendix E.2; Ye et al., "Physics of language models: part 2.1" (2024); kaminocode/iGSM. A sequence
contains one problem after another and is cut off at its length. With the tokenizer "words" (| ends a line):

    input_ids    The number of Gel Pen in each Stationery is 6 more than the number of Trail Pack in each Backpack .
    slices       .   .      .  .   .   .  .    .          .  . .    .    .   .      .  .     .    .  .    .        .
    input_ids    The number of Trail Pack in each Backpack is 9 . |
    slices       .   .      .  .     .    .  .    .        .  . . .
    input_ids    How many Gel Pen does Stationery have ? |
    slices       .   .    .   .   .    .          .    . .
    input_ids    Define Trail Pack in each Backpack as a ; so a = 9 . |
    slices       s      s     s    s  s    s        s  s s s  s s s s s
    input_ids    Define Gel Pen in each Stationery as b ; so b = 9 + 6 = 15 . <end>
    slices       s      s   s   s  s    s          s  s s s  s s s s s s v  s s      v values, s solution

The labels are the input_ids, from the second one on.

Shapes: B sequences, T positions in a sequence.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from kvshift_lab.core.errors import LabError, require
from kvshift_lab.tasks.batch import IGNORED, Batch
from kvshift_lab.tasks.igsm import igsm, kamino
from kvshift_lab.tasks.igsm.checker import check_solution
from kvshift_lab.tasks.igsm.encoding import WORDS, Encoded, Layout, make_encoder
from kvshift_lab.tasks.igsm.problem import TRAINING_BUCKETS, Problem, bucket_of
from kvshift_lab.tasks.igsm.random_choices import Uniform
from kvshift_lab.tasks.igsm.wording import MODULUS
from kvshift_lab.tasks.option_checks import check_at_least, check_batch_size, check_choices
from kvshift_lab.tasks.questions import Question

_SOLUTION, _VALUES = 0, 1
_MOST_IGSM_OPS = 52  # each operation uses up a letter
_TRIES = 20_000


@dataclass(frozen=True, kw_only=True)
class IGSMConfig:
    """Options of the problems and sequences; the defaults are Tr12-Te15 of Table 4, except for the tokenizer."""

    generator: Literal["kamino", "igsm"] = "kamino"
    """kamino: problems after kaminocode/iGSM, which the paper used; each line of the solution is an operation. igsm:
    problems after Ye et al., with their count of operations."""
    ops: int = 12
    """Maximum number of operations of a training problem."""
    test_ops: int = 15
    """Exact number of operations of each question."""
    ops_law: Literal["uniform", "smaller_of_two", "of_the_generator"] = "of_the_generator"
    """Distribution of operations in training. uniform: uniform in 1 ... ops. smaller_of_two: the smaller of two such
    numbers. of_the_generator: uniform for kamino, smaller_of_two for igsm."""
    length: int = 1024
    """Tokens per sequence, T; longer problems are excluded from training."""
    tokenizer: str = WORDS
    """words: one token for each word in the problems. Otherwise a folder or a name on the hub, such as gpt2."""
    loss: Literal["all", "solutions"] = "all"
    """Labels: all tokens, or only those of solutions."""
    order: Literal["pq", "qp"] = "pq"
    """pq: the statements come first, then the question. qp: the question comes first."""
    markers: bool = False
    """Yes: the format of Ye et al., i.e. token 222, problem, token 223, solution, end token, without newlines. (The
    vocabulary "words" has two separate tokens for this.) No: the statements, the question and each sentence of the
    solution on a line of their own, then the end token."""
    modulus: int = MODULUS
    """Values are 0 ... modulus - 1, with a modulus of 2 ... 23. The tokenizer "words" always has the numbers to 22."""
    letters: Literal["in_order", "random"] = "in_order"
    """kamino only. in_order: solutions name quantities a, b, c ..., as in the released code; questions with more than
    `ops` operations need letters that never occur in training. random: letters are drawn from a ... z, A ... Z, as
    always with igsm."""
    max_edges: int = 20
    """igsm only: maximum number of instance quantities in a structure, unless its layers need more. Ye et al. use 20
    with at most 15 operations and 28 with 21."""
    as_printed: bool = False
    """kamino only: use the distribution of the released code, which does not control the number of operations, so that
    `ops` is ignored. There are 1 to max_items items of each category, and all rules after `max_operations` are cut off.
    Problems that the cut makes unsolvable are drawn again."""
    max_items: int = 3
    """With as_printed only: maximum number of items of each category."""
    max_operations: int = 15
    """With as_printed only: maximum number of rules."""
    temperature: float = 0.0
    """Sampling temperature of the answers; 0 means greedy decoding."""
    max_new_tokens: int | None = None
    """Maximum number of tokens in an answer, which is cut off there; None: equal to `length`."""

    def __post_init__(self) -> None:
        check_choices("igsm", self)
        check_at_least(
            "igsm", self, ops=1, test_ops=1, length=2, max_edges=1, max_items=1, max_operations=1, temperature=0
        )
        require(2 <= self.modulus <= MODULUS, "igsm.modulus", self.modulus, f"2 ... {MODULUS}")
        most, why = self._most_ops()
        for name in ("ops", "test_ops"):
            value = getattr(self, name)
            require(value <= most, f"igsm.{name}", value, f"{most} or less ({why})")
        new = self.max_new_tokens
        require(new is None or new >= 1, "igsm.max_new_tokens", new, "None, or 1 or more")
        if self.as_printed and self.generator != "kamino":
            raise LabError(f"igsm.as_printed needs the generator kamino, got {self.generator}")
        require(self.max_items <= 10, "igsm.max_items", self.max_items, "10 or less (items of a category)")
        few = not self.as_printed or min(4 * self.max_items, self.max_operations) <= most
        require(few, "igsm.max_operations", self.max_operations, f"{most} or less ({why})")

    def _most_ops(self) -> tuple[int, str]:
        if self.generator == "igsm":
            return _MOST_IGSM_OPS, "each takes one of the letters a ... z, A ... Z"
        in_order = self.letters == "in_order"
        return kamino.MAX_OPS[self.letters], "solutions name quantities a ... z" if in_order else "there are 40 items"


class IGSMTask:
    """Solve problems: sequences of problems with solutions, and questions of exactly `test_ops` operations.

    Problems are split by a hash of their key, modulo 23: 0 ... 15 are for training, 16 ... 22 are for questions. The
    key of a kamino problem is its sorted statements. The key of an igsm problem is the sketch of its solution: which
    steps are combined by which sign, without names and numbers. Thus no question occurs in training for any `ops` and
    `test_ops`. There are few igsm sketches with few operations: 1 with one operation, which is for questions, and 3
    with two. If a drawn problem belongs to the other split, its number of operations is drawn again, too.

    The prompt of a question contains the statements and the question. `judge` calls `checker.check_solution`.

    Slices: "values" contains the results of computations in solutions; "solution" contains the other tokens of
    solutions, including the end token. They are measured on new sequences like those of training, in which the tokens
    before a label are always correct, unlike the tokens that a model generates.

    Chance, for values: the guesser names a random value, 1 / modulus. It is not defined if the tokenizer splits some
    value into several tokens.
    """

    slice_names = ("solution", "values")

    def __init__(self, config: IGSMConfig) -> None:
        self.config = config
        self.encoder = make_encoder(config.tokenizer, Layout(config.order, config.markers), config.modulus)
        self.vocab_size = self.encoder.vocab_size
        self.length = config.length
        self.end_token = self.encoder.end_token
        self.max_new_tokens = config.max_new_tokens or config.length
        self.temperature = config.temperature
        self.chance = {"values": 1 / config.modulus} if self.encoder.whole_values else {}

    def batch(self, generator: torch.Generator, batch_size: int) -> Batch:
        """Draw the next `batch_size` sequences; see `Task.batch`."""
        check_batch_size(batch_size)
        uniform, length = _uniform(generator), self.length
        ids_BT = np.empty((batch_size, length), np.int64)
        slices_BT = np.full((batch_size, length), -1)
        encoded = self._encoded(uniform, batch_size)
        for row in range(batch_size):
            ids: list[int] = []
            while len(ids) < length:
                problem = next(encoded)
                ids += problem.prompt
                start = len(ids)
                ids += problem.solution
                slices_BT[row, start : len(ids)] = _SOLUTION
                values = [start + at for at in problem.values if start + at < length]
                slices_BT[row, values] = _VALUES
            ids_BT[row] = ids[:length]
        slices_BT[:, 0] = -1
        labels_BT = ids_BT.copy() if self.config.loss == "all" else np.where(slices_BT >= 0, ids_BT, IGNORED)
        labels_BT[:, 0] = IGNORED
        return Batch(*(torch.from_numpy(array) for array in (ids_BT, labels_BT, slices_BT)))

    def questions(self, generator: torch.Generator, count: int) -> list[Question]:
        """Draw the next `count` questions; see `QuestionTask.questions`."""
        if count < 1:
            raise ValueError(f"count must be 1 or more, got {count}")
        uniform = _uniform(generator)
        problems = [self.draw(uniform, training=False) for _ in range(count)]
        prompts = (encoded.prompt for encoded in self.encoder.encode(problems))
        return [Question(torch.tensor(prompt), problem) for prompt, problem in zip(prompts, problems, strict=True)]

    def judge(self, question: Question, answer: Tensor) -> dict[str, bool]:
        """See `QuestionTask.judge` and `checker.check_solution`."""
        return check_solution(question.truth, self.encoder.decode(answer))

    def draw(self, uniform: Uniform, *, training: bool) -> Problem:
        """Draw a problem.

        Args:
            uniform: draws from [0, 1).
            training: whether the problem is for training or for a question.
        """
        config = self.config
        ops = self._ops(uniform) if training else config.test_ops
        for _ in range(_TRIES):
            problem = self._of_ops(uniform, ops)
            if problem is None or (config.as_printed and not training and len(problem.solution) != ops):
                continue
            if (bucket_of(problem.key) < TRAINING_BUCKETS) == training:
                return problem
            if training:
                ops = self._ops(uniform)
        raise LabError(
            f"igsm.{'ops' if training else 'test_ops'}: none of {_TRIES} problems drawn has {ops} operations and is "
            f"{'for training' if training else 'kept from training'}; try another number"
        )

    def _of_ops(self, uniform: Uniform, ops: int) -> Problem | None:
        """Draw a problem of `ops` operations (as_printed: of any number); None if the drawn graph does not give one."""
        config = self.config
        if config.generator == "igsm":
            return igsm.draw(uniform, ops, config.max_edges, modulus=config.modulus)
        if not config.as_printed:
            return kamino.draw(uniform, ops, letters=config.letters, modulus=config.modulus)
        return kamino.as_printed(
            uniform,
            max_operations=config.max_operations,
            max_items=config.max_items,
            letters=config.letters,
            modulus=config.modulus,
        )

    def _ops(self, uniform: Uniform) -> int:
        config = self.config
        ops = 1 + int(uniform() * config.ops)
        two = config.ops_law == "smaller_of_two" or (
            config.ops_law == "of_the_generator" and config.generator == "igsm"
        )
        return min(ops, 1 + int(uniform() * config.ops)) if two else ops

    def _encoded(self, uniform: Uniform, rows: int) -> Iterator[Encoded]:
        """Yield training problems that fit into a sequence; subword tokenizers encode `rows` problems at a time."""
        at_once = 1 if self.config.tokenizer == WORDS else rows
        too_long = 0
        while True:
            for encoded in self.encoder.encode([self.draw(uniform, training=True) for _ in range(at_once)]):
                if len(encoded.prompt) + len(encoded.solution) <= self.length:
                    too_long = 0
                    yield encoded
                    continue
                too_long += 1
                if too_long == _TRIES:
                    raise LabError(
                        f"igsm.length must hold a problem and its solution, got {self.length}: {_TRIES} problems in a "
                        "row were longer"
                    )


def _uniform(generator: torch.Generator) -> Uniform:
    """Return a source of numbers in [0, 1). Python's generator makes single numbers 20 times as fast as torch's."""
    return random.Random(int(torch.randint(2**62, (1,), generator=generator))).random
