"""Decoding on a GPU: rows live in slots of one cache, steps are replayed CUDA graphs.

The same pieces of work as engine.decode's, with nothing of a step on the host: positions, draws,
stop tests and log-probabilities are computed where the model is, and the host looks once in
STRIDE steps. A step's rows are laid out as J adapters of C rows each, so that all low-rank
products of a projection are two batched ones.

Knows nothing about chat formats, rewards or whose rows they are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metatrainer.engine import kernels, model
from metatrainer.engine.decode import Sample, SamplingParams, Streams
from metatrainer.engine.lora import FUSED, Adapter
from metatrainer.engine.model import ModelConfig, Plain, Project, Rope, Weights
from metatrainer.engine.project import Seating, fused, product

STRIDE = 16
"""Decoding steps between two looks of the host at who has stopped."""
STOPS = 8
"""Stop tokens that a row may have."""
_TOKENS = 65536
"""Padded tokens of prompts that are computed in one pass."""
_GROW = 256
_NOTHING = torch.empty(0)


class SlotCache:
    """Keys and values of S slots, [L, S + 1, G, T, D]; the last slot is nobody's."""

    def __init__(self, config: ModelConfig, device: str, dtype: torch.dtype):
        self.config, self.device, self.dtype = config, device, dtype
        self.slots, self.room = 0, 0
        self.keys = self.values = self.hidden = self.length = _NOTHING
        self._free: list[int] = []
        self._lock = threading.Lock()  # decoders end in the threads of their jobs

    def take(self, n: int) -> list[int]:
        """n empty slots; the cache grows where it has to."""
        with self._lock:
            missing = n - len(self._free)
        if missing > 0:
            self._allocate(max(self.slots + missing, self.slots * 5 // 4), self.room or _GROW)
        with self._lock:
            self._free.sort()  # the lowest first, so that the end can be cut off
            taken, self._free[:n] = self._free[:n], []
        return taken

    def give_back(self, slots: Sequence[int]) -> None:
        """Slots that are nobody's any more."""
        with self._lock:
            self._free += slots

    def reserve(self, tokens: int) -> None:
        """Room for rows of so many tokens."""
        if tokens > self.room:
            whole = -(-tokens // _GROW) * _GROW
            self._allocate(0, min(whole, self.config.max_position_embeddings + 1))

    def _allocate(self, slots: int, room: int) -> None:
        """Make the cache anew, with at least so many slots; rows that are somebody's keep theirs.

        Slots that are nobody's may go: a cache that holds many short rows becomes one that holds
        few long ones. Raises OutOfMemoryError; the cache is as before then, or empty.
        """
        c = self.config
        with self._lock:
            free = set(self._free)
            kept = max((s for s in range(self.slots) if s not in free), default=-1) + 1
            slots = max(slots, kept)
            if not kept:  # free the old one first
                self.keys = self.values = self.hidden = self.length = _NOTHING
                self.slots, self.room, self._free = 0, 0, []
        shape = (c.num_hidden_layers, slots + 1, c.num_key_value_heads, room, c.head_dim)
        keys = torch.zeros(shape, device=self.device, dtype=self.dtype)
        values = torch.zeros_like(keys)
        hidden = torch.zeros(slots + 1, c.hidden_size, device=self.device, dtype=self.dtype)
        length = torch.zeros(slots + 1, dtype=torch.int32, device=self.device)
        if kept:
            width = min(room, self.room)
            keys[:, :kept, :, :width] = self.keys[:, :kept, :, :width]
            values[:, :kept, :, :width] = self.values[:, :kept, :, :width]
            hidden[:kept], length[:kept] = self.hidden[:kept], self.length[:kept]
        self.keys, self.values, self.hidden, self.length = keys, values, hidden, length
        with self._lock:
            self._free = [s for s in self._free if s < slots] + list(range(self.slots, slots))
            self.slots, self.room = slots, room


class SlotDecoder:
    """A batch of growing rows of one adapter, each in a slot."""

    def __init__(self, cache: SlotCache, adapter: int | None, seeds: list[int]):
        self.cache, self.adapter = cache, adapter
        self.slots: list[int] = []
        """Taken with the first tokens."""
        self.lengths = [0] * len(seeds)
        self.streams = Streams(seeds)

    @property
    def rows(self) -> int:
        """Rows in the batch."""
        return len(self.streams)

    def room(self) -> int:
        """Tokens that the longest row can still take before the model's last position."""
        return self.cache.config.max_position_embeddings - max(self.lengths, default=0)

    def keep(self, rows: list[int]) -> None:
        """Drop all other rows for good; the kept ones are renumbered in the given order."""
        kept = set(rows)
        self.cache.give_back([s for i, s in enumerate(self.slots) if i not in kept])
        self.slots = [self.slots[i] for i in rows]
        self.lengths = [self.lengths[i] for i in rows]
        self.streams.keep(rows)

    def __del__(self) -> None:
        self.cache.give_back(self.slots)


class SlotFeed:
    """Appending tokens to each row of a decoder (an empty list leaves a row as it is)."""

    def __init__(self, decoder: SlotDecoder, tokens: list[list[int]]):
        self.decoder, self.tokens, self.done = decoder, tokens, False
        self.longest = max(n + len(t) for n, t in zip(decoder.lengths, tokens))

    @property
    def rows(self) -> int:
        return len(self.tokens)

    @property
    def fresh(self) -> bool:
        """The rows are empty: equal prompts are computed once."""
        return not any(self.decoder.lengths)

    @property
    def room(self) -> int:
        """Tokens that its longest row needs room for."""
        return self.longest + 1

    def begin(self) -> None:
        """Give the rows their slots."""
        if not self.decoder.slots:
            self.decoder.slots = self.decoder.cache.take(self.decoder.rows)

    def finish(self) -> None:
        """The tokens are in the cache."""
        decoder = self.decoder
        decoder.lengths = [n + len(t) for n, t in zip(decoder.lengths, self.tokens)]
        self.done = True


class SlotTurn:
    """Sampling each row of a decoder until it stops."""

    def __init__(self, decoder: SlotDecoder, params: SamplingParams):
        if len(params.stop) > STOPS:
            raise ValueError(f"{len(params.stop)} stop tokens; at most {STOPS} on a GPU")
        self.decoder, self.params = decoder, params
        self.samples = [Sample() for _ in range(decoder.rows)]
        self.budget = max(0, min(params.max_tokens, decoder.room()))
        self.live = list(range(decoder.rows)) if self.budget else []
        self.step = 0
        self._draws = decoder.streams.draw(params.max_tokens)

    @property
    def rows(self) -> int:
        return len(self.live)

    @property
    def done(self) -> bool:
        """All rows have stopped."""
        return not self.live

    @property
    def room(self) -> int:
        """Tokens that its longest row needs room for."""
        return max(self.decoder.lengths) + self.budget - self.step + 1

    def draws(self, rows: list[int]) -> np.ndarray:
        """The next numbers of some rows, [rows, up to STRIDE]."""
        return self._draws[rows, self.step : self.step + STRIDE]

    def put(self, rows: list[int], tokens: np.ndarray, logprobs: np.ndarray) -> None:
        """What STRIDE steps drew for some rows, [rows, STRIDE]; -1 where a row had stopped."""
        counts = (tokens >= 0).sum(axis=1)
        self.step += STRIDE
        for row, count, drawn, measured in zip(rows, counts.tolist(), tokens, logprobs):
            if not count:
                continue
            sample = self.samples[row]
            sample.tokens += drawn[:count].tolist()
            sample.logprobs += measured[:count].tolist()
            self.decoder.lengths[row] += count
            if sample.tokens[-1] in self.params.stop:
                sample.stop_reason = "stop"
        self.live = [
            row
            for row in self.live
            if self.samples[row].stop_reason != "stop" and self.step < self.budget
        ]


SlotWork = SlotFeed | SlotTurn


@dataclass(frozen=True)
class _Block:
    """Rows of one turn, side by side in a step's batch."""

    turn: SlotTurn
    rows: list[int]
    start: int


@dataclass(frozen=True)
class _Shape:
    """What a graph is captured for."""

    adapters: int
    rows: int
    """Of one adapter."""
    rank: int
    plain: bool
    """All rows at temperature 1, from the whole vocabulary."""
    filtered: bool


class SlotEngine:
    """Advances slot work on one base model."""

    def __init__(
        self,
        config: ModelConfig,
        base: Weights,
        rope: Rope,
        project: Callable[[list[tuple[int | None, int]]], Project],
        adapter: Callable[[int], Adapter],
    ):
        """project: of parts (adapter, tokens), without gradients. adapter: by its number."""
        self.config, self.base, self.rope = config, base, rope
        self.plain = Plain(base)
        self._project, self._adapter = project, adapter
        device, dtype = str(base.embed.device), base.embed.dtype
        self.cache = SlotCache(config, device, dtype)
        self._steps: dict[_Shape, _Step] = {}
        self._seated: tuple[_Step, list[_Block]] | None = None

    def decoder(self, adapter: int | None, seeds: list[int]) -> SlotDecoder:
        """See Engine.decoder."""
        return SlotDecoder(self.cache, adapter, seeds)

    def feed(self, decoder: SlotDecoder, tokens: list[list[int]]) -> SlotFeed:
        """See Engine.feeding."""
        return SlotFeed(decoder, tokens)

    def turn(self, decoder: SlotDecoder, params: SamplingParams) -> SlotTurn:
        """See Engine.turn."""
        return SlotTurn(decoder, params)

    @torch.inference_mode()
    def advance(self, works: Sequence[SlotWork]) -> None:
        """Finish all feeds; move all turns by up to STRIDE tokens."""
        feeds = [work for work in works if isinstance(work, SlotFeed)]
        turns = [work for work in works if isinstance(work, SlotTurn) and not work.done]
        before = self.cache.keys
        for feed in feeds:
            feed.begin()
        self.cache.reserve(max([0, *(f.room for f in feeds), *(t.room for t in turns)]))
        if self.cache.keys is not before:  # the graphs know the old one
            self._steps, self._seated = {}, None
        if fresh := [feed for feed in feeds if feed.fresh]:
            self._read_prompts(fresh)
        if later := [feed for feed in feeds if not feed.fresh]:
            self._read_more(later)
        for feed in feeds:
            feed.finish()
        if turns:
            self._sample(turns)

    # Feeding

    def _read_prompts(self, feeds: list[SlotFeed]) -> None:
        """Compute each different prompt of an adapter once, for all rows that have it."""
        rows: dict[tuple[int | None, tuple[int, ...]], list[int]] = {}
        for feed in feeds:
            for slot, tokens in zip(feed.decoder.slots, feed.tokens):
                if tokens:
                    rows.setdefault((feed.decoder.adapter, tuple(tokens)), []).append(slot)
        order = sorted(rows, key=lambda key: (-1 if key[0] is None else key[0], len(key[1])))
        width = max(len(tokens) for _, tokens in order)
        size = max(1, _TOKENS // width)
        for start in range(0, len(order), size):
            self._read_some(order[start : start + size], rows)

    def _read_some(
        self,
        prompts: list[tuple[int | None, tuple[int, ...]]],
        rows: dict[tuple[int | None, tuple[int, ...]], list[int]],
    ) -> None:
        cache = self.cache
        width = max(len(tokens) for _, tokens in prompts)
        padded = [list(tokens) + [0] * (width - len(tokens)) for _, tokens in prompts]
        ids = torch.tensor(padded, device=cache.device)
        parts: list[tuple[int | None, int]] = []
        for adapter, _ in prompts:
            same = bool(parts) and parts[-1][0] == adapter
            if same:
                parts[-1] = (adapter, parts[-1][1] + width)
            else:
                parts.append((adapter, width))
        hidden, keys, values = model.forward(
            self.config, self.base, self._project(parts), self.rope, ids
        )
        slots = [slot for prompt in prompts for slot in rows[prompt]]
        origin = [i for i, prompt in enumerate(prompts) for _ in rows[prompt]]
        lengths = [len(prompts[i][1]) for i in origin]
        to = torch.tensor(slots, device=cache.device)
        source = torch.tensor(origin, device=cache.device)
        length = torch.tensor(lengths, device=cache.device)
        for layer, (k, v) in enumerate(zip(keys, values)):
            cache.keys[layer, to, :, :width] = k[source]
            cache.values[layer, to, :, :width] = v[source]
        cache.hidden[to] = hidden[source, length - 1]
        cache.length[to] = length.int()

    def _read_more(self, feeds: list[SlotFeed]) -> None:
        """All new tokens of all rows in one pass, each with its own slot and position."""
        cache, parts = self.cache, []
        ids: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        lasts: list[tuple[int, int, int]] = []
        for feed in feeds:
            before, decoder = len(ids), feed.decoder
            for slot, known, tokens in zip(decoder.slots, decoder.lengths, feed.tokens):
                ids += tokens
                slots += [slot] * len(tokens)
                positions += range(known, known + len(tokens))
                if tokens:
                    lasts.append((slot, len(ids) - 1, known + len(tokens)))
            parts.append((decoder.adapter, len(ids) - before))
        if not ids:
            return
        device = cache.device
        hidden = self._model(
            torch.tensor(ids, device=device),
            torch.tensor(slots, device=device),
            torch.tensor(positions, device=device),
            self._project([part for part in parts if part[1]]),
        )
        to, at, length = (torch.tensor(each, device=device) for each in zip(*lasts))
        cache.hidden[to] = hidden[at]
        cache.length[to] = length.int()

    # Sampling

    def _sample(self, turns: list[SlotTurn]) -> None:
        step, blocks = self._seat(turns)
        draws = np.zeros((step.rows, STRIDE))
        for block in blocks:
            found = block.turn.draws(block.rows)
            draws[block.start : block.start + len(block.rows), : found.shape[1]] = found
        tokens, logprobs = step.run(draws)
        for block in blocks:
            at = slice(block.start, block.start + len(block.rows))
            block.turn.put(block.rows, tokens[at], logprobs[at])

    def _seat(self, turns: list[SlotTurn]) -> tuple[_Step, list[_Block]]:
        """Where each row sits; as before while the turns are and most of their rows go on."""
        if self._seated is not None:
            step, blocks = self._seated
            same = [block.turn for block in blocks] == turns
            if same and 2 * sum(t.rows for t in turns) > sum(len(b.rows) for b in blocks):
                return step, blocks
        by_adapter: dict[int | None, list[SlotTurn]] = {}
        for turn in turns:
            by_adapter.setdefault(turn.decoder.adapter, []).append(turn)
        adapters = [None if a is None else self._adapter(a) for a in by_adapter]
        shape = _Shape(
            adapters=_bucket(len(by_adapter)),
            rows=_bucket(max(sum(t.rows for t in each) for each in by_adapter.values())),
            rank=max((a.rank for a in adapters if a), default=0),
            plain=all(t.params.shape == (1.0, 1.0, -1) for t in turns),
            filtered=any(t.params.top_k > 0 or t.params.top_p < 1 for t in turns),
        )
        if shape not in self._steps:
            self._steps[shape] = _Step(self, shape)
        blocks = []
        for j, each in enumerate(by_adapter.values()):
            start = j * shape.rows
            for turn in each:
                blocks.append(_Block(turn, list(turn.live), start))
                start += turn.rows
        blocks.sort(key=lambda block: turns.index(block.turn))
        self._steps[shape].seat(blocks, adapters)
        self._seated = self._steps[shape], blocks
        return self._seated

    def _model(self, ids: Tensor, slot: Tensor, position: Tensor, project: Project) -> Tensor:
        """States [M, d] of new tokens after the last norm; their keys and values are stored."""
        config, base, cache = self.config, self.base, self.cache
        heads = config.num_attention_heads, config.num_key_value_heads
        x = model.embed(config, base, ids)
        for i in range(config.num_hidden_layers):
            local = config.is_local(i)
            qkv = project("qkv", i, model.norm(config, x, base.attn_norm[i]))
            mixed = kernels.attention(
                model.before_rotation(config, base, i, qkv),
                self.rope.tables(local),
                slot,
                position,
                (cache.keys[i], cache.values[i]),
                heads,
                config.query_scale,
                config.window if local else None,
            )
            x = model.add(config, x, project("o", i, mixed), base.attn_post, i)
            x = model.feed_forward(config, base, project, i, x)
        return model.norm(config, x, base.norm)


class _Step:
    """One decoding step for J adapters of C rows, captured as a graph."""

    def __init__(self, engine: SlotEngine, shape: _Shape):
        self._engine, self._shape = engine, shape
        cache, r = engine.cache, shape.adapters * shape.rows
        device = cache.device

        def buffer(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(size, device=device, dtype=dtype)

        self._slot = buffer(r, dtype=torch.int64)
        self._left = buffer(r, dtype=torch.int32)
        self._draws = buffer(r, STRIDE)
        self._temperature = torch.ones(r, device=device)
        self._top_k = buffer(r, dtype=torch.int64)
        self._top_p = torch.ones(r, device=device)
        self._stops = buffer(r, STOPS, dtype=torch.int64) - 1
        self._tokens = buffer(r, STRIDE, dtype=torch.int64)
        self._logprobs = buffer(r, STRIDE)
        self._at = buffer(1, 1, dtype=torch.int64)
        self._bank = _Bank(engine, shape) if shape.rank else None
        self._slot.fill_(cache.slots)
        self._graph = self._capture()

    @property
    def rows(self) -> int:
        """Rows of the batch, empty ones too."""
        return len(self._slot)

    def seat(self, blocks: list[_Block], adapters: list[Adapter | None]) -> None:
        """Say which rows sit where; the rest is nobody."""
        r = self.rows
        slot, left = np.full(r, self._engine.cache.slots), np.zeros(r, np.int32)
        temperature, top_p = np.ones(r, np.float32), np.ones(r, np.float32)
        top_k, stops = np.zeros(r, np.int64), np.full((r, STOPS), -1)
        for block in blocks:
            turn, params = block.turn, block.turn.params
            at = slice(block.start, block.start + len(block.rows))
            slot[at] = [turn.decoder.slots[row] for row in block.rows]
            left[at] = turn.budget - turn.step
            temperature[at], top_p[at] = params.temperature, params.top_p
            top_k[at] = max(0, params.top_k)
            stops[at, : len(params.stop)] = params.stop
        for buffer, values in (
            (self._slot, slot), (self._left, left), (self._temperature, temperature),
            (self._top_k, top_k), (self._top_p, top_p), (self._stops, stops),
        ):  # fmt: skip
            buffer.copy_(torch.from_numpy(values))
        if self._bank:
            self._bank.fill(adapters)

    def run(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """STRIDE steps by numbers in [0, 1), [R, STRIDE].

        Returns tokens (-1: the row had stopped) and log-probabilities, [R, STRIDE] each.
        """
        self._draws.copy_(torch.from_numpy(draws))
        self._at.zero_()
        for _ in range(STRIDE):
            self._graph.replay()
        return self._tokens.cpu().numpy(), self._logprobs.cpu().numpy()

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._body()  # compiles the kernels, and lets libraries allocate what they need
            self._body()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._body()
        return graph

    def _body(self) -> None:
        """Draw a token for every row from its state, push it through the model."""
        engine, cache, slot = self._engine, self._engine.cache, self._slot
        live = self._left > 0
        token, picked = self._draw(F.linear(cache.hidden[slot], engine.base.head))
        at = (self._at % STRIDE).expand(len(slot), 1)
        self._tokens.scatter_(1, at, torch.where(live, token, -1)[:, None])
        self._logprobs.scatter_(1, at, picked[:, None])
        position = cache.length[slot].long().clamp(max=cache.room - 1)
        project: Project = self._bank or engine.plain
        hidden = engine._model(token, slot, position, project)
        cache.hidden[slot] = torch.where(live[:, None], hidden, cache.hidden[slot])
        cache.length[slot] = cache.length[slot] + live.int()
        stopped = (token[:, None] == self._stops).any(dim=1)
        self._left.copy_(torch.where(live & ~stopped, self._left - 1, 0))
        self._at.add_(1)

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """[R] tokens by inverse transform, greedy where the temperature is 0, and their
        log-probabilities at temperature 1."""
        u = self._draws.gather(1, (self._at % STRIDE).expand(self.rows, 1))[:, 0]
        if self._shape.plain:
            return kernels.draw(logits, u)
        cold = self._temperature == 0
        logits = logits.float()
        scaled = logits / torch.where(cold, 1.0, self._temperature)[:, None]
        if self._shape.filtered:
            scaled = self._filter(scaled)
        token = torch.where(cold, logits.argmax(dim=-1), kernels.draw(scaled, u)[0])
        return token, kernels.pick(logits, token)[0]

    def _filter(self, logits: Tensor) -> Tensor:
        """All tokens outside a row's top-k and top-p at minus infinity."""
        ordered, order = logits.sort(dim=-1, descending=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        outside = (rank >= self._top_k[:, None]) & (self._top_k > 0)[:, None]
        ordered = ordered.masked_fill(outside, -torch.inf)
        share = ordered.softmax(dim=-1)
        outside |= share.cumsum(dim=-1) - share >= self._top_p[:, None]
        return logits.masked_fill(outside.scatter(1, order, outside), -torch.inf)


class _Bank:
    """Low-rank pairs of J adapters in fixed places: of each projection A [L, J, in, n r] and
    B [L, J, n r, out], see engine.project.fused."""

    def __init__(self, engine: SlotEngine, shape: _Shape):
        self._base, self._rank = engine.base, shape.rank
        self._seating = Seating(shape.adapters, shape.rows)
        self._filled: list[tuple[Adapter, int] | None] = [None] * shape.adapters
        self._pairs: dict[str, tuple[Tensor, Tensor]] = {}
        for name, modules in FUSED.items():
            layers, out, inner = getattr(self._base, name).shape
            size, n = (layers, shape.adapters), len(modules) * shape.rank
            a = self._base.embed.new_zeros(*size, inner, n)
            self._pairs[name] = a, self._base.embed.new_zeros(*size, n, out)

    def __call__(self, name: str, layer: int, x: Tensor) -> Tensor:
        a, b = self._pairs[name]
        return product(x, getattr(self._base, name)[layer], a[layer], b[layer], self._seating)

    def fill(self, adapters: list[Adapter | None]) -> None:
        """Put adapters in their places, but for those that are there already."""
        # The adapter itself is kept, not its id: that may become another one's.
        keys = [None if adapter is None else (adapter, adapter.version) for adapter in adapters]
        changed = [j for j, key in enumerate(keys) if self._filled[j] != key]
        if not changed:
            return
        self._filled[: len(keys)] = keys
        there = torch.tensor(changed, device=self._base.embed.device)
        for name, (a, b) in self._pairs.items():
            if any(adapters[j] for j in changed):
                low, high = fused([adapters[j] for j in changed], name, self._rank)
                a[:, there], b[:, there] = low.to(a.dtype), high.to(b.dtype)
            else:
                a[:, there], b[:, there] = 0, 0


def _bucket(n: int) -> int:
    """The next power of two, or multiple of 8 or 64: few different graphs, little padding."""
    if n <= 8:
        return 1 << (n - 1).bit_length()
    step = 8 if n <= 64 else 64
    return -(-n // step) * step
