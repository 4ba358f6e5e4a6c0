"""Keys and values of conversations so far, so that a longer prompt only costs its new tokens.

An agent's prompt at each turn is the whole conversation; nearly all of it was computed the turn
before. Knows token ids and tensors; knows nothing about adapters beyond a key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from metatrainer.engine.model import KVCache


@dataclass(frozen=True)
class Entry:
    """Keys and values [L, G, n, D] of n tokens."""

    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[2]

    @property
    def size(self) -> int:
        """Bytes."""
        return 2 * self.keys.numel() * self.keys.element_size()


class PrefixStore:
    """The most recently used prefixes of each model, up to a number of bytes."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._entries: OrderedDict[tuple[Hashable, tuple[int, ...]], Entry] = OrderedDict()
        self._lengths: dict[Hashable, dict[int, int]] = {}
        self._bytes = 0

    def longest(self, model: Hashable, tokens: list[int]) -> Entry | None:
        """The longest known prefix that leaves at least one token of `tokens`."""
        for length in sorted(self._lengths.get(model, ()), reverse=True):
            if length < len(tokens):
                key = (model, tuple(tokens[:length]))
                if key in self._entries:
                    self._entries.move_to_end(key)
                    return self._entries[key]
        return None

    def add(self, model: Hashable, tokens: list[int], cache: KVCache, row: int) -> None:
        """Keep a row of a cache that holds exactly `tokens`."""
        key = (model, tuple(tokens))
        if key in self._entries:
            return
        n = len(tokens)
        entry = Entry(cache.keys[:, row, :, :n].clone(), cache.values[:, row, :, :n].clone())
        self._entries[key] = entry
        self._bytes += entry.size
        known = self._lengths.setdefault(model, {})
        known[n] = known.get(n, 0) + 1
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def forget(self, model: Hashable) -> None:
        """Drop everything of one model."""
        for key in [key for key in self._entries if key[0] == model]:
            self._drop(key)

    def _drop(self, key: tuple[Hashable, tuple[int, ...]]) -> None:
        self._bytes -= self._entries.pop(key).size
        known = self._lengths[key[0]]
        known[len(key[1])] -= 1
        if not known[len(key[1])]:
            del known[len(key[1])]
