"""Encode problems as tokens, with a closed vocabulary of words or with any tokenizer of transformers.

Problem and solution are encoded separately and then joined, so that a question has exactly the tokens that come before
the solution in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvshift_lab.core.errors import LabError
from kvshift_lab.data.tokenizers import vocab_size_of
from kvshift_lab.tasks.igsm.problem import Problem
from kvshift_lab.tasks.igsm.wording import MODULUS, VOCABULARY, detokenize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = "words"
"""Name of the closed vocabulary, which is part of this package."""

_MARKS = (222, 223)  # tokens before the problem and before the solution (Ye et al.)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a problem.

    Attributes:
        prompt: the problem, including the separator before the solution.
        solution: the solution, including the end token.
        values: indices in `solution` of the results of computations.
    """

    prompt: list[int]
    solution: list[int]
    values: list[int]


@dataclass(frozen=True, slots=True)
class Layout:
    """Order and separators of the parts of a problem; see IGSMConfig for the fields."""

    order: str = "pq"
    markers: bool = False

    def prompt(self, problem: Problem) -> str:
        """Return the problem in spaced words, including the newline at its end if there are no markers."""
        parts = (" ".join(problem.statements), problem.question)
        if self.order == "qp":
            parts = parts[::-1]
        return " ".join(parts) if self.markers else " \n ".join((*parts, ""))[:-1]

    @property
    def between(self) -> str:
        """Separator between the sentences of a solution."""
        return " " if self.markers else "\n"


class Encoder:
    """An encoder of problems as tokens, which also decodes answers.

    Attributes:
        vocab_size: vocabulary size; ids are below it.
        end_token: the last token of every solution.
        whole_values: whether each value is a single token.
    """

    vocab_size: int
    end_token: int
    whole_values: bool

    def encode(self, problems: Sequence[Problem]) -> list[Encoded]:
        """Encode each problem separately."""
        raise NotImplementedError

    def decode(self, ids: Tensor) -> str:
        """Decode tokens to a text that `spaced` accepts."""
        raise NotImplementedError


def make_encoder(tokenizer: str, layout: Layout, modulus: int = MODULUS) -> Encoder:
    """Return an encoder by name.

    Args:
        tokenizer: "words", or a folder or a name on the hub from which transformers loads a tokenizer.
        layout: order and separators of the parts.
        modulus: values are 0 ... modulus - 1.
    """
    return _Words(layout) if tokenizer == WORDS else _Subwords(tokenizer, layout, modulus)


class _Words(Encoder):
    """An encoder with one token for each word of `VOCABULARY`."""

    whole_values = True

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.ids = {word: at for at, word in enumerate(VOCABULARY)}
        self.vocab_size = len(VOCABULARY)
        self.end_token = self.ids["<end>"]
        self.begin, self.parting = ([self.ids["<problem>"]], [self.ids["<solution>"]]) if layout.markers else ([], [])
        self.between = [] if layout.markers else [self.ids["\n"]]

    def encode(self, problems: Sequence[Problem]) -> list[Encoded]:
        return [self._one(problem) for problem in problems]

    def _one(self, problem: Problem) -> Encoded:
        ids = self.ids
        prompt = [*self.begin, *(ids[word] for word in self.layout.prompt(problem).split(" ")), *self.parting]
        solution: list[int] = []
        values: list[int] = []
        for sentence, computed in zip(problem.solution, problem.computed, strict=True):
            if solution:
                solution += self.between
            solution += [ids[word] for word in sentence.split(" ")]
            if computed:
                values.append(len(solution) - 2)  # before the full stop
        solution.append(self.end_token)
        return Encoded(prompt, solution, values)

    def decode(self, ids: Tensor) -> str:
        return " ".join(VOCABULARY[at] for at in ids.tolist())


class _Subwords(Encoder):
    """An encoder that uses a transformers tokenizer; its end-of-text token ends solutions."""

    def __init__(self, name: str, layout: Layout, modulus: int) -> None:
        from kvshift_lab.data.tokenizers import load_tokenizer  # takes a second to import

        folder = Path(name).expanduser()
        self.tokenizer: PreTrainedTokenizerFast = load_tokenizer(folder if folder.exists() else name)
        self.layout = layout
        self.vocab_size = vocab_size_of(self.tokenizer)
        assert isinstance(self.tokenizer.eos_token_id, int)  # load_tokenizer guarantees it
        self.end_token = self.tokenizer.eos_token_id
        self.begin, self.parting = ([_MARKS[0]], [_MARKS[1]]) if layout.markers else ([], [])
        if layout.markers and not self._are_unused(_MARKS):
            raise LabError(
                f"igsm.markers needs the tokens {_MARKS[0]} and {_MARKS[1]}, which the tokenizer {name!r} lacks or "
                "uses for text: give markers no, or GPT-2's tokenizer"
            )
        numbers = self.tokenizer([f" {number}" for number in range(modulus)], add_special_tokens=False)["input_ids"]
        self.whole_values = all(len(number) == 1 for number in numbers)

    def encode(self, problems: Sequence[Problem]) -> list[Encoded]:
        solutions: list[str] = []
        value_characters: list[list[int]] = []  # for each solution, the places of the characters of its values
        for problem in problems:
            text, characters = "", []
            for sentence, computed in zip(problem.solution, problem.computed, strict=True):
                text += (self.layout.between if text else "") + detokenize(sentence)
                if computed:
                    value = sentence.rsplit(" ", 2)[1]
                    characters += range(len(text) - 1 - len(value), len(text) - 1)
            solutions.append(text)
            value_characters.append(characters)
        prompts = [detokenize(self.layout.prompt(problem)) for problem in problems]
        prompt_ids = self.tokenizer(prompts, add_special_tokens=False, verbose=False)["input_ids"]
        found = self.tokenizer(solutions, add_special_tokens=False, verbose=False)
        encoded = []
        for row, (prompt, characters) in enumerate(zip(prompt_ids, value_characters, strict=True)):
            values = dict.fromkeys(found.char_to_token(row, at) for at in characters)
            solution = [*found["input_ids"][row], self.end_token]
            encoded.append(Encoded([*self.begin, *prompt, *self.parting], solution, list(values)))
        return encoded

    def decode(self, ids: Tensor) -> str:
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))

    def _are_unused(self, ids: tuple[int, ...]) -> bool:
        text = " ".join(VOCABULARY[3:])
        used = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return max(ids) < self.vocab_size and not set(ids) & set(used)
