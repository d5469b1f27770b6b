"""The words of the texts: convert between spaced words and ordinary writing.

Inside the generators, a text consists of words and signs separated by single spaces:

    spaced       Define Gel Pen in each Stationery as b ; so b = 9 - ( 4 + 3 ) = 2 .
    detokenized  Define Gel Pen in each Stationery as b; so b = 9 - (4 + 3) = 2.
"""

from __future__ import annotations

import re
import string

from kvshift_lab.tasks.igsm.names import SYSTEMS

MODULUS = 23
"""The modulus in the paper, which is also the largest one allowed: the vocabulary has the numbers below it."""
LETTERS = string.ascii_lowercase + string.ascii_uppercase

_WORD = re.compile(r"\n|'s|[A-Za-z]+|[0-9]+|[^\sA-Za-z0-9]")
_SIGNS = (*"\n.,;?=+-*()", "'s")
_PHRASES = (
    "The number of in each is equals more less than times as much the sum difference product between and of",
    "How many does have Define so",
)


def detokenize(words: str) -> str:
    """Return a spaced text in ordinary writing."""
    for sign in (".", ",", ";", "?", ")", "'s"):
        words = words.replace(" " + sign, sign)
    return words.replace("( ", "(").replace(" \n ", "\n").replace(" \n", "\n")


def spaced(text: str) -> str:
    """Return a text, detokenized or spaced, as words separated by single spaces."""
    return " ".join(_WORD.findall(text))


def _vocabulary() -> tuple[str, ...]:
    """Return the marks, the signs, the numbers 0 ... 22 and the letters, then all other words in alphabetical order."""
    names = " ".join(f"{category.name} {' '.join(category.items)}" for system in SYSTEMS for category in system)
    words = sorted(set(" ".join((names, *_PHRASES)).split()))
    return ("<end>", "<problem>", "<solution>", *_SIGNS, *map(str, range(MODULUS)), *LETTERS, *words)


VOCABULARY = _vocabulary()
"""Vocabulary of the tokenizer "words": every word that can occur in a problem, its question or its solution."""
