"""A Llama-layout transformer as pure functions of a table of weights.

Reads and writes Hugging Face folders (config.json, model.safetensors). Knows nothing about
adapters, sampling, losses or optimizers: whoever wants an adapter passes weights that contain it.

Shapes: B rows, N tokens of a row, L layers, d hidden size, H query heads, G key/value heads,
D head size, f feed-forward size, V vocabulary.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from metatrainer.errors import ConfigError


@dataclass(frozen=True)
class ModelConfig:
    """The part of a Hugging Face Llama config that the computation depends on."""

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

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read config.json. Raises ConfigError for another architecture."""
        path = folder / "config.json"
        if not path.exists():
            raise ConfigError(f"{folder} is not a model folder: it has no config.json")
        raw = json.loads(path.read_text())
        if raw.get("architectures") != ["LlamaForCausalLM"]:
            raise ConfigError(
                f"{folder}: architecture {raw.get('architectures')} is not supported; "
                "supported: LlamaForCausalLM"
            )
        raw.setdefault("head_dim", raw["hidden_size"] // raw["num_attention_heads"])
        rope = raw.get("rope_parameters") or {}
        raw["rope_theta"] = raw.get("rope_theta", rope.get("rope_theta", 10000.0))
        return cls(**{f.name: raw[f.name] for f in fields(cls) if f.name in raw})

    def to_hf(self) -> dict:
        """The config.json that transformers reads back as the same model."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "dtype": "float32",
            **{f.name: getattr(self, f.name) for f in fields(self)},
        }


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

    def to(self, device: str, dtype: torch.dtype) -> Weights:
        """A copy on another device or in another type; tied weights stay tied."""
        moved = {f.name: getattr(self, f.name).to(device, dtype) for f in fields(self)}
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
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
        frequency = config.rope_theta ** (-half / config.head_dim)
        position = torch.arange(config.max_position_embeddings, device=device).float()
        angle = torch.outer(position, frequency).repeat(1, 2)
        sign = torch.ones(config.head_dim, device=device)
        sign[: config.head_dim // 2] = -1.0
        self.cos = angle.cos().to(dtype)  # [T, D]
        self.sin = (angle.sin() * sign).to(dtype)  # sign folded in: rotation is one roll

    def __call__(self, x: Tensor, position: Tensor) -> Tensor:
        """Rotate x [B, heads, N, D] by positions [N] or [B, N]."""
        cos, sin = self.cos[position], self.sin[position]
        if position.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


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
        before = self.keys[layer][self.of_row], self.values[layer][self.of_row]
        return torch.cat((before[0], k), dim=2), torch.cat((before[1], v), dim=2)

    def mask(self, n: int) -> Tensor:
        """What each of a row's n tokens may look at, [B, 1, N, P + N]."""
        places = torch.arange(self.keys[0].shape[2], device=self.length.device)
        known = (places < self.length[self.of_row, None])[:, None, :].expand(-1, n, -1)
        own = torch.ones(n, n, dtype=torch.bool, device=places.device).tril()
        return torch.cat((known, own.expand(len(known), -1, -1)), dim=2)[:, None]


@dataclass
class Chunk:
    """New tokens for the rows of one cache."""

    ids: Tensor
    """[B, N], each row's tokens on the left."""
    counts: Tensor | None
    """[B] how many of them are real; None: all. The rest is computed and forgotten."""
    cache: KVCache


def _heads(
    config: ModelConfig, rope: Rope, qkv: Tensor, position: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [B, H, N, D], rotated keys and plain values [B, G, N, D]."""
    b, n, _ = qkv.shape
    h, g, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    heads = qkv.view(b, n, h + 2 * g, dim).transpose(1, 2)
    turned = rope(heads[:, : h + g], position)
    return turned[:, :h], turned[:, h:], heads[:, h + g :]


def _norm(config: ModelConfig, x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (config.hidden_size,), weight, config.rms_norm_eps)


def _feed_forward(
    config: ModelConfig, weights: Weights, project: Project, layer: int, x: Tensor
) -> Tensor:
    normed = _norm(config, x, weights.mlp_norm[layer])
    gate, up = project("gate_up", layer, normed).chunk(2, dim=-1)
    return project("down", layer, F.silu(gate) * up)


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
    mask = prefix.mask(n) if prefix else None
    grouped = config.num_attention_heads != config.num_key_value_heads
    x = F.embedding(ids.flatten(), weights.embed)
    keys, values = [], []
    for i in range(config.num_hidden_layers):
        normed = _norm(config, x, weights.attn_norm[i])
        q, k, v = _heads(config, rope, project("qkv", i, normed).view(b, n, -1), position)
        keys.append(k)
        values.append(v)
        if prefix:
            k, v = prefix.extend(i, k, v)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped
        )
        x = x + project("o", i, out.transpose(1, 2).reshape(b * n, -1))
        x = x + _feed_forward(config, weights, project, i, x)
    return _norm(config, x, weights.norm).view(b, n, -1), keys, values


@torch.no_grad()
def extend(
    config: ModelConfig, weights: Weights, project: Project, rope: Rope, chunks: list[Chunk]
) -> list[Tensor]:
    """Feed more tokens of every row through the caches: prefill and decoding alike, in one pass.

    Returns for each chunk the hidden state after each row's last real token, [B, d]; rows with
    count 0 get rubbish.
    """
    grouped = config.num_attention_heads != config.num_key_value_heads
    places = [_Place(config, chunk) for chunk in chunks]
    sizes = [chunk.ids.numel() for chunk in chunks]
    x = F.embedding(torch.cat([chunk.ids.flatten() for chunk in chunks]), weights.embed)
    for i in range(config.num_hidden_layers):
        qkv = project("qkv", i, _norm(config, x, weights.attn_norm[i]))
        outs = []
        for place, part in zip(places, qkv.split(sizes)):
            q, k, v = _heads(config, rope, part.view(*place.shape, -1), place.turn)
            keys, values = place.write(i, k, v)
            out = F.scaled_dot_product_attention(
                q, keys, values, attn_mask=place.mask, enable_gqa=grouped
            )
            outs.append(out.transpose(1, 2).reshape(part.shape[0], -1))
        x = x + project("o", i, outs[0] if len(outs) == 1 else torch.cat(outs))
        x = x + _feed_forward(config, weights, project, i, x)
    lasts = [place.finish(part) for place, part in zip(places, x.split(sizes))]
    return list(_norm(config, torch.cat(lasts), weights.norm).split([len(p) for p in lasts]))


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
        self.mask = (torch.arange(self._width, device=device) <= self._position[:, :, None])[
            :, None
        ]
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


def _hf_names(config: ModelConfig) -> dict[str, list[str]]:
    """For each stacked tensor, the suffixes of the Hugging Face tensors it is made of."""
    return {
        "attn_norm": ["input_layernorm.weight"],
        "qkv": [f"self_attn.{p}_proj.weight" for p in "qkv"],
        "o": ["self_attn.o_proj.weight"],
        "mlp_norm": ["post_attention_layernorm.weight"],
        "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "down": ["mlp.down_proj.weight"],
    }


def load_weights(folder: Path, config: ModelConfig) -> Weights:
    """Read model.safetensors as fp32. Raises ConfigError if it is missing or incomplete."""
    path = folder / "model.safetensors"
    if not path.exists():
        raise ConfigError(f"{folder} has no model.safetensors")
    raw = {name: tensor.float() for name, tensor in load_file(path).items()}
    try:
        embed = raw["model.embed_tokens.weight"]
        stacked = {
            name: torch.stack(
                [
                    torch.cat([raw[f"model.layers.{i}.{part}"] for part in parts])
                    for i in range(config.num_hidden_layers)
                ]
            )
            for name, parts in _hf_names(config).items()
        }
        head = embed if config.tie_word_embeddings else raw["lm_head.weight"]
        return Weights(embed=embed, head=head, norm=raw["model.norm.weight"], **stacked)
    except KeyError as error:
        raise ConfigError(f"{path} lacks the tensor {error}") from None


def save_model(folder: Path, config: ModelConfig, weights: Weights) -> None:
    """Write config.json and model.safetensors so that transformers loads the same model."""
    h, g, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    sizes = {
        "qkv": (h * dim, g * dim, g * dim),
        "gate_up": (config.intermediate_size, config.intermediate_size),
    }
    tensors = {"model.embed_tokens.weight": weights.embed, "model.norm.weight": weights.norm}
    if not config.tie_word_embeddings:
        tensors["lm_head.weight"] = weights.head
    for name, parts in _hf_names(config).items():
        stacked = getattr(weights, name)
        for i in range(config.num_hidden_layers):
            pieces = stacked[i].split(sizes[name]) if name in sizes else (stacked[i],)
            for part, piece in zip(parts, pieces):
                tensors[f"model.layers.{i}.{part}"] = piece
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    (folder / "config.json").write_text(json.dumps(config.to_hf(), indent=2) + "\n")


def init_weights(config: ModelConfig, seed: int, device: str = "cpu") -> Weights:
    """Fresh weights: normal with standard deviation 0.02, output projections scaled by depth."""
    generator = torch.Generator().manual_seed(seed)
    layer_count, d, f = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    heads = config.num_attention_heads + 2 * config.num_key_value_heads
    inner = config.num_attention_heads * config.head_dim

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02 * scale).to(device)

    depth = (2 * layer_count) ** -0.5
    embed = normal(config.vocab_size, d)
    return Weights(
        embed=embed,
        head=embed if config.tie_word_embeddings else normal(config.vocab_size, d),
        norm=torch.ones(d, device=device),
        attn_norm=torch.ones(layer_count, d, device=device),
        qkv=normal(layer_count, heads * config.head_dim, d),
        o=normal(layer_count, d, inner, scale=depth),
        mlp_norm=torch.ones(layer_count, d, device=device),
        gate_up=normal(layer_count, 2 * f, d),
        down=normal(layer_count, d, f, scale=depth),
    )
