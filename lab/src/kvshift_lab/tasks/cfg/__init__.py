"""CFG: predict and generate sentences of a context-free grammar.

Source: Allen-Zhu and Li, "Physics of Language Models: Part 1" (2023); the paper's rebuttal. Two sequences of 16 tokens
that are consecutive in the stream, of the grammar

    5 -> 4 3 | 3 4 4
    4 -> 1 2 | 2
    3 -> 1 1 | 4 2

    input_ids    1 2 0 1 1 2 1 2 0 1 1 1 2 1 2 0
    labels       - 2 0 1 1 2 1 2 0 1 1 1 2 1 2 0
    slices       . 1 1 0 0 0 0 0 0 0 0 0 0 0 0 0      0 next_token, 1 cut
    input_ids    1 1 2 2 0 1 1 1 2 2 0 1 2 1 2 2
    labels       - 1 2 2 0 1 1 1 2 2 0 1 2 1 2 2
    slices       . 1 1 1 1 0 0 0 0 0 0 0 0 0 0 0

0 is BOS, which also ends the previous sentence. The first sequence begins within a sentence. Its last token, 0, begins
the sentence 1 1 2 2 at the start of the second sequence.
"""

# ruff: noqa: F401

from kvshift_lab.tasks.cfg.grammar import BOS, CFG3F, CFG3S, CFGGrammar, Lengths, MarkovChain
from kvshift_lab.tasks.cfg.task import CFGConfig, CFGTask
