"""How the tokens of a batch meet the adapters of their rows: two ways that agree.

Merged: each adapter's tokens by weights that contain it. LowRank: all tokens by the base's weights
in one product, and each adapter's tokens by its own low-rank pair on top, in batched products. The
first is faster where models are so small that a product costs less than its call (hidden size 64:
the low-rank path is as many operations in four times the calls), the second where the base is not
small: it reads the base once however many adapters there are, and its backward pass needs no
gradient of the base's weights.

Knows nothing about attention, caches or losses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from metatrainer.engine.lora import FUSED, Adapter
from metatrainer.engine.model import PROJECTIONS, ModelConfig, Plain, Project, Weights

MERGE_BELOW = 4_000_000
"""Parameters of the projections up to which adapters are merged into copies of them."""


@dataclass(frozen=True)
class Part:
    """A run of tokens that belong to one adapter."""

    adapter: Adapter | None
    """None is the base model."""
    tokens: int


def merges(config: ModelConfig) -> bool:
    """Whether a model is small enough for merged weights."""
    shapes = config.shapes()
    return sum(math.prod(shapes[name]) for name in PROJECTIONS) <= MERGE_BELOW


def projector(config: ModelConfig, base: Weights, parts: Sequence[Part]) -> Project:
    """What multiplies a batch of these parts, in their order; differentiable where grad is on."""
    parts = [part for part in parts if part.tokens]
    if not any(part.adapter for part in parts):
        return Plain(base)
    if merges(config):
        weights = {id(p.adapter): p.adapter.weights(base) for p in parts if p.adapter}
        return Merged([(weights.get(id(p.adapter), base), p.tokens) for p in parts])
    return LowRank(base, parts)


class Merged:
    """Each part by weights of its own."""

    def __init__(self, parts: Sequence[tuple[Weights, int]]):
        self._sizes = [tokens for _, tokens in parts]
        self._tables = [
            {name: getattr(weights, name).unbind(0) for name in PROJECTIONS} for weights, _ in parts
        ]

    def __call__(self, name: str, layer: int, x: Tensor) -> Tensor:
        tables = self._tables
        if len(tables) == 1:
            return F.linear(x, tables[0][name][layer])
        if torch.is_grad_enabled():
            pieces = zip(x.split(self._sizes), tables)
            return torch.cat([F.linear(piece, table[name][layer]) for piece, table in pieces])
        out = x.new_empty(x.shape[0], tables[0][name][layer].shape[0])
        for piece, into, table in zip(x.split(self._sizes), out.split(self._sizes), tables):
            torch.mm(piece, table[name][layer].t(), out=into)
        return out


class LowRank:
    """All parts by the base in one product; adapters on top, [J, T] tokens at once.

    J adapters with up to T tokens each; fewer are padded, smaller ranks too.
    """

    def __init__(self, base: Weights, parts: Sequence[Part]):
        self._base, self._parts = Plain(base), parts
        self._shape = (len(parts), max(part.tokens for part in parts))
        self._rank = max(part.adapter.rank for part in parts if part.adapter)
        self._seats: Tensor | None = None
        if any(part.tokens != self._shape[1] for part in parts):
            seats = [j * self._shape[1] + t for j, p in enumerate(parts) for t in range(p.tokens)]
            self._seats = torch.tensor(seats, device=base.embed.device)
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, name: str, layer: int, x: Tensor) -> Tensor:
        whole = self._base(name, layer, x)
        a, b = self._pair(name, x.dtype)
        low = torch.bmm(self._seat(x), a[layer])
        if self._seats is None:
            return torch.baddbmm(whole.view(*self._shape, -1), low, b[layer]).flatten(0, 1)
        return whole + torch.bmm(low, b[layer]).flatten(0, 1).index_select(0, self._seats)

    def _seat(self, x: Tensor) -> Tensor:
        """[M, in] -> [J, T, in]."""
        if self._seats is None:
            return x.view(*self._shape, -1)
        room = x.new_zeros(self._shape[0] * self._shape[1], x.shape[1])
        return room.index_copy(0, self._seats, x).view(*self._shape, -1)

    def _pair(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A [L, J, in, n r] and B [L, J, n r, out] of all parts; of the base, zeros."""
        if name not in self._pairs:
            some = next(part.adapter for part in self._parts if part.adapter)
            pairs = [fused(part.adapter or some, name, self._rank) for part in self._parts]
            lows, highs = zip(
                *(
                    pair if part.adapter else map(torch.zeros_like, pair)
                    for part, pair in zip(self._parts, pairs)
                )
            )
            self._pairs[name] = (
                torch.stack(lows, dim=1).to(dtype),
                torch.stack(highs, dim=1).to(dtype),
            )
        return self._pairs[name]


def fused(adapter: Adapter, name: str, rank: int) -> tuple[Tensor, Tensor]:
    """Of the n modules side by side in a projection: A [L, in, n r] and B [L, n r, out].

    B is block-diagonal and scaled: one product each, whatever n is. rank: r, at least the
    adapter's own; the rest is zeros.
    """
    missing, scale = rank - adapter.rank, adapter.alpha / adapter.rank
    pairs = [adapter.pairs[module] for module in FUSED[name]]
    whole, column = sum(high.shape[1] for _, high in pairs), 0
    lows, highs = [], []
    for low, high in pairs:
        size = high.shape[1]
        lows.append(F.pad(low, (0, 0, 0, missing)))
        beside = (column, whole - column - size, 0, missing)
        highs.append(F.pad(high.transpose(1, 2) * scale, beside))
        column += size
    return torch.cat(lows, dim=1).transpose(1, 2), torch.cat(highs, dim=1)
