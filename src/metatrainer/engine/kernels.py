"""The GPU kernels, in Triton: attention over a cache for decoding, fused steps for training.

Each token says which slot of the cache is its own and at which position it stands, so rows of any
length share a launch and nothing is padded. Importing this needs Triton, which CUDA builds of torch
bring. Knows nothing about models beyond their head counts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_QUERIES = 16
"""Query heads of one key-value head are padded to as many: what a matrix unit takes at least."""
_BLOCK = 64
"""Keys that are read at a time."""


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, slot, position, queries, keys, values, stride_slot, stride_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, W)
    real = d < D
    row = qkv + token * (H + 2 * G) * D + head * D
    x = tl.load(row + d, mask=real)
    at = tl.load(position + token)
    if head < H + G:
        other = tl.load(row + (d + D // 2) % D)
        c, s = tl.load(cos + at * D + d, mask=real), tl.load(sin + at * D + d, mask=real)
        x = (x.to(tl.float32) * c.to(tl.float32) + other.to(tl.float32) * s.to(tl.float32)).to(
            x.dtype
        )
    if head < H:
        tl.store(queries + token * H * D + head * D + d, x, mask=real)
    else:
        place = tl.load(slot + token).to(tl.int64) * stride_slot + at.to(tl.int64) * D + d
        if head < H + G:
            tl.store(keys + place + (head - H) * stride_head, x, mask=real)
        else:
            tl.store(values + place + (head - H - G) * stride_head, x, mask=real)


@triton.jit
def _attend(
    queries, keys, values, slot, position, out, scale, window, stride_slot, stride_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    M: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    token, group = tl.program_id(0), tl.program_id(1)
    rep: tl.constexpr = H // G
    m, d = tl.arange(0, M), tl.arange(0, W)
    real = d < D
    mine = (m < rep)[:, None] & real[None, :]
    place = token * H * D + (group * rep + m)[:, None] * D + d[None, :]
    q = tl.load(queries + place, mask=mine, other=0.0)
    n = tl.load(position + token) + 1
    base = tl.load(slot + token).to(tl.int64) * stride_slot + group * stride_head
    top = tl.full((M,), float("-inf"), tl.float32)
    total = tl.zeros((M,), tl.float32)
    mixed = tl.zeros((M, W), tl.float32)
    first = tl.maximum(n - window, 0)
    for start in range(first // B * B, n, B):
        t = start + tl.arange(0, B)
        known = (t < n) & (t >= first)
        there = known[None, :] & real[:, None]
        k = tl.load(keys + base + t[None, :] * D + d[:, None], mask=there, other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        score = tl.where(known[None, :], score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - new_top[:, None])
        shrink = tl.exp(top - new_top)
        there = known[:, None] & real[None, :]
        v = tl.load(values + base + t[:, None] * D + d[None, :], mask=there, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        top = new_top
    tl.store(out + place, (mixed / total[:, None]).to(q.dtype), mask=mine)


@triton.jit
def _gate(gate_up, out, F: tl.constexpr, B: tl.constexpr):
    token, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    inside = f < F
    gate = tl.load(gate_up + token * 2 * F + f, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * 2 * F + F + f, mask=inside).to(tl.float32)
    mixed = gate * tl.sigmoid(gate) * up
    tl.store(out + token * F + f, mixed.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_back(gate_up, given, out, F: tl.constexpr, B: tl.constexpr):
    token, f = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    inside = f < F
    gate = tl.load(gate_up + token * 2 * F + f, mask=inside).to(tl.float32)
    up = tl.load(gate_up + token * 2 * F + F + f, mask=inside).to(tl.float32)
    g = tl.load(given + token * F + f, mask=inside).to(tl.float32)
    s = tl.sigmoid(gate)
    kind = out.dtype.element_ty
    d_gate = g * up * s * (1 + gate * (1 - s))
    tl.store(out + token * 2 * F + f, d_gate.to(kind), mask=inside)
    tl.store(out + token * 2 * F + F + f, (g * gate * s).to(kind), mask=inside)


@triton.jit
def _move(
    here, away, row, at, n, head, d, c, s,
    first: tl.constexpr, count: tl.constexpr, D: tl.constexpr,
    turn: tl.constexpr, back: tl.constexpr,
):  # fmt: skip
    """Heads first.. of a token to their own tensor, or back; rotated, or back, where `turn`."""
    inside = (head >= first) & (head < first + count) & (d < D)
    there = away + ((row * count + head - first) * n + at) * D
    source = there if back else here
    x = tl.load(source + d, mask=inside)
    if turn:
        other = tl.load(source + (d + D // 2) % D, mask=inside).to(tl.float32)
        x = (x.to(tl.float32) * c + other * (-s if back else s)).to(x.dtype)
    tl.store((here if back else there) + d, x, mask=inside)


@triton.jit
def _split(
    qkv, cos, sin, position, queries, keys, values, n,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
    P: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    row, at = token // n, token % n
    head, d = tl.arange(0, P)[:, None], tl.arange(0, W)[None, :]
    p = tl.load(position + token)
    c = tl.load(cos + p * D + d, mask=d < D).to(tl.float32)
    s = tl.load(sin + p * D + d, mask=d < D).to(tl.float32)
    here = qkv + token * (H + 2 * G) * D + head * D
    _move(here, queries, row, at, n, head, d, c, s, 0, H, D, True, BACK)
    _move(here, keys, row, at, n, head, d, c, s, H, G, D, True, BACK)
    _move(here, values, row, at, n, head, d, c, s, H + G, G, D, False, BACK)


def _wide(dim: int) -> int:
    """A head's width as Triton takes it: a power of two, and no less than a matrix unit's."""
    return max(16, triton.next_power_of_2(dim))


def attention(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    slot: Tensor,
    position: Tensor,
    cache: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Store new tokens' keys and values, then let each look at its slot up to itself.

    qkv [M, (H + 2G) D] before rotation; rotation: cos, sin [T, D], the sign folded into sin; slot,
    position [M]; cache: keys, values [S, G, T, D] of one layer; heads (H, G); scale: of the scores,
    None is 1 / sqrt(D); window: how many tokens, itself included, it looks back. Returns [M, H D].
    """
    h, g = heads
    (cos, sin), (keys, values) = rotation, cache
    m, dim = qkv.shape[0], keys.shape[3]
    queries = qkv.new_empty(m, h * dim)
    strides = keys.stride(0), keys.stride(1)
    _rotate_and_store[(m, h + 2 * g)](
        qkv, cos, sin, slot, position, queries, keys, values, *strides,
        H=h, G=g, D=dim, W=_wide(dim), num_warps=1,
    )  # fmt: skip
    out = torch.empty_like(queries)
    _attend[(m, g)](
        queries, keys, values, slot, position, out, scale or dim**-0.5, window or 1 << 30, *strides,
        H=h, G=g, D=dim, W=_wide(dim), M=_QUERIES, B=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [M, 2f] -> [M, f]; differentiable."""
    out: Tensor = _Gated.apply(gate_up)
    return out


def split_heads(
    qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor, shape: tuple[int, int, int, int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [B, H, N, D], rotated keys and plain values [B, G, N, D]; differentiable.

    qkv [B N, (H + 2G) D]; position [B N]; cos, sin [T, D], the sign folded into sin; shape
    (B, N, H, G, D).
    """
    heads: tuple[Tensor, Tensor, Tensor] = _SplitHeads.apply(qkv, cos, sin, position, shape)
    return heads


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.contiguous()
        m, f = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(m, f)
        _gate[(m, triton.cdiv(f, 1024))](gate_up, out, F=f, B=1024, num_warps=4)
        ctx.save_for_backward(gate_up)
        return out

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        out, f = torch.empty_like(gate_up), gate_up.shape[1] // 2
        grid = gate_up.shape[0], triton.cdiv(f, 1024)
        _gate_back[grid](gate_up, given[0].contiguous(), out, F=f, B=1024, num_warps=4)
        return out


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, position: Tensor, shape: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        b, n, h, g, dim = shape
        qkv = qkv.contiguous()
        outs = tuple(qkv.new_empty(b, heads, n, dim) for heads in (h, g, g))
        sizes = {"H": h, "G": g, "D": dim, "W": _wide(dim), "P": triton.next_power_of_2(h + 2 * g)}
        _split[(b * n,)](qkv, cos, sin, position, *outs, n, **sizes, BACK=False)
        ctx.save_for_backward(cos, sin, position)
        ctx.shape = shape
        return outs[0], outs[1], outs[2]

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None, None, None]:
        b, n, h, g, dim = ctx.shape
        out = given[0].new_empty(b * n, (h + 2 * g) * dim)
        grads = [each.contiguous() for each in given]
        sizes = {"H": h, "G": g, "D": dim, "W": _wide(dim), "P": triton.next_power_of_2(h + 2 * g)}
        _split[(b * n,)](out, *ctx.saved_tensors, *grads, n, **sizes, BACK=True)
        return out, None, None, None, None
