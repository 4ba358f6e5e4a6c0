"""Growing rows: a Decoder holds those of one adapter, and pieces of work advance many together.

Rows are fed (prompts, tool results) and sampled, over turns. `advance` moves any number of feeds
and turns of different decoders by one step in one pass over the model: the rows of many jobs in
one batch, each with its own adapter and settings; work joins and leaves between steps. Each row
draws from its own stream of random numbers, so what it samples does not depend on its neighbours.

Knows nothing about chat formats, rewards or whose rows they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metatrainer.engine.model import Chunk, KVCache, ModelConfig


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

    @property
    def shape(self) -> tuple[float, float, int]:
        """What decides the distribution: rows of one shape are drawn together."""
        return self.temperature, self.top_p, self.top_k


@dataclass
class Sample:
    """Sampled tokens with the log-probability of each under the model at temperature 1."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop_reason: Literal["stop", "length"] = "length"


class Streams:
    """A stream of uniform numbers for each row, by hashing its seed and a counter.

    Any number of any row can be had at once and depends on nothing but the row's seed. The hash is
    the finalizer of SplitMix64 (Steele, Lea, Flood 2014), taken twice.
    """

    def __init__(self, seeds: Sequence[int]):
        self._seeds = _mix(np.array([seed & _MASK for seed in seeds], dtype=np.uint64))
        self._drawn = 0

    def __len__(self) -> int:
        return len(self._seeds)

    def draw(self, n: int) -> np.ndarray:
        """The next n numbers in [0, 1) of every row, [rows, n]."""
        counter = np.arange(self._drawn + 1, self._drawn + 1 + n, dtype=np.uint64)
        self._drawn += n
        bits = _mix(self._seeds[:, None] + counter * _GOLDEN)
        return (bits >> np.uint64(11)) * 2.0**-53

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows."""
        self._seeds = self._seeds[rows]


_MASK = (1 << 64) - 1
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class Decoder:
    """A batch of growing rows of one adapter."""

    def __init__(
        self,
        config: ModelConfig,
        adapter: int | None,
        seeds: list[int],
        device: str,
        dtype: torch.dtype,
        capacity: int = 64,
    ):
        self.config, self.adapter = config, adapter
        self.cache = KVCache(config, len(seeds), capacity, device, dtype)
        self.hidden = torch.zeros(len(seeds), config.hidden_size, device=device, dtype=dtype)
        self.streams = Streams(seeds)

    @property
    def rows(self) -> int:
        """Rows in the batch."""
        return len(self.streams)

    def room(self) -> int:
        """Tokens that the longest row can still take before the model's last position."""
        return self.config.max_position_embeddings - self.cache.longest

    @torch.inference_mode()
    def keep(self, rows: list[int]) -> None:
        """Drop all other rows for good; the kept ones are renumbered in the given order."""
        if rows == list(range(self.rows)):
            return
        self.select(torch.tensor(rows, dtype=torch.long, device=self.hidden.device))
        self.streams.keep(rows)

    @torch.inference_mode()
    def select(self, index: Tensor) -> None:
        """Cache and hidden states of these rows in place of all; a row may come several times."""
        self.cache, self.hidden = self.cache.select(index), self.hidden[index]


class Feed:
    """Appending tokens to each row of a decoder (an empty list leaves a row as it is).

    In an empty decoder each different prompt is computed once.
    """

    def __init__(self, decoder: Decoder, tokens: list[list[int]]):
        self.decoder, self.done = decoder, False
        self._origin: list[int] | None = None
        if decoder.cache.longest == 0:
            unique: dict[tuple[int, ...], int] = {}
            origin = [unique.setdefault(tuple(t), len(unique)) for t in tokens]
            if len(unique) < len(tokens):
                tokens, self._origin = [list(t) for t in unique], origin
                decoder.select(torch.arange(len(unique), device=decoder.hidden.device))
        device = decoder.hidden.device
        self._counts = torch.tensor([len(t) for t in tokens], device=device)
        self._ids = _pad(tokens).to(device)

    @property
    def rows(self) -> int:
        """Rows that the next step works on."""
        return len(self._ids)

    def chunk(self) -> Chunk:
        """What goes through the model next."""
        return Chunk(self._ids, self._counts, self.decoder.cache)

    def take(self, hidden: Tensor) -> None:
        """The states after it, [rows, d]."""
        decoder = self.decoder
        decoder.hidden = torch.where((self._counts > 0)[:, None], hidden, decoder.hidden)
        if self._origin is not None:
            decoder.select(torch.tensor(self._origin, device=hidden.device))
        self.done = True


class Turn:
    """Sampling each row of a decoder until it stops.

    Rows that have stopped give up their place: the working batch is narrowed whenever half of it
    has, and put back in order at the end.
    """

    def __init__(self, decoder: Decoder, params: SamplingParams):
        self.decoder, self.params = decoder, params
        self.samples = [Sample() for _ in range(decoder.rows)]
        self.budget = min(params.max_tokens, decoder.room())
        self._draws = decoder.streams.draw(params.max_tokens)
        self._seats = list(range(decoder.rows))  # which row sits where in the working batch
        self._live = set(self._seats) if self.budget > 0 else set()
        self._narrowed: list[tuple[KVCache, Tensor, list[int]]] = []
        self._step = 0
        self._ids: list[int] = []
        self._counts = torch.empty(0)

    @property
    def done(self) -> bool:
        """All rows have stopped."""
        return not self._live and not self._ids

    @property
    def rows(self) -> int:
        """Rows that the next step works on."""
        return len(self._seats)

    @property
    def drawn(self) -> bool:
        """Tokens were drawn that have not gone through the model yet."""
        return bool(self._ids)

    @property
    def uniform(self) -> np.ndarray:
        """One number in [0, 1) for each row of the working batch: what the next draw is by."""
        return self._draws[self._seats, self._step]

    def put(self, tokens: list[int], logprobs: list[float]) -> None:
        """The tokens drawn for the working batch, and their log-probabilities."""
        live = self._live
        self._counts = torch.tensor([int(who in live) for who in self._seats])
        self._step += 1
        for who, token, logprob in zip(self._seats, tokens, logprobs):
            if who not in live:
                continue
            sample = self.samples[who]
            sample.tokens.append(token)
            sample.logprobs.append(logprob)
            if token in self.params.stop:
                sample.stop_reason = "stop"
                live.remove(who)
        if self._step == self.budget:
            live.clear()
        self._ids = tokens

    def chunk(self) -> Chunk:
        """What goes through the model next: the tokens drawn, of rows that were still going."""
        device = self.decoder.hidden.device
        ids = torch.tensor(self._ids, device=device)[:, None]
        return Chunk(ids, self._counts.to(device), self.decoder.cache)

    def take(self, hidden: Tensor) -> None:
        """The states after it, [rows of the working batch, d]."""
        decoder, self._ids = self.decoder, []
        counts = self._counts.to(hidden.device)
        decoder.hidden = torch.where((counts > 0)[:, None], hidden, decoder.hidden)
        if not self._live:
            self._widen()
        elif len(self._live) <= len(self._seats) // 2:
            self._narrow()

    def _narrow(self) -> None:
        decoder = self.decoder
        self._narrowed.append((decoder.cache, decoder.hidden, self._seats))
        stay = [seat for seat, who in enumerate(self._seats) if who in self._live]
        decoder.select(torch.tensor(stay, device=decoder.hidden.device))
        self._seats = [self._seats[seat] for seat in stay]

    def _widen(self) -> None:
        """Put the rows of the working batch back into the wider ones it was narrowed from."""
        decoder = self.decoder
        for cache, hidden, wider in reversed(self._narrowed):
            index = torch.tensor([wider.index(w) for w in self._seats], device=hidden.device)
            cache.put_back(index, decoder.cache)
            decoder.cache = cache
            decoder.hidden = hidden.index_copy(0, index, decoder.hidden)
            self._seats = wider
        self._narrowed = []


def draw(turns: Sequence[Turn], head: Tensor) -> None:
    """One token for every row of all turns. head: [V, d]."""
    by_shape: dict[tuple[float, float, int], list[Turn]] = {}
    for turn in turns:
        by_shape.setdefault(turn.params.shape, []).append(turn)
    for alike in by_shape.values():
        states = [turn.decoder.hidden for turn in alike]
        uniform = np.concatenate([turn.uniform for turn in alike])
        hidden = states[0] if len(states) == 1 else torch.cat(states)
        tokens, logprobs = _draw(F.linear(hidden, head).float(), alike[0].params, uniform)
        at = 0
        for turn, rows in zip(alike, states):
            turn.put(tokens[at : at + len(rows)], logprobs[at : at + len(rows)])
            at += len(rows)


def _draw(
    logits: Tensor, params: SamplingParams, uniform: np.ndarray
) -> tuple[list[int], list[float]]:
    """One token a row by inverse transform, and its log-probability at temperature 1."""
    model = logits.softmax(dim=-1)
    if params.temperature == 0:
        chosen = logits.argmax(dim=-1, keepdim=True)
    else:
        drawn = model
        if params.shape != (1.0, 1.0, -1):
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
