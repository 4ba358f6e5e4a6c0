"""Decoder-only transformers of the Llama family as pure functions of a table of weights.

What Llama, Qwen2, Qwen3 and Gemma 3 do differently is data in ModelConfig. Knows nothing about
files (engine.files), adapters, sampling, losses or optimizers: whoever wants an adapter passes
weights that contain it.

Shapes: B rows, N tokens of a row, L layers, d hidden size, H query heads, G key/value heads,
D head size, f feed-forward size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class RopeScaling:
    """How Llama 3.1 and later stretch slow rotations to a longer context."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __call__(self, frequency: Tensor) -> Tensor:
        """Slow frequencies divided by the factor, fast ones kept, those between interpolated."""
        turns = self.original_context * frequency / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


@dataclass(frozen=True)
class ModelConfig:
    """What the computation depends on."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    architecture: str = "LlamaForCausalLM"
    """As Hugging Face names it."""
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    """Queries, keys and values have a bias (Qwen2)."""
    qk_norm: bool = False
    """Queries and keys are normed, head by head, before they are rotated (Qwen3, Gemma 3)."""
    post_norms: bool = False
    """What attention and feed-forward give is normed too before it is added (Gemma 3)."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0
    """Factor of the embeddings (Gemma 3)."""
    query_scale: float | None = None
    """Factor of the attention scores; None: 1 / sqrt(D)."""
    window: int | None = None
    """How many tokens, itself included, a token looks back in local layers (Gemma 3)."""
    local_layers: tuple[bool, ...] = ()
    """Which layers are local; empty: none."""
    local_rope_theta: float = 10000.0

    def is_local(self, layer: int) -> bool:
        """Whether a layer looks back only as far as the window."""
        return bool(self.local_layers) and self.local_layers[layer]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each of the Weights that this model has; a tied head is not counted."""
        n, d, f, v = (
            self.num_hidden_layers,
            self.hidden_size,
            self.intermediate_size,
            self.vocab_size,
        )
        inner = self.num_attention_heads * self.head_dim
        fused = inner + 2 * self.num_key_value_heads * self.head_dim
        per_head = {"q_norm": (n, self.head_dim), "k_norm": (n, self.head_dim)}
        return {
            "embed": (v, d),
            **({} if self.tie_word_embeddings else {"head": (v, d)}),
            "norm": (d,),
            "attn_norm": (n, d),
            "qkv": (n, fused, d),
            "o": (n, d, inner),
            "mlp_norm": (n, d),
            "gate_up": (n, 2 * f, d),
            "down": (n, d, f),
            **({"qkv_bias": (n, fused)} if self.qkv_bias else {}),
            **(per_head if self.qk_norm else {}),
            **({"attn_post": (n, d), "mlp_post": (n, d)} if self.post_norms else {}),
        }

    def parameters(self) -> int:
        """How many numbers the weights are."""
        return sum(math.prod(shape) for shape in self.shapes().values())


@dataclass(frozen=True)
class Weights:
    """All weights of a model; those of the layers are stacked along L."""

    embed: Tensor  # [V, d]
    head: Tensor  # [V, d]; the same tensor as embed where they are tied
    norm: Tensor  # [d]
    attn_norm: Tensor  # [L, d]
    qkv: Tensor  # [L, (H + 2G) D, d]
    o: Tensor  # [L, d, H D]
    mlp_norm: Tensor  # [L, d]
    gate_up: Tensor  # [L, 2f, d]
    down: Tensor  # [L, d, f]
    qkv_bias: Tensor | None = None  # [L, (H + 2G) D]
    q_norm: Tensor | None = None  # [L, D]
    k_norm: Tensor | None = None  # [L, D]
    attn_post: Tensor | None = None  # [L, d]
    mlp_post: Tensor | None = None  # [L, d]

    @property
    def count(self) -> int:
        """Parameters of the model; tied ones count once."""
        there = {id(t): t for f in fields(self) if (t := getattr(self, f.name)) is not None}
        return sum(t.numel() for t in there.values())

    def to(self, device: str, dtype: torch.dtype) -> Weights:
        """A copy on another device or in another type; tied weights stay tied."""
        there = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {name: t.to(device, dtype) for name, t in there.items() if t is not None}
        if self.head is self.embed:
            moved["head"] = moved["embed"]
        return replace(self, **moved)


PROJECTIONS = ("qkv", "o", "gate_up", "down")
"""The matrices of a layer that adapters change."""


class Project(Protocol):
    """Multiplies tokens by a projection of a layer, each by its own row's adapter."""

    def __call__(self, name: str, layer: int, x: Tensor) -> Tensor:
        """x [M, in], all tokens of a batch in order -> [M, out]."""


class Plain:
    """All tokens by the same weights."""

    def __init__(self, weights: Weights):
        self._tables = {name: getattr(weights, name).unbind(0) for name in PROJECTIONS}

    def __call__(self, name: str, layer: int, x: Tensor) -> Tensor:
        return F.linear(x, self._tables[name][layer])


class Rope:
    """Rotary position tables, in the half-split convention of Hugging Face's Llama."""

    def __init__(self, config: ModelConfig, device: str, dtype: torch.dtype):
        self.cos, self.sin = _rotations(config, config.rope_theta, config.rope_scaling, device)
        self.cos, self.sin = self.cos.to(dtype), self.sin.to(dtype)  # [T, D]
        self.local = self.cos, self.sin
        if any(config.local_layers):
            cos, sin = _rotations(config, config.local_rope_theta, None, device)
            self.local = cos.to(dtype), sin.to(dtype)

    def tables(self, local: bool) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [T, D] of a local layer, or of any other."""
        return self.local if local else (self.cos, self.sin)

    def __call__(self, x: Tensor, position: Tensor, local: bool = False) -> Tensor:
        """Rotate x [B, heads, N, D] by positions [N] or [B, N]."""
        cos, sin = (table[position] for table in self.tables(local))
        if position.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def _rotations(
    config: ModelConfig, theta: float, scaling: RopeScaling | None, device: str
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines [T, D]: with the sign folded in, a rotation is one roll."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequency = theta ** (-half / config.head_dim)
    if scaling:
        frequency = scaling(frequency)
    position = torch.arange(config.max_position_embeddings, device=device).float()
    angle = torch.outer(position, frequency).repeat(1, 2)
    sign = torch.ones(config.head_dim, device=device)
    sign[: config.head_dim // 2] = -1.0
    return angle.cos(), angle.sin() * sign


class KVCache:
    """Keys and values of B rows of different lengths.

    keys, values: [L, B, G, T, D]; row b is valid up to `length[b]`. T grows by doubling.
    """

    def __init__(
        self, config: ModelConfig, rows: int, capacity: int, device: str, dtype: torch.dtype
    ):
        shape = (
            config.num_hidden_layers,
            rows,
            config.num_key_value_heads,
            capacity,
            config.head_dim,
        )
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)
        self.length = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more tokens of every row."""
        missing = self.longest + tokens - self.keys.shape[3]
        if missing > 0:
            grow = max(missing, self.keys.shape[3])
            self.keys = F.pad(self.keys, (0, 0, 0, grow))
            self.values = F.pad(self.values, (0, 0, 0, grow))

    def fill(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Give an empty row its first tokens: keys and values [L, G, n, D]."""
        n = keys.shape[2]
        self.reserve(max(0, n - self.longest))
        self.keys[:, row, :, :n] = keys
        self.values[:, row, :, :n] = values
        self.length[row] = n
        self.longest = max(self.longest, n)

    def select(self, rows: Tensor) -> KVCache:
        """A cache of some of the rows (a copy)."""
        part = object.__new__(KVCache)
        part.keys, part.values = self.keys[:, rows], self.values[:, rows]
        part.length = self.length[rows]
        part.longest = int(part.length.max()) if len(rows) else 0
        return part

    def put_back(self, rows: Tensor, part: KVCache) -> None:
        """Write the rows of `part`, made by select, back to their places."""
        self.reserve(max(0, part.longest - self.longest))
        width = min(part.keys.shape[3], self.keys.shape[3])
        self.keys[:, rows, :, :width] = part.keys[:, :, :, :width]
        self.values[:, rows, :, :width] = part.values[:, :, :, :width]
        self.length[rows] = part.length
        self.longest = int(self.length.max())

    def advance(self, counts: Tensor, longest: int) -> None:
        """Declare `counts[b]` more tokens of each row valid."""
        self.length = self.length + counts
        self.longest = longest


@dataclass
class Prefix:
    """Beginnings that rows share, computed once and kept in the autograd graph.

    R different beginnings of up to P tokens, padded on the right.
    """

    keys: list[Tensor]  # for each layer [R, G, P, D]
    values: list[Tensor]  # likewise
    length: Tensor  # [R] tokens of each
    of_row: Tensor  # [B] the beginning of each row

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, P + N, D] of a layer: the rows' beginnings, then their own."""
        before = self.keys[layer], self.values[layer]
        if k.is_cuda:
            from metatrainer.engine import kernels  # needs Triton

            return (
                kernels.put_after(before[0], k, self.of_row, self._by_beginning),
                kernels.put_after(before[1], v, self.of_row, self._by_beginning),
            )
        known = (each[self.of_row] for each in before)
        return tuple(torch.cat(pair, dim=2) for pair in zip(known, (k, v)))

    @cached_property
    def _by_beginning(self) -> tuple[Tensor, Tensor]:
        """Rows in order of their beginning [B], and where each beginning's start [R + 1]."""
        counts = torch.bincount(self.of_row, minlength=len(self.length))
        return self.of_row.argsort(stable=True), F.pad(counts.cumsum(0), (1, 0))

    def mask(self, n: int, window: int | None = None) -> Tensor:
        """What each of a row's n tokens may look at, [B, 1, N, P + N]."""
        length = self.length[self.of_row, None]
        places = torch.arange(self.keys[0].shape[2], device=length.device)
        known = (places < length)[:, None, :].expand(-1, n, -1)
        if window is not None:
            at = length + torch.arange(n, device=length.device)  # [B, N]
            known = known & (places > at[:, :, None] - window)
        own = _band(n, window, length.device)
        return torch.cat((known, own.expand(len(known), -1, -1)), dim=2)[:, None]


@dataclass
class Chunk:
    """New tokens for the rows of one cache."""

    ids: Tensor
    """[B, N], each row's tokens on the left."""
    counts: Tensor | None
    """[B] how many of them are real; None: all. The rest is computed and forgotten."""
    cache: KVCache


def _band(n: int, window: int | None, device: torch.device) -> Tensor:
    """Each of n tokens looks at itself and those before it, at most `window` of them, [N, N]."""
    own = torch.ones(n, n, dtype=torch.bool, device=device).tril()
    return own if window is None else own.triu(1 - window)


def embed(config: ModelConfig, weights: Weights, ids: Tensor) -> Tensor:
    """The embeddings of ids, any shape."""
    x = F.embedding(ids, weights.embed)
    if config.embed_scale == 1.0:
        return x
    return x * torch.tensor(config.embed_scale, dtype=x.dtype).item()  # rounded like the weights


def _heads(
    config: ModelConfig, weights: Weights, rope: Rope, layer: int, qkv: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [B, H, N, D], rotated keys and plain values [B, G, N, D].

    qkv: [B, N, (H + 2G) D] without its bias.
    """
    b, n, _ = qkv.shape
    h, g, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    qkv = before_rotation(config, weights, layer, qkv.flatten(0, 1))
    local = config.is_local(layer)
    if qkv.is_cuda:
        from metatrainer.engine import kernels  # needs Triton

        places = position.expand(b, n).reshape(-1)
        return kernels.split_heads(qkv, *rope.tables(local), places, (b, n, h, g, dim))
    heads = qkv.view(b, n, h + 2 * g, dim).transpose(1, 2)
    turned = rope(heads[:, : h + g], position, local)
    return turned[:, :h], turned[:, h:], heads[:, h + g :]


def before_rotation(config: ModelConfig, weights: Weights, layer: int, qkv: Tensor) -> Tensor:
    """qkv [M, (H + 2G) D] with its bias, queries and keys normed, where the model has such."""
    if weights.qkv_bias is not None:
        qkv = qkv + weights.qkv_bias[layer]
    if weights.q_norm is None or weights.k_norm is None:
        return qkv
    h, g, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    heads = qkv.view(-1, h + 2 * g, dim)
    by_head = torch.cat(
        (weights.q_norm[layer].expand(h, dim), weights.k_norm[layer].expand(g, dim))
    )
    normed = F.rms_norm(heads[:, : h + g], (dim,), None, config.rms_norm_eps) * by_head
    return torch.cat((normed, heads[:, h + g :]), dim=1).flatten(1)


def _attend(config: ModelConfig, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """[B, H, N, D]; without a mask each token looks at all before it."""
    if mask is not None and not q.is_cuda:
        return _attend_by_products(config, q, k, v, mask)
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=config.query_scale,
        enable_gqa=config.num_attention_heads != config.num_key_value_heads,
    )


def _attend_by_products(
    config: ModelConfig, q: Tensor, k: Tensor, v: Tensor, mask: Tensor
) -> Tensor:
    """The same in plain products, all query heads of a key head side by side: on a CPU, for one new
    token or a hundred, 2 (float32) to 12 times (bfloat16) as fast as the library's function."""
    (b, h, n, dim), (g, width) = q.shape, k.shape[1:3]
    scale = config.query_scale or dim**-0.5
    beside = (q * scale).reshape(b, g, h // g * n, dim)
    scores = torch.matmul(beside, k.transpose(2, 3)).view(b, h, n, width)
    share = scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)
    return torch.matmul(share.view(b, g, h // g * n, width), v).view(b, h, n, dim)


def norm(config: ModelConfig, x: Tensor, weight: Tensor) -> Tensor:
    """Root-mean-square norm over the hidden size."""
    return F.rms_norm(x, (config.hidden_size,), weight, config.rms_norm_eps)


def add(config: ModelConfig, x: Tensor, more: Tensor, post: Tensor | None, layer: int) -> Tensor:
    """What attention or feed-forward gives, added to x."""
    return x + (more if post is None else norm(config, more, post[layer]))


def feed_forward(
    config: ModelConfig, weights: Weights, project: Project, layer: int, x: Tensor
) -> Tensor:
    """x [M, d] after the layer's second half."""
    normed = norm(config, x, weights.mlp_norm[layer])
    out = project("down", layer, _gated(config, project("gate_up", layer, normed)))
    return add(config, x, out, weights.mlp_post, layer)


def _gated(config: ModelConfig, gate_up: Tensor) -> Tensor:
    """activation(gate) * up of [M, 2f] -> [M, f]."""
    if gate_up.is_cuda and config.activation == "silu":
        from metatrainer.engine import kernels  # needs Triton

        return kernels.gated(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    gate = F.silu(gate) if config.activation == "silu" else F.gelu(gate, approximate="tanh")
    return gate * up


def forward(
    config: ModelConfig,
    weights: Weights,
    project: Project,
    rope: Rope,
    ids: Tensor,
    prefix: Prefix | None = None,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Hidden states of whole rows, with gradients: for training and scoring.

    ids: [B, N], padded on the right (padding never reaches earlier tokens); with a prefix, what
    follows it. Returns hidden [B, N, d] after the last norm, and each layer's keys and values
    [B, G, N, D] of `ids`.
    """
    b, n = ids.shape
    position = torch.arange(n, device=ids.device)
    if prefix:
        position = prefix.length[prefix.of_row, None] + position
    full = prefix.mask(n) if prefix else None
    near = full
    if config.window is not None and n + (prefix.keys[0].shape[2] if prefix else 0) > config.window:
        window = config.window
        near = prefix.mask(n, window) if prefix else _band(n, window, ids.device)
    x = embed(config, weights, ids.flatten())
    keys, values = [], []
    for i in range(config.num_hidden_layers):
        normed = norm(config, x, weights.attn_norm[i])
        qkv = project("qkv", i, normed).view(b, n, -1)
        q, k, v = _heads(config, weights, rope, i, qkv, position)
        keys.append(k)
        values.append(v)
        if prefix:
            k, v = prefix.extend(i, k, v)
        out = _attend(config, q, k, v, near if config.is_local(i) else full)
        out = project("o", i, out.transpose(1, 2).reshape(b * n, -1))
        x = add(config, x, out, weights.attn_post, i)
        x = feed_forward(config, weights, project, i, x)
    return norm(config, x, weights.norm).view(b, n, -1), keys, values


@torch.no_grad()
def extend(
    config: ModelConfig, weights: Weights, project: Project, rope: Rope, chunks: list[Chunk]
) -> list[Tensor]:
    """Feed more tokens of every row through the caches: prefill and decoding alike, in one pass.

    Returns for each chunk the hidden state after each row's last real token, [B, d]; rows with
    count 0 get rubbish.
    """
    places = [_Place(config, chunk) for chunk in chunks]
    sizes = [chunk.ids.numel() for chunk in chunks]
    x = embed(config, weights, torch.cat([chunk.ids.flatten() for chunk in chunks]))
    for i in range(config.num_hidden_layers):
        fused = project("qkv", i, norm(config, x, weights.attn_norm[i]))
        outs = []
        for place, part in zip(places, fused.split(sizes)):
            qkv = part.view(*place.shape, -1)
            q, k, v = _heads(config, weights, rope, i, qkv, place.turn)
            keys, values = place.write(i, k, v)
            mask = place.near if config.is_local(i) else place.mask
            out = _attend(config, q, keys, values, mask)
            outs.append(out.transpose(1, 2).reshape(part.shape[0], -1))
        more = project("o", i, outs[0] if len(outs) == 1 else torch.cat(outs))
        x = add(config, x, more, weights.attn_post, i)
        x = feed_forward(config, weights, project, i, x)
    lasts = [place.finish(part) for place, part in zip(places, x.split(sizes))]
    return list(norm(config, torch.cat(lasts), weights.norm).split([len(p) for p in lasts]))


class _Place:
    """Where a chunk's tokens go in their cache, and what they may look at."""

    def __init__(self, config: ModelConfig, chunk: Chunk):
        self._chunk, cache = chunk, chunk.cache
        self.shape = b, n = chunk.ids.shape
        device = chunk.ids.device
        cache.reserve(n)
        self._position = cache.length[:, None] + torch.arange(n, device=device)  # [B, N]
        self._longest = cache.longest + n
        if chunk.counts is not None:
            self._longest = int((cache.length + chunk.counts).max())
        self._width = min(cache.longest + n, cache.keys.shape[3])
        places = torch.arange(self._width, device=device)
        self.mask = (places <= self._position[:, :, None])[:, None]  # [B, 1, N, width]
        self.near = self.mask
        if config.window is not None and self._width > config.window:
            self.near = self.mask & (places > self._position[:, None, :, None] - config.window)
        self._row = torch.arange(b, device=device)[:, None]
        # Only padding is past the end.
        self.turn = self._position.clamp(max=config.max_position_embeddings - 1)

    def write(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Put new keys and values in their places; returns all there are, [B, G, width, D]."""
        keys, values = self._chunk.cache.keys[layer], self._chunk.cache.values[layer]
        keys[self._row, :, self._position] = k.transpose(1, 2)
        values[self._row, :, self._position] = v.transpose(1, 2)
        return keys[:, :, : self._width], values[:, :, : self._width]

    def finish(self, x: Tensor) -> Tensor:
        """Declare the tokens valid; x [B N, d] -> what each row's last real token has, [B, d]."""
        cache, counts = self._chunk.cache, self._chunk.counts
        b, n = self.shape
        x = x.view(b, n, -1)
        if counts is None:
            cache.advance(torch.full_like(cache.length, n), self._longest)
            return x[:, -1]
        cache.advance(counts, self._longest)
        return x[self._row[:, 0], (counts - 1).clamp(min=0)]


def init_weights(config: ModelConfig, seed: int, device: str = "cpu") -> Weights:
    """Fresh weights: normal with standard deviation 0.02, output projections scaled by depth."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in config.shapes().items():
        if name.endswith(("norm", "post")):
            made[name] = torch.ones(shape, device=device)
        elif name == "qkv_bias":
            made[name] = torch.zeros(shape, device=device)
        else:
            scale = (2 * config.num_hidden_layers) ** -0.5 if name in ("o", "down") else 1.0
            made[name] = (torch.randn(shape, generator=generator) * 0.02 * scale).to(device)
    made.setdefault("head", made["embed"])
    return Weights(**made)
