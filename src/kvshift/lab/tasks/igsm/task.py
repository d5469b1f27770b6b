"""Grade-school problems with their solutions, for the paper's Table 4.

Source: the paper's Appendix E.2; Ye et al., "Physics of language models: part 2.1" (2024); kaminocode/iGSM. A sequence
with the tokenizer "words" holds problem after problem, and is cut off at its length (| ends a line):

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

labels are input_ids, from the second on.

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

from kvshift.lab.core.errors import LabError, require
from kvshift.lab.tasks.batch import IGNORED, Batch
from kvshift.lab.tasks.igsm import igsm, kamino
from kvshift.lab.tasks.igsm.checker import is_right
from kvshift.lab.tasks.igsm.drawing import Uniform
from kvshift.lab.tasks.igsm.encoding import WORDS, Encoded, Layout, make_encoder
from kvshift.lab.tasks.igsm.problem import TRAINING_BUCKETS, Problem, bucket_of
from kvshift.lab.tasks.igsm.wording import MODULUS
from kvshift.lab.tasks.option_checks import check_at_least, check_batch_size, check_choices
from kvshift.lab.tasks.questions import Question

_SOLUTION, _VALUES = 0, 1
_MOST_IGSM_OPS = 52  # each takes a letter
_TRIES = 20_000


@dataclass(frozen=True, kw_only=True)
class IGSMConfig:
    """Sequences of problems; the defaults are those of Tr12-Te15 in Table 4, but for the tokenizer."""

    generator: Literal["kamino", "igsm"] = "kamino"
    """kamino: after kaminocode/iGSM, which the paper used; an operation is a line of the solution. igsm: after Ye et
    al., with operations as they count them."""
    ops: int = 12
    """Most operations of a problem in training."""
    test_ops: int = 15
    """Operations of the questions, exactly."""
    ops_law: Literal["uniform", "smaller_of_two", "of_the_generator"] = "of_the_generator"
    """Operations in training: uniform in 1 ... ops, or the smaller of two such numbers; of_the_generator: uniform for
    kamino, smaller_of_two for igsm."""
    length: int = 1024
    """Tokens in a sequence, T; problems that take more are left out of training."""
    tokenizer: str = WORDS
    """words: one token for each word that the problems hold. Else a folder or a name on the hub, such as gpt2."""
    loss: Literal["all", "solutions"] = "all"
    """Labels: every token, or only those of solutions."""
    order: Literal["pq", "qp"] = "pq"
    """The statements first and then the question, or the question first."""
    markers: bool = False
    """Ye et al.'s form: token 222, problem, 223, solution, end token, and no newlines. (The vocabulary of words has
    two tokens of its own for this.) No: statements, question and each sentence of the solution on lines of their own,
    and the end token."""
    modulus: int = MODULUS
    """Values are 0 ... modulus - 1; 2 ... 23. The tokenizer "words" has the numbers to 22 in any case."""
    letters: Literal["in_order", "random"] = "in_order"
    """kamino only. in_order: solutions name quantities a, b, c ..., as in the released code; what is asked past `ops`
    needs letters that never occur in training. random: letters are drawn from a ... z, A ... Z, as igsm always does."""
    max_edges: int = 20
    """igsm only: most instance quantities of a structure; Ye et al.: 20 with at most 15 operations, 28 with 21."""
    as_printed: bool = False
    """kamino only: the law of the released code, without a say in the number of operations (`ops` counts for nothing).
    It has 1 to max_items items of each category, and after `max_operations` rules the rest is cut off; problems whose
    solution the cut makes impossible are drawn again."""
    max_items: int = 3
    """as_printed only."""
    max_operations: int = 15
    """as_printed only."""
    temperature: float = 0.0
    """Of the answers; 0: always the likeliest token."""
    max_new_tokens: int | None = None
    """An answer is cut off here; None: as many as `length`."""

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
    """Sequences of problems with solutions, and questions of exactly `test_ops` operations.

    Problems are parted by a hash of their key, modulo 23: 0 ... 15 may occur in training, 16 ... 22 may be asked. The
    key of kamino is the sorted statements, that of igsm the sketch of the solution: which steps combine which, by what
    sign, without names and numbers. So no question occurs in training, whatever `ops` and `test_ops`. Of few igsm
    operations there are few sketches: 1 of one operation, kept for questions, and 3 of two. Where a problem falls on
    the wrong side, its number of operations is drawn again as well.

    A question's prompt is its statements and question; `judge` is `checker.is_right`.

    Slices: "values" are the results of computations in the solutions, "solution" the other tokens of solutions, the
    end token with them. They are counted in new sequences of the training kind, where what precedes a token is
    always right, which it is not when a model answers by itself.

    Chance, for values: the guesser names any of the values, 1 / modulus. There is none where the tokenizer writes some
    value in several tokens.
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
        """The next `batch_size` sequences; see `Task.batch`."""
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
        """The next `count` questions; see `QuestionTask.questions`."""
        if count < 1:
            raise ValueError(f"count must be 1 or more, got {count}")
        uniform = _uniform(generator)
        problems = [self.draw(uniform, training=False) for _ in range(count)]
        prompts = (encoded.prompt for encoded in self.encoder.encode(problems))
        return [Question(torch.tensor(prompt), problem) for prompt, problem in zip(prompts, problems, strict=True)]

    def judge(self, question: Question, answer: Tensor) -> dict[str, bool]:
        """See `QuestionTask.judge` and `checker.is_right`."""
        return is_right(question.truth, self.encoder.decode(answer))

    def draw(self, uniform: Uniform, *, training: bool) -> Problem:
        """A problem of training, or one to ask.

        Args:
            uniform: draws from [0, 1).
        """
        config = self.config
        ops = self._ops(uniform) if training else config.test_ops
        for _ in range(_TRIES):
            problem = self._as_printed(uniform) if config.as_printed else self._of_ops(uniform, ops)
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
        """A problem of so many operations, or None where the graph that was drawn cannot be one."""
        config = self.config
        if config.generator == "kamino":
            return kamino.draw(uniform, ops, letters=config.letters, modulus=config.modulus)
        return igsm.draw(uniform, ops, config.max_edges, modulus=config.modulus)

    def _as_printed(self, uniform: Uniform) -> Problem | None:
        config = self.config
        try:
            return kamino.as_printed(
                uniform,
                max_operations=config.max_operations,
                max_items=config.max_items,
                letters=config.letters,
                modulus=config.modulus,
            )
        except kamino.UndefinedQuantityError:
            return None

    def _ops(self, uniform: Uniform) -> int:
        config = self.config
        ops = 1 + int(uniform() * config.ops)
        two = config.ops_law == "smaller_of_two" or (
            config.ops_law == "of_the_generator" and config.generator == "igsm"
        )
        return min(ops, 1 + int(uniform() * config.ops)) if two else ops

    def _encoded(self, uniform: Uniform, rows: int) -> Iterator[Encoded]:
        """Training problems that fit into a sequence; a tokenizer encodes as many at once as there are sequences."""
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
    """Numbers in [0, 1), which python's own generator makes one at a time twenty times as fast as torch's."""
    return random.Random(int(torch.randint(2**62, (1,), generator=generator))).random
