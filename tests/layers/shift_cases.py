"""Layers and inputs that the tests of `KVShift` share. All sizes are distinct."""

import torch

from kvshift import KVShift, ShiftOptions

B, T, G, H, D, DV = 2, 11, 3, 5, 7, 13
NAMES = {"q": "gamma", "k": "alpha", "v": "beta"}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def qkv(length: int = T, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    rng = generator(seed)
    return tuple(
        torch.randn(B, length, heads, size, generator=rng, dtype=torch.float64).to(dtype)
        for heads, size in ((H, D), (G, D), (G, DV))
    )


def layer(seed: int = 0, **options) -> KVShift:
    shift = KVShift(G, ShiftOptions(**options), num_heads=H)
    shift.reset_parameters(generator(seed))
    return shift
