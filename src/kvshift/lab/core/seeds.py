"""One seed of a run, and from it a stream of random numbers for each purpose."""

import hashlib

import torch


def seed_for(purpose: str, seed: int) -> int:
    """A seed of 32 bits that belongs to this purpose and this seed of a run.

    (torch's generator on a CPU looks at the lower 32 bits of its seed alone, so they must differ.)
    """
    return int.from_bytes(hashlib.sha256(f"{purpose} {seed}".encode()).digest()[:4], "big")


def generator_for(purpose: str, seed: int) -> torch.Generator:
    """A generator that shares its stream with no other purpose and no other seed."""
    return torch.Generator().manual_seed(seed_for(purpose, seed))
