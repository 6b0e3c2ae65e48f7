"""Seeds for every purpose, step and rank, from the one seed of the recipe.

Nothing random in training has a memory: each step's numbers follow from (seed, purpose, step, rank). A resumed run
therefore needs no generator state, and evaluating in between disturbs nothing.
"""

import hashlib

import torch


def derive_seed(seed: int, purpose: str, *numbers: int) -> int:
    """A seed of 63 bits that differs whenever an argument does."""
    text = "/".join([purpose, str(seed), *map(str, numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def make_generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """A generator on the CPU, where its numbers are the same on every machine."""
    return torch.Generator().manual_seed(derive_seed(seed, purpose, *numbers))
