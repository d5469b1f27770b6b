"""Random number streams for each purpose, all derived from one seed of a run."""

import hashlib

import torch


def seed_for(purpose: str, seed: int) -> int:
    """Return a 32-bit seed for this purpose and this seed of a run.

    (torch's CPU generator uses only the lower 32 bits of its seed, so they must differ.)
    """
    return int.from_bytes(hashlib.sha256(f"{purpose} {seed}".encode()).digest()[:4], "big")


def generator_for(purpose: str, seed: int) -> torch.Generator:
    """Return a generator whose stream differs from that of any other purpose or seed."""
    return torch.Generator().manual_seed(seed_for(purpose, seed))
