"""One seed of a run, and from it a stream of random numbers for each purpose."""

import hashlib

import torch

__all__ = ["generator_for"]


def generator_for(purpose: str, seed: int) -> torch.Generator:
    """A generator that shares its stream with no other purpose and no other seed.

    (torch's generator on a CPU looks at the lower 32 bits of its seed alone, so they must differ.)
    """
    digest = hashlib.sha256(f"{purpose} {seed}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
