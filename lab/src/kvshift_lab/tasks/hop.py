"""k-hop induction: from a letter, go k times to the letter that followed its latest earlier occurrence.

Source: Sanford, Hsu and Telgarsky, "Transformers, parallel computation, and logarithmic depth" (2024); the paper's
Figure 8. A sequence with 10 letters and k = 2 of at most 3 (HopTask gives the numeric ids):

    input_ids    2  b  c  b  c  a  b  d  b  d  a  _
    labels       -  _  ~  ~  ~  c  ~  b  ~  ~  d  c
    slices       .  .  u  u  u  2  u  2  u  u  2  2      2 hops_2, u undefined

From w_4 = c, the first hop leads to w_3 = b, which followed the previous c. The second hop leads to w_2 = c, which
followed the previous b. The label is one column later than w_4, where transformers expects it.

Shapes: B sequences, T positions in a sequence, N letters in a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvshift_lab.core.errors import require
from kvshift_lab.tasks.batch import IGNORED, Batch
from kvshift_lab.tasks.option_checks import check_at_least, check_batch_size


@dataclass(frozen=True, kw_only=True)
class HopConfig:
    """Options of k-hop induction; the defaults are those of Sanford et al."""

    letters: int = 98
    """Number of letters in a sequence, N; a sequence has letters + 2 tokens."""
    alphabet: int = 4
    """Number of different letters."""
    max_hops: int = 16
    """Largest k. It determines the ids; keep it fixed to compare tasks that differ only in `hops`."""
    hops: int | None = None
    """k of every sequence; None: uniform in 0 ... max_hops."""

    def __post_init__(self) -> None:
        check_at_least("hop", self, letters=1, alphabet=2, max_hops=0)
        known = self.hops is None or 0 <= self.hops <= self.max_hops
        require(known, "hop.hops", self.hops, f"None or in 0 ... max_hops = {self.max_hops}")


class HopTask:
    """Take k hops from every letter w_1 ... w_N; w_1 is uniform, w_{i+1} is uniform over the letters other than w_i.

        hop_0(i) = i
        hop_{r+1}(i) = 1 + max{ j < q : w_j = w_q },  q = hop_r(i);  undefined if there is no such j, or no q
        target(i) = w at hop_k(i),  or ~ if that is undefined

    Ids: 0 ... max_hops for k, then the letters, then ~, then _. The defaults give 23 ids: a b c d = 17 ... 20, ~ = 21,
    _ = 22. In the sequence and its labels, column t + 1 contains the label of the output at t:

        input_ids    k  w_1  ...         w_N        _
        labels       -   _   target(1)  ...   target(N)

    The last input only provides a column for the last label. In Sanford et al., the inputs are the first N + 1 columns
    and the outputs are the last N + 1.

    Slices: "hops_k" contains the defined targets of the sequences with that k, which is the published metric (reported
    there as the error, one minus accuracy); "undefined" contains the targets ~. The label _ is trained on but is in
    neither slice.

    Chance, for hops_k: the guesser names a random letter and has accuracy 1 / alphabet. (For k = 1 the target is never
    w_i itself, and a guesser that knows w_i has 1 / (alphabet - 1).)
    """

    def __init__(self, config: HopConfig) -> None:
        self.config = config
        self.first_letter = config.max_hops + 1
        self.undefined = self.first_letter + config.alphabet
        self.blank = self.undefined + 1
        self.vocab_size = self.blank + 1
        self.length = config.letters + 2
        by_hops = [f"hops_{hops}" for hops in range(config.max_hops + 1)]
        self.slice_names = (*by_hops, "undefined")
        self.chance = dict.fromkeys(by_hops, 1 / config.alphabet)

    def batch(self, generator: torch.Generator, batch_size: int) -> Batch:
        """Draw the next `batch_size` sequences; see `Task.batch`."""
        check_batch_size(batch_size)
        config = self.config
        if config.hops is None:
            hops_B1 = torch.randint(config.max_hops + 1, (batch_size, 1), generator=generator)
        else:
            hops_B1 = torch.full((batch_size, 1), config.hops)
        steps_BN = torch.randint(1, config.alphabet, (batch_size, config.letters), generator=generator)
        steps_BN[:, 0] = torch.randint(config.alphabet, (batch_size,), generator=generator)
        letters_BN = steps_BN.cumsum(1) % config.alphabet

        at_BN = _hop(letters_BN, hops_B1, config.alphabet)
        defined_BN = at_BN > 0
        letter_there_BN = letters_BN.gather(1, (at_BN - 1).clamp(min=0))
        target_BN = torch.where(defined_BN, self.first_letter + letter_there_BN, self.undefined)
        slice_BN = torch.where(defined_BN, hops_B1, config.max_hops + 1)
        return Batch(
            input_ids=F.pad(torch.cat([hops_B1, self.first_letter + letters_BN], dim=1), (0, 1), value=self.blank),
            labels=F.pad(F.pad(target_BN, (1, 0), value=self.blank), (1, 0), value=IGNORED),
            slices=F.pad(slice_BN, (2, 0), value=-1),
        )


def _hop(letters_BN: Tensor, hops_B1: Tensor, alphabet: int) -> Tensor:
    """Return hop_k(i) for i = 1 ... N, counted from 1 as in the formula; 0 means undefined and stays so."""
    count = letters_BN.shape[1]
    index_N = torch.arange(1, count + 1)
    before_BN = torch.zeros_like(letters_BN)  # max{ j < i : w_j = w_i }, or 0
    for letter in range(alphabet):
        is_letter_BN = letters_BN == letter
        latest_BN = torch.where(is_letter_BN, index_N, 0).cummax(dim=1).values
        before_BN += torch.where(is_letter_BN, F.pad(latest_BN, (1, 0))[:, :-1], 0)
    # column 0 stands for "undefined"
    next_BN = F.pad(torch.where(before_BN > 0, before_BN + 1, 0), (1, 0))
    at_BN = index_N.expand_as(letters_BN)
    for hop in range(1, int(hops_B1.max()) + 1):
        at_BN = torch.where(hop <= hops_B1, next_BN.gather(1, at_BN), at_BN)
    return at_BN
