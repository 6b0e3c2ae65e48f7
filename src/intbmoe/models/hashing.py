"""Embeddings of ids with far fewer rows than ids.

    row_j(i)  = ((a_j·i + b_j) mod p) mod R        j = 1…h hash functions, p = 2³¹ − 1, a_1 = 1, b_1 = 0
    vector(i) = Σ_j T_j[row_j(i)],  vector(0) = 0  each T_j a table of R rows

An id shares each of its rows with about ids/R others, but all h rows with hardly any (about ids/R^h). Rows are added,
not concatenated, so that each has the full width. The first function is i mod R: if ids are below R, every id has its
own row in T_1, as in a plain embedding, so a table can be built without knowing the number of ids. The a_j and b_j come
from SHA-256 and the arithmetic stays below 2⁶³, so an id has the same rows on every machine.

``ConcatenatedHashEmbedding`` is the form of the released code: row_j(i) = i mod p_j in a table of p_j rows, and the
narrower rows are concatenated.
"""

import hashlib
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from intbmoe.checks import require, require_finite, require_positive_int

PRIME = 2**31 - 1  # p; ids lie below it


class MultiHashEmbedding(nn.Module):
    """(…) ids from 0 to 2³¹ − 2 → (…, dim); 0 means missing and gives zero."""

    def __init__(self, rows: int, dim: int, hashes: int = 2, std: float = 1.0) -> None:
        super().__init__()
        for name, value in (("rows", rows), ("dim", dim), ("hashes", hashes)):
            require_positive_int(name, value)
        require(rows < PRIME, "rows", rows, f"below {PRIME}")
        require_finite("std", std)
        self.rows = rows
        self.constants = [_constants(number) for number in range(hashes)]
        # ``std`` is that of the summed vector: a sum of h rows has √h times the standard deviation of one.
        tables = torch.empty(hashes * rows + 1, dim).normal_(std=std / hashes**0.5)
        tables[-1] = 0  # after T_1 to T_h, a row for missing ids: it has no gradient and stays zero
        self.tables = nn.Parameter(tables)

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(self.places(ids), self.tables, padding_idx=len(self.constants) * self.rows).sum(-2)

    def places(self, ids: Tensor) -> Tensor:
        """(…) ids → (…, h), the indices of their rows in ``tables``."""
        ids = ids.long()
        hashed = [(ids * a + b) % PRIME % self.rows + j * self.rows for j, (a, b) in enumerate(self.constants)]
        return torch.where(ids.unsqueeze(-1) != 0, torch.stack(hashed, -1), len(self.constants) * self.rows)

    def extra_repr(self) -> str:
        return f"rows={self.rows}, dim={self.tables.shape[1]}, hashes={len(self.constants)}"


class ConcatenatedHashEmbedding(nn.Module):
    """(…) ids from 0 → (…, dim); 0 means missing and gives zero. Each modulus contributes dim / len(moduli) numbers."""

    def __init__(self, moduli: Sequence[int], dim: int, std: float = 1.0) -> None:
        super().__init__()
        for modulus in moduli:
            require_positive_int("moduli", modulus)
        require(len(moduli) > 0 and dim % len(moduli) == 0, "moduli", moduli, f"of a length that divides dim ({dim})")
        require_finite("std", std)
        self.moduli, self.starts = tuple(moduli), [sum(moduli[:j]) for j in range(len(moduli))]
        tables = torch.empty(sum(moduli) + 1, dim // len(moduli)).normal_(std=std)
        tables[-1] = 0  # the row for missing ids, without a gradient
        self.tables = nn.Parameter(tables)

    def forward(self, ids: Tensor) -> Tensor:
        ids, missing = ids.long(), len(self.tables) - 1
        rows = torch.stack([ids % p + start for p, start in zip(self.moduli, self.starts, strict=True)], -1)
        rows = torch.where(ids.unsqueeze(-1) != 0, rows, missing)
        return F.embedding(rows, self.tables, padding_idx=missing).flatten(-2)

    def extra_repr(self) -> str:
        return f"moduli={self.moduli}, dim={len(self.moduli) * self.tables.shape[1]}"


def _constants(number: int) -> tuple[int, int]:
    """a and b of a hash function: (1, 0) for the first, pseudo-random numbers below p for the others."""
    if number == 0:
        return 1, 0
    digest = hashlib.sha256(f"multi-hash embedding {number}".encode()).digest()
    a, b = (int.from_bytes(digest[start : start + 8], "little") for start in (0, 8))
    return 1 + a % (PRIME - 1), b % PRIME
