"""Context-free grammars with finitely many sentences: sampling, parsing, exact distributions of lengths and windows.

Source: Allen-Zhu and Li, "Physics of Language Models: Part 1" (2023), which defines cfg3f.

Shapes: M symbols in a stream, R rules, W parts of the longest rule, V tokens, N tokens in the longest sentence, n in
one sentence, S states of the chain, B windows of T tokens.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from graphlib import CycleError, TopologicalSorter
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kvshift_lab.core.errors import LabError

if TYPE_CHECKING:  # takes a quarter of a second to import
    from scipy.sparse import csr_array

BOS = 0  # the token before each sentence; no rule produces it

Rule = tuple[int, ...]

_LINE = re.compile(r" *\d+ *->( *\d+)+( *\|( *\d+)+)* *", re.ASCII)


@dataclass(frozen=True, eq=False)
class Lengths:
    """The exact distribution of a grammar's sentence lengths and of tokens by position.

    Attributes:
        probability: (N + 1,), probability of each length.
        token_at: (V, N), probability that the sentence reaches position q (from 0) and has this token there.
    """

    probability: np.ndarray
    token_at: np.ndarray

    @property
    def shortest(self) -> int:
        """Length of the shortest sentence."""
        return int(np.flatnonzero(self.probability)[0])

    @property
    def longest(self) -> int:
        """Length of the longest sentence, N."""
        return len(self.probability) - 1

    @property
    def mean(self) -> float:
        """Expected length of a sentence."""
        return float(self.probability @ np.arange(len(self.probability)))


@dataclass(frozen=True, eq=False)
class MarkovChain:
    """The endless stream of sentences as an exact Markov chain.

    A state is a token and the symbols from which the rest of its sentence is derived. There are finitely many states
    because the grammar is not recursive.

    Attributes:
        token: (S,), token of each state.
        following: (S, S), transition probabilities from each state (row) to the state at the next token (column).
        stationary: (S,), probability of each state at a uniformly random token of the stream.
    """

    token: np.ndarray
    following: csr_array
    stationary: np.ndarray


@dataclass(frozen=True, kw_only=True)
class CFGGrammar:
    """A grammar that is readable and can be stored as JSON.

        CFGGrammar(rules=("5 -> 4 4 | 4 3 4", "4 -> 1 2 | 2", "3 -> 1 1"))

    The first symbol is the root. Symbols without rules are the terminals 1 ... K, and their tokens are the same
    numbers; token 0 precedes each sentence. All rules of a symbol are equally likely (a rule written twice counts
    twice). The grammar must not be recursive, so that there are finitely many sentences.
    """

    rules: tuple[str, ...]
    """The rules of each symbol, one line per symbol: "symbol -> right side | right side"."""

    def __post_init__(self) -> None:
        rules = self.rules_by_symbol
        named = {symbol for sides in rules.values() for side in sides for symbol in side}
        terminals = sorted(named - set(rules))
        if min(rules) <= BOS or terminals != list(range(1, len(terminals) + 1)):
            raise LabError(
                f"grammar.rules: the symbols without rules must be 1, 2, ... ({BOS} is reserved for the beginning of a "
                f"sentence), got {terminals}"
            )
        if unused := sorted(set(rules) - named - {self.root}):
            raise LabError(
                f"grammar.rules: no rule produces {', '.join(map(str, unused))}, and the root is the first symbol"
            )
        try:
            order = self.bottom_up
        except CycleError as error:
            raise LabError(
                f"grammar.rules: no symbol may produce itself, got {' <- '.join(map(str, error.args[1]))}"
            ) from None
        least = dict.fromkeys(terminals, 0.0)
        for symbol in order:
            least[symbol] = min(sum(least[part] for part in side) for side in rules[symbol]) - math.log(
                len(rules[symbol])
            )
        if least[self.root] < math.log(np.finfo(np.float64).tiny):
            raise LabError(
                "grammar.rules: the probability of every derivation must be representable in float64, got "
                f"exp({least[self.root]:.0f})"
            )

    @cached_property
    def rules_by_symbol(self) -> Mapping[int, tuple[Rule, ...]]:
        """Right sides of the rules by symbol, the root first."""
        rules: dict[int, tuple[Rule, ...]] = {}
        for line in self.rules:
            if not _LINE.fullmatch(line):
                raise LabError(f'grammar.rules must be lines such as "7 -> 2 2 1 | 3 2", got {line!r}')
            left, right = line.split("->")
            symbol, sides = int(left), tuple(tuple(map(int, side.split())) for side in right.split("|"))
            if symbol in rules:
                raise LabError(f"grammar.rules must have one line for each symbol, got two for {symbol}")
            rules[symbol] = sides
        if not rules:
            raise LabError("grammar.rules must have 1 line or more, got none")
        return rules

    @property
    def root(self) -> int:
        """The start symbol of every sentence."""
        return next(iter(self.rules_by_symbol))

    @cached_property
    def bottom_up(self) -> tuple[int, ...]:
        """Symbols that have rules, each after the symbols in its right sides; the root is last."""
        parts = {symbol: {part for side in sides for part in side} for symbol, sides in self.rules_by_symbol.items()}
        return tuple(symbol for symbol in TopologicalSorter(parts).static_order() if symbol in parts)

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, V: the terminals and BOS."""
        named = {symbol for sides in self.rules_by_symbol.values() for side in sides for symbol in side}
        return 1 + len(named - set(self.rules_by_symbol))

    @cached_property
    def lengths(self) -> Lengths:
        """The exact distribution of sentence lengths and of tokens by position.

        p_A(n) = mean over rules A -> B_1 ... B_m of (p_B1 * ... * p_Bm)(n), where * is convolution. The token at
        position q of A is the token at q' of some B_j, where B_1 ... B_{j-1} together have q - q' tokens.
        """
        probability = {token: np.array([0.0, 1.0]) for token in range(1, self.vocab_size)}
        token_at = {token: np.eye(self.vocab_size)[:, token : token + 1] for token in probability}
        for symbol in self.bottom_up:
            sides = self.rules_by_symbol[symbol]
            longest = max(sum(len(probability[part]) - 1 for part in side) for side in sides)
            probability[symbol], token_at[symbol] = np.zeros(longest + 1), np.zeros((self.vocab_size, longest))
            for side in sides:
                before = np.ones(1) / len(sides)
                for part in side:
                    for token in range(1, self.vocab_size):
                        at = np.convolve(before, token_at[part][token])
                        token_at[symbol][token, : len(at)] += at
                    before = np.convolve(before, probability[part])
                probability[symbol][: len(before)] += before
        return Lengths(probability[self.root], token_at[self.root])

    @cached_property
    def _tables(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Arrays of all rules: index of the first rule and number of rules by symbol; parts and their mask by rule.

        A token has a single rule, which maps it to itself.
        """
        rules_by_symbol = {**{token: ((token,),) for token in range(self.vocab_size)}, **self.rules_by_symbol}
        sides = [side for of_symbol in rules_by_symbol.values() for side in of_symbol]
        first_rule = np.zeros(max(rules_by_symbol) + 1, np.int64)
        rule_count = np.ones_like(first_rule)
        rule_count[list(rules_by_symbol)] = [len(of_symbol) for of_symbol in rules_by_symbol.values()]
        first_rule[list(rules_by_symbol)] = (
            np.cumsum(rule_count[list(rules_by_symbol)]) - rule_count[list(rules_by_symbol)]
        )
        width_R = np.array([len(side) for side in sides])
        present_RW = np.arange(width_R.max()) < width_R[:, None]
        parts_RW = np.zeros(present_RW.shape, np.int64)
        parts_RW[present_RW] = [part for side in sides for part in side]
        return first_rule, rule_count, parts_RW, present_RW

    def stream(self, generator: torch.Generator, sentences: int) -> np.ndarray:
        """Draw `sentences` random sentences and concatenate them, with BOS before each: (M,) int64.

        All symbols of the stream are expanded at once, repeatedly, until only tokens are left.
        """
        first_rule, rule_count, parts_RW, present_RW = self._tables
        choices = math.lcm(*rule_count.tolist())  # a multiple of each number of rules: all are exactly equally likely
        symbols_M = np.tile([BOS, self.root], sentences)
        while symbols_M.max(initial=0) >= self.vocab_size:
            drawn_M = torch.randint(choices, (len(symbols_M),), generator=generator).numpy()
            rule_M = first_rule[symbols_M] + drawn_M % rule_count[symbols_M]
            symbols_M = parts_RW[rule_M][present_RW[rule_M]]
        return symbols_M

    def sentences(self, generator: torch.Generator, count: int) -> list[Tensor]:
        """Draw `count` random sentences, each (n,) int64, without BOS."""
        stream = torch.from_numpy(self.stream(generator, count))
        return [sentence[1:] for sentence in stream.tensor_split(torch.nonzero(stream == BOS)[1:, 0])]

    def log_probability(self, tokens: Tensor) -> float:
        """Return log P(sentence), in nats; -inf for tokens (n,) that are not a sentence.

        This is the inside algorithm. With C_A[i, j] = P(A derives tokens i ... j - 1), the sum over all boundaries
        between the parts of a rule is a product of matrices, computed bottom up, once for each symbol:

            C_A = mean over rules A -> B_1 ... B_m of C_B1 @ ... @ C_Bm

        All terms are positive or exactly 0, and none underflows.
        """
        from scipy.sparse import csr_array  # takes a quarter of a second to import

        n = len(tokens)
        chart = {}
        for token in range(1, self.vocab_size):
            at = np.flatnonzero(tokens.numpy() == token)
            chart[token] = csr_array((np.ones(len(at)), (at, at + 1)), shape=(n + 1, n + 1))
        for symbol in self.bottom_up:
            sides = self.rules_by_symbol[symbol]
            chart[symbol] = sum(
                (reduce(operator.matmul, (chart[part] for part in side)) for side in sides[1:]),
                start=reduce(operator.matmul, (chart[part] for part in sides[0])),
            ) / len(sides)
        probability = chart[self.root][0, n]
        return math.log(probability) if probability else -math.inf

    @cached_property
    def chain(self) -> MarkovChain:
        """The stream as a Markov chain, by leftmost derivation.

        A state is a token followed by the symbols still to be expanded, such as (1, 5, 4); the root follows BOS.
        """
        from scipy.sparse import csr_array

        rules = self.rules_by_symbol
        start: Rule = (BOS, self.root)
        numbers: dict[Rule, int] = {start: 0}
        ahead: list[Rule] = [start]
        edges: dict[tuple[int, int], float] = defaultdict(float)
        while ahead:
            state = ahead.pop()
            unfolding = [(state[1:] or start, 1.0)]
            while unfolding:
                (first, *rest), chance = unfolding.pop()
                if first in rules:
                    sides = rules[first]
                    unfolding += [((*side, *rest), chance / len(sides)) for side in sides]
                    continue
                reached = (first, *rest)
                if reached not in numbers:
                    numbers[reached] = len(numbers)
                    ahead.append(reached)
                edges[numbers[state], numbers[reached]] += chance
        at = tuple(np.array(list(edges)).T)
        matrix = csr_array((np.array(list(edges.values())), at), shape=(len(numbers), len(numbers)))

        here = np.eye(1, len(numbers))[0]  # distribution over states at each token of a sentence, from BOS to its end
        visits = np.zeros_like(here)
        while here.any():
            visits += here
            here = here @ matrix
            here[0] = 0
        return MarkovChain(np.array([state[0] for state in numbers]), matrix, visits / visits.sum())

    def window_log_probability(self, tokens: Tensor) -> Tensor:
        """Return log P(token | previous tokens in its window), in nats: (B, T) float64, for windows (B, T) int64.

        A window begins at a uniformly random token of the endless stream, and the tokens before it are unknown. This is
        the forward algorithm on the `chain`, with b_t(s) = P(state s at t | tokens before t) and b_0 stationary:

            P(x_t | x_0 ... x_{t-1}) = sum of b_t(s) over the states s of token x_t
            b_{t+1} = (b_t restricted to these states, divided by that sum) @ following

        The result is -inf where a window cannot occur in the stream.
        """
        chain = self.chain
        belief_BS = np.tile(chain.stationary, (len(tokens), 1))
        found_BT = np.empty(tokens.shape)
        for at, token_B in enumerate(tokens.numpy().T):
            joint_BS = belief_BS * (chain.token == token_B[:, None])
            found_BT[:, at] = joint_BS.sum(axis=1)
            possible_B = found_BT[:, at] > 0
            belief_BS = joint_BS / np.where(possible_B, found_BT[:, at], 1)[:, None] @ chain.following
        return torch.from_numpy(found_BT).log()

    def parses(self, tokens: Tensor) -> bool:
        """Return True if tokens (n,) are a sentence."""
        lengths = self.lengths
        return lengths.shortest <= len(tokens) <= lengths.longest and self.log_probability(tokens) > -math.inf


CFG3F = CFGGrammar(
    rules=(
        "22 -> 20 21 | 20 19 21 | 21 19 19 | 20 20",
        "19 -> 18 16 18 | 17 18 | 18 18",
        "20 -> 16 16 | 16 17 | 17 16 18",
        "21 -> 18 17 | 17 16 | 16 17 18 | 16 18",
        "16 -> 15 15 | 13 15 13 | 14 13 | 14 14",
        "17 -> 15 14 13 | 14 15 | 15 14",
        "18 -> 14 15 13 | 15 13 13 | 13 15",
        "13 -> 11 12 | 12 11 12 | 10 12 11",
        "14 -> 10 12 | 12 10 12 | 12 11 | 10 12 12",
        "15 -> 10 11 11 | 11 11 10 | 10 10 | 12 12 11",
        "10 -> 8 9 9 | 9 7 9 | 7 9 9",
        "11 -> 8 8 | 9 7 | 9 7 7",
        "12 -> 7 9 7 | 9 8 | 8 8 9",
        "7 -> 2 2 1 | 3 2 2 | 3 1 2 | 3 2",
        "8 -> 3 1 1 | 1 2 | 3 3 1",
        "9 -> 1 2 1 | 3 3 | 1 1",
    )
)
"""The grammar of the paper's rebuttal: sentences of 64 ... 729 tokens, 249.86 on average."""

CFG3S = CFGGrammar(
    rules=(
        "10 -> 7 8 9 | 8 7 7 | 9 9 8 | 8 9 7",
        "7 -> 4 5 | 6 4 5 | 5 6 6",
        "8 -> 5 4 | 6 6 4 | 4 6",
        "9 -> 4 4 6 | 6 5 | 5 5 4",
        "4 -> 1 2 | 3 3 1 | 2 1",
        "5 -> 2 3 | 1 1 2 | 3 2 2",
        "6 -> 3 2 | 2 2 3 | 1 3",
    )
)
"""A small grammar like CFG3F, for laptops and tests: three levels of rules, not six; sentences of 12 ... 27 tokens."""
