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
from typing import Any

import numpy as np
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
    """All parts by the base in one product; adapters on top, each part by its own pair."""

    def __init__(self, base: Weights, parts: Sequence[Part]):
        self._base, self._adapters = base, [part.adapter for part in parts]
        self._rank = max(adapter.rank for adapter in self._adapters if adapter)
        self._seating = seating([part.tokens for part in parts], base.embed.device)
        self._tables: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def __call__(self, name: str, layer: int, x: Tensor) -> Tensor:
        return product(x, *self._table(name, x.dtype)[layer], self._seating)

    def _table(self, name: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each layer the base's weight and all parts' pairs."""
        if name not in self._tables:
            a, b = (pair.to(dtype) for pair in fused(self._adapters, name, self._rank))
            layers = zip(getattr(self._base, name).unbind(0), a.unbind(0), b.unbind(0))
            self._tables[name] = list(layers)
        return self._tables[name]


@dataclass(frozen=True)
class Seating:
    """How M tokens of J adapters sit in [J, T], T the most that an adapter has."""

    adapters: int
    room: int
    places: Tensor | None = None
    """[M] where each token sits; None: all adapters have T, and the order is the same."""
    tokens: Tensor | None = None
    """[J T] who sits there; in an empty place the adapter's own last one."""
    empty: Tensor | None = None
    """The empty places."""

    def seat(self, x: Tensor, clear: bool = False) -> Tensor:
        """[M, n] -> [J, T, n]. clear: with zeros in the empty places, for sums over T."""
        if self.tokens is not None and self.empty is not None:
            x = x.index_select(0, self.tokens)
            if clear:
                x.index_fill_(0, self.empty, 0.0)
        return x.view(self.adapters, self.room, -1)

    def add_product(self, whole: Tensor, low: Tensor, high: Tensor) -> None:
        """Add low [J, T, r] by high [J, r, n] to whole [M, n]."""
        if self.places is None:
            whole.view(self.adapters, self.room, -1).baddbmm_(low, high)
        else:
            whole += torch.bmm(low, high).flatten(0, 1).index_select(0, self.places)


def seating(tokens: Sequence[int], device: torch.device) -> Seating:
    """Of adapters with so many tokens each."""
    room = max(tokens)
    if all(n == room for n in tokens):
        return Seating(len(tokens), room)
    count = np.array(tokens)[:, None]
    seat = np.arange(room)[None, :]
    taken = (seat < count).ravel()
    who = (np.minimum(seat, count - 1) + count.cumsum()[:, None] - count).ravel()
    found = np.flatnonzero(taken), who, np.flatnonzero(~taken)
    return Seating(len(tokens), room, *(torch.from_numpy(each).to(device) for each in found))


def product(x: Tensor, weight: Tensor, a: Tensor, b: Tensor, seating: Seating) -> Tensor:
    """x [M, in] by weight [out, in], and each adapter's tokens by its pair of a [J, in, r] and
    b [J, r, out] on top -> [M, out]. The weight gets no gradient."""
    out: Tensor = _Product.apply(x, weight, a, b, seating)
    return out


class _Product(torch.autograd.Function):
    """By hand, since it is most of what training is: five products back, nothing added apart."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, seating: Seating
    ) -> Tensor:
        whole = F.linear(x, weight)
        low = torch.bmm(seating.seat(x), a)
        seating.add_product(whole, low, b)
        ctx.save_for_backward(x, weight, a, b, low)
        ctx.seating = seating
        return whole

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor, None]:
        x, weight, a, b, low = ctx.saved_tensors
        above = given[0].contiguous()
        seated = ctx.seating.seat(above, clear=True)
        d_low = torch.bmm(seated, b.transpose(1, 2))
        d_a = torch.bmm(ctx.seating.seat(x).transpose(1, 2), d_low)
        d_b = torch.bmm(low.transpose(1, 2), seated)
        d_x = None
        if ctx.needs_input_grad[0]:
            d_x = above @ weight
            ctx.seating.add_product(d_x, d_low, a.transpose(1, 2))
        return d_x, None, d_a, d_b, None


def fused(adapters: Sequence[Adapter | None], name: str, rank: int) -> tuple[Tensor, Tensor]:
    """Of the n modules side by side in a projection: A [L, J, in, n r] and B [L, J, n r, out].

    B is block-diagonal and scaled: one product each, whatever n is. rank: r, at least the
    adapters' own; the rest is zeros, and all of it for None.
    """
    some = next(adapter for adapter in adapters if adapter)
    scale = torch.stack([(adapter or some).scale for adapter in adapters])[:, None, None]
    sizes = [some.pairs[module][1].shape[1] for module in FUSED[name]]
    lows, highs, column = [], [], 0
    for module, size in zip(FUSED[name], sizes):
        pairs = [_padded(adapter, some, module, rank) for adapter in adapters]
        low, high = (torch.stack(each, dim=1) for each in zip(*pairs))
        lows.append(low)
        beside = (column, sum(sizes) - column - size)
        highs.append(F.pad(high.transpose(2, 3) * scale, beside))
        column += size
    return torch.cat(lows, dim=2).transpose(2, 3), torch.cat(highs, dim=2)


def _padded(
    adapter: Adapter | None, some: Adapter, module: str, rank: int
) -> tuple[Tensor, Tensor]:
    """A [L, rank, in] and B [L, out, rank] of a module; without an adapter, zeros."""
    if adapter is None:
        low, high = (torch.zeros_like(each) for each in some.pairs[module])
        missing = rank - some.rank
    else:
        low, high = adapter.pairs[module]
        missing = rank - adapter.rank
    return (F.pad(low, (0, 0, 0, missing)), F.pad(high, (0, missing))) if missing else (low, high)
