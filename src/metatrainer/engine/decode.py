"""Decoding many rows at once, over turns, on one set of weights.

A Decoder holds the rows' key-value cache: rows are fed (prompts, tool results), sampled, fed again.
Knows nothing about adapters, chat formats or rewards. Each row draws from its own stream of random
numbers, so what it samples does not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metatrainer.engine.model import KVCache, ModelConfig, Rope, Weights, extend, layers


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1 keeps all."""
    stop: tuple[int, ...] = ()
    """Token ids that end a row; the stop token itself is part of the sample."""


@dataclass
class Sample:
    """Sampled tokens with the log-probability of each under the model at temperature 1."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] = "length"


class Decoder:
    """A batch of growing rows."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        rope: Rope,
        seeds: list[int],
        capacity: int = 64,
    ):
        self.config, self.weights, self.rope = config, weights, rope
        self._layers = layers(weights)
        device, dtype = str(weights.embed.device), weights.embed.dtype
        self.cache = KVCache(config, len(seeds), capacity, device, dtype)
        self.hidden = torch.zeros(len(seeds), config.hidden_size, device=device, dtype=dtype)
        self._random = [np.random.Generator(np.random.Philox(key=seed)) for seed in seeds]

    @property
    def rows(self) -> int:
        """Rows in the batch."""
        return len(self._random)

    def room(self) -> int:
        """Tokens that the longest row can still take before the model's last position."""
        return self.config.max_position_embeddings - self.cache.longest

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Drop all other rows for good; the kept ones are renumbered in the given order."""
        if rows == list(range(self.rows)):
            return
        index = torch.tensor(rows, dtype=torch.long, device=self.hidden.device)
        self.cache = self.cache.select(index)
        self.hidden = self.hidden[index]
        self._random = [self._random[i] for i in rows]

    @torch.inference_mode()
    def feed(self, tokens: list[list[int]]) -> None:
        """Append tokens to each row (an empty list leaves a row as it is)."""
        counts = torch.tensor([len(t) for t in tokens], device=self.hidden.device)
        ids = _pad(tokens).to(self.hidden.device)
        hidden = self._extend(ids, counts)
        self.hidden = torch.where((counts > 0)[:, None], hidden, self.hidden)

    @torch.inference_mode()
    def feed_shared(self, prompts: list[list[int]]) -> None:
        """Feed first prompts, computing each different one once."""
        unique: dict[tuple[int, ...], int] = {}
        origin = [unique.setdefault(tuple(p), len(unique)) for p in prompts]
        if len(unique) == len(prompts):
            return self.feed(prompts)
        small = Decoder(self.config, self.weights, self.rope, [0] * len(unique), 64)
        small.feed([list(p) for p in unique])
        index = torch.tensor(origin, device=self.hidden.device)
        self.cache = small.cache.select(index)
        self.hidden = small.hidden[index]
        return None

    @torch.inference_mode()
    def sample(self, params: SamplingParams, rows: list[int] | None = None) -> list[Sample]:
        """Sample each of `rows` (default all) until it stops. Rows not named stay as they are."""
        active = list(range(self.rows)) if rows is None else rows
        samples = [Sample() for _ in active]
        budget = min(params.max_tokens, self.room())
        if not active or budget <= 0:
            return samples
        draws = np.stack([self._random[i].random(params.max_tokens) for i in active])
        whole = self.cache, self.hidden
        width = torch.tensor(active, device=self.hidden.device)
        if len(active) < self.rows:
            self.cache, self.hidden = self.cache.select(width), self.hidden[width]
        narrowed: list[tuple[KVCache, Tensor, list[int]]] = []
        seats = list(range(len(active)))  # who (a position in `active`) sits in which row
        live = set(seats)
        for t in range(budget):
            tokens, logprobs = self._draw(params, draws[seats, t])
            counts = torch.tensor([int(who in live) for who in seats], device=self.hidden.device)
            for who, token, logprob in zip(seats, tokens, logprobs):
                if who in live:
                    samples[who].tokens.append(token)
                    samples[who].logprobs.append(logprob)
                    if token in params.stop:
                        samples[who].stop_reason = "stop"
                        live.remove(who)
            hidden = self._extend(torch.tensor(tokens, device=counts.device)[:, None], counts)
            self.hidden = torch.where((counts > 0)[:, None], hidden, self.hidden)
            if not live:
                break
            if len(live) <= len(seats) // 2:
                narrowed.append((self.cache, self.hidden, seats))
                stay = [seat for seat, who in enumerate(seats) if who in live]
                index = torch.tensor(stay, device=self.hidden.device)
                self.cache, self.hidden = self.cache.select(index), self.hidden[index]
                seats = [seats[seat] for seat in stay]
        self._widen(narrowed, seats)
        if len(active) < self.rows:
            cache, state = whole
            cache.put_back(width, self.cache)
            state = state.index_copy(0, width, self.hidden)
            self.cache, self.hidden = cache, state
        return samples

    def _widen(self, narrowed: list[tuple[KVCache, Tensor, list[int]]], seats: list[int]) -> None:
        """Put the rows of the working batch back into the wider ones it was narrowed from."""
        for cache, hidden, wider in reversed(narrowed):
            index = torch.tensor([wider.index(w) for w in seats], device=hidden.device)
            cache.put_back(index, self.cache)
            self.cache, self.hidden = cache, hidden.index_copy(0, index, self.hidden)
            seats = wider

    def _extend(self, ids: Tensor, counts: Tensor) -> Tensor:
        return extend(self.config, self.weights, self._layers, self.rope, ids, counts, self.cache)

    def _draw(self, params: SamplingParams, uniform: np.ndarray) -> tuple[list[int], list[float]]:
        """One token a row by inverse transform, and its log-probability at temperature 1."""
        logits = F.linear(self.hidden, self.weights.head).float()
        model = logits.softmax(dim=-1)
        if params.temperature == 0:
            chosen = logits.argmax(dim=-1, keepdim=True)
        else:
            drawn = model
            if (params.temperature, params.top_p, params.top_k) != (1.0, 1.0, -1):
                drawn = _filter(logits / params.temperature, params).softmax(dim=-1)
            total = drawn.cumsum(dim=-1)
            u = torch.from_numpy(uniform).to(total)[:, None] * total[:, -1:]
            chosen = torch.searchsorted(total, u, right=True).clamp_(max=logits.shape[1] - 1)
        return chosen[:, 0].tolist(), model.gather(1, chosen)[:, 0].log().tolist()


def _filter(logits: Tensor, params: SamplingParams) -> Tensor:
    """Logits with all tokens outside top-k and top-p set to minus infinity."""
    if params.top_k > 0:
        kth = logits.topk(min(params.top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probability = ordered.softmax(dim=-1)
        outside = probability.cumsum(dim=-1) - probability >= params.top_p
        logits = logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)
    return logits


def _pad(rows: list[list[int]]) -> Tensor:
    width = max(1, max(len(r) for r in rows))
    return torch.tensor([r + [0] * (width - len(r)) for r in rows], dtype=torch.long)
