"""Texts as words: how sentences are written, and taken apart again.

Inside the generators a text is its words with one space between any two, signs counting as words:

    spaced       Define Gel Pen in each Stationery as b ; so b = 9 - ( 4 + 3 ) = 2 .
    detokenized  Define Gel Pen in each Stationery as b; so b = 9 - (4 + 3) = 2.
"""

from __future__ import annotations

import re
import string

from kvshift.lab.tasks.igsm.names import SYSTEMS

MODULUS = 23
"""The value in the paper, and the largest: the vocabulary has the numbers below it."""
LETTERS = string.ascii_lowercase + string.ascii_uppercase

_WORD = re.compile(r"\n|'s|[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]")
_SIGNS = (*"\n.,;?=+-*()", "'s")
_PHRASES = (
    "The number of in each is equals more less than times as much the sum difference product between and of",
    "How many does have Define so",
)


def detokenize(words: str) -> str:
    """A spaced text as one would write it."""
    for sign in (".", ",", ";", "?", ")", "'s"):
        words = words.replace(" " + sign, sign)
    return words.replace("( ", "(").replace(" \n ", "\n").replace(" \n", "\n")


def spaced(text: str) -> str:
    """A text, detokenized or not, as words with one space between any two."""
    return " ".join(_WORD.findall(text))


def _vocabulary() -> tuple[str, ...]:
    """Marks, signs, the numbers 0 ... 22, letters, then the other words in the order of the alphabet."""
    names = " ".join(f"{category.name} {' '.join(category.items)}" for system in SYSTEMS for category in system)
    words = sorted(set(" ".join((names, *_PHRASES)).split()))
    return ("<end>", "<problem>", "<solution>", *_SIGNS, *map(str, range(MODULUS)), *LETTERS, *words)


VOCABULARY = _vocabulary()
"""What the tokenizer "words" knows: every word that a problem, its question or its solution can hold."""
