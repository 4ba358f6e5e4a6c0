"""The GPU kernels, in Triton: attention over a cache, draws, fused steps for training.

In decoding each token says which slot of the cache is its own and at which position it stands, so
rows of any length share a launch and nothing is padded. Importing this needs Triton, which CUDA
builds of torch bring. Knows nothing about models beyond their head counts.
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
_CHUNK = 1024
"""Tokens of the vocabulary that are summed together before a draw."""
_LOGITS = 4096
"""Tokens of the vocabulary that are read at a time in training."""


@triton.jit
def _rotate_and_store(
    qkv, cos, sin, slot, position, queries, keys, values, stride_slot, stride_head,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, W: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, P)[:, None], tl.arange(0, W)[None, :]
    real = d < D
    at = tl.load(position + token).to(tl.int64)
    row = qkv + token * (H + 2 * G) * D + head * D
    c = tl.load(cos + at * D + d, mask=real).to(tl.float32)
    s = tl.load(sin + at * D + d, mask=real).to(tl.float32)
    x = tl.load(row + d, mask=(head < H + 2 * G) & real)
    other = tl.load(row + (d + D // 2) % D, mask=head < H + G, other=0.0).to(tl.float32)
    x = tl.where(head < H + G, (x.to(tl.float32) * c + other * s).to(x.dtype), x)
    tl.store(queries + token * H * D + head * D + d, x, mask=(head < H) & real)
    place = tl.load(slot + token).to(tl.int64) * stride_slot + at * D + d
    key, value = (head >= H) & (head < H + G), (head >= H + G) & (head < H + 2 * G)
    tl.store(keys + place + (head - H) * stride_head, x, mask=key & real)
    tl.store(values + place + (head - H - G) * stride_head, x, mask=value & real)


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
    here, away, place, stride, head, d, c, s,
    first: tl.constexpr, count: tl.constexpr, D: tl.constexpr,
    turn: tl.constexpr, back: tl.constexpr,
):  # fmt: skip
    """Heads first.. of a token to their own tensor, or back; rotated, or back, where `turn`.

    place: of its first head there; stride: from a head to the next.
    """
    inside = (head >= first) & (head < first + count) & (d < D)
    there = away + place * D + (head - first) * stride * D
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
    place = row * G * n + at
    _move(here, queries, token * H, 1, head, d, c, s, 0, H, D, True, BACK)
    _move(here, keys, place, n, head, d, c, s, H, G, D, True, BACK)
    _move(here, values, place, n, head, d, c, s, H + G, G, D, False, BACK)


@triton.jit
def _sum_chunks(logits, tops, totals, V, C, B: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = chunk * B + tl.arange(0, B)
    x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    weight = tl.where(x > float("-inf"), tl.exp(x - top), 0.0)  # a chunk may be all filtered out
    tl.store(tops + row * C + chunk, top)
    tl.store(totals + row * C + chunk, tl.sum(weight, 0))


@triton.jit
def _draw(logits, tops, totals, uniform, tokens, logprobs, V, C, B: tl.constexpr, P: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.arange(0, P)
    top = tl.load(tops + row * C + chunk, mask=chunk < C, other=float("-inf"))
    highest = tl.max(top, 0)
    weight = tl.load(totals + row * C + chunk, mask=chunk < C, other=0.0) * tl.exp(top - highest)
    total = tl.sum(weight, 0)
    until = tl.cumsum(weight, 0)
    u = tl.load(uniform + row) * total
    last = tl.max(tl.where(weight > 0, chunk, 0), 0)  # rounding may lead past it
    mine = tl.minimum(tl.sum((until <= u).to(tl.int32), 0), last)
    before = tl.sum(tl.where(chunk < mine, weight, 0.0), 0)
    v = mine * B + tl.arange(0, B)
    x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    weight = tl.exp(x - highest)
    last = tl.max(tl.where(weight > 0, tl.arange(0, B), 0), 0)
    place = tl.sum((tl.cumsum(weight, 0) <= u - before).to(tl.int32), 0)
    token = mine * B + tl.minimum(place, last)
    chosen = tl.load(logits + row * V + token).to(tl.float32)
    tl.store(tokens + row, token.to(tl.int64))
    tl.store(logprobs + row, chosen - highest - tl.log(total))


@triton.jit
def _pick(logits, targets, picked, spread, V, B: tl.constexpr):
    row, v = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    top = tl.full((B,), float("-inf"), tl.float32)
    total = tl.zeros((B,), tl.float32)
    for start in range(0, V, B):
        x = tl.load(logits + row * V + start + v, mask=start + v < V, other=float("-inf"))
        x = x.to(tl.float32)
        higher = tl.maximum(top, x)
        shrink = tl.where(top > float("-inf"), tl.exp(top - higher), 0.0)
        total = total * shrink + tl.where(x > float("-inf"), tl.exp(x - higher), 0.0)
        top = higher
    highest = tl.max(top, 0)
    total = tl.where(top > float("-inf"), total * tl.exp(top - highest), 0.0)
    all_ = highest + tl.log(tl.sum(total, 0))
    chosen = tl.load(logits + row * V + tl.load(targets + row)).to(tl.float32)
    tl.store(picked + row, chosen - all_)
    tl.store(spread + row, all_)


@triton.jit
def _pick_back(logits, targets, given, spread, V, B: tl.constexpr):
    row, v = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    slope, all_ = tl.load(given + row), tl.load(spread + row)
    x = tl.load(logits + row * V + v, mask=v < V)
    share = tl.exp(x.to(tl.float32) - all_)
    chosen = (v == tl.load(targets + row)).to(tl.float32)
    tl.store(logits + row * V + v, ((chosen - share) * slope).to(x.dtype), mask=v < V)


@triton.jit
def _put_after(
    before, own, of_row, out, P, N, G,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, d = tl.program_id(2) * T + tl.arange(0, T)[:, None], tl.arange(0, W)[None, :]
    begin = tl.load(of_row + row).to(tl.int64)
    shared, mine = (t < P) & (d < D), (t >= P) & (t < P + N) & (d < D)
    x = tl.load(before + ((begin * G + group) * P + t) * D + d, mask=shared, other=0.0)
    y = tl.load(own + ((row * G + group) * N + t - P) * D + d, mask=mine, other=0.0)
    x = tl.where(t < P, x, y)
    tl.store(out + ((row * G + group) * (P + N) + t) * D + d, x, mask=shared | mine)


@triton.jit
def _sum_before(
    given, order, first, out, P, N, G,
    D: tl.constexpr, W: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    begin, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t, d = tl.program_id(2) * T + tl.arange(0, T)[:, None], tl.arange(0, W)[None, :]
    mine = (t < P) & (d < D)
    total = tl.zeros((T, W), tl.float32)
    for i in range(tl.load(first + begin), tl.load(first + begin + 1)):  # always in this order
        row = tl.load(order + i).to(tl.int64)
        x = tl.load(given + ((row * G + group) * (P + N) + t) * D + d, mask=mine, other=0.0)
        total += x.to(tl.float32)
    place = ((begin * G + group) * P + t) * D + d
    tl.store(out + place, total.to(out.dtype.element_ty), mask=mine)


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
    _rotate_and_store[(m,)](
        qkv, cos, sin, slot, position, queries, keys, values, *strides,
        H=h, G=g, D=dim, W=_wide(dim), P=triton.next_power_of_2(h + 2 * g),
    )  # fmt: skip
    out = torch.empty_like(queries)
    _attend[(m, g)](
        queries, keys, values, slot, position, out, scale or dim**-0.5, window or 1 << 30, *strides,
        H=h, G=g, D=dim, W=_wide(dim), M=_QUERIES, B=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def draw(logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row by inverse transform, and its log-probability, both [R].

    logits [R, V], of any type; -inf is never drawn. uniform [R], in [0, 1). In two levels, chunks
    of the vocabulary and then tokens of one: the logits are read once, and nothing of their size is
    written.
    """
    r, v = logits.shape
    chunks = triton.cdiv(v, _CHUNK)
    tops = torch.empty(r, chunks, device=logits.device, dtype=torch.float32)
    totals = torch.empty_like(tops)
    _sum_chunks[(r, chunks)](logits, tops, totals, v, chunks, B=_CHUNK)
    tokens = torch.empty(r, device=logits.device, dtype=torch.int64)
    logprobs = torch.empty_like(tops[:, 0])
    width = triton.next_power_of_2(chunks)
    _draw[(r,)](logits, tops, totals, uniform, tokens, logprobs, v, chunks, B=_CHUNK, P=width)
    return tokens, logprobs


def pick(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each row's target, and the logarithm of all its weights: [M], float32.

    logits [M, V], of any type; targets [M].
    """
    picked = torch.empty(len(targets), device=logits.device, dtype=torch.float32)
    spread = torch.empty_like(picked)
    _pick[(len(targets),)](logits, targets, picked, spread, logits.shape[1], B=_LOGITS, num_warps=8)
    return picked, spread


def pick_back(logits: Tensor, targets: Tensor, given: Tensor, spread: Tensor) -> None:
    """Turn the logits that `pick` was of into their gradient, in place. given [M]: picked's."""
    v = logits.shape[1]
    grid = len(targets), triton.cdiv(v, _LOGITS)
    _pick_back[grid](logits, targets, given, spread, v, B=_LOGITS, num_warps=8)


def put_after(before: Tensor, own: Tensor, of_row: Tensor, sums: tuple[Tensor, Tensor]) -> Tensor:
    """Rows' beginnings [R, G, P, D], then their own tokens [B, G, N, D]: [B, G, P + N, D].

    of_row [B]: the beginning of each row; sums: of_row's rows in order of their beginning [B], and
    where each beginning's start [R + 1]. Differentiable.
    """
    out: Tensor = _PutAfter.apply(before, own, of_row, sums)
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
    (B, N, H, G, D). Queries lie token by token, so that what attention makes of them does too.
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
        outs = tuple(qkv.new_empty(shape) for shape in ((b, n, h, dim), *[(b, g, n, dim)] * 2))
        sizes = {"H": h, "G": g, "D": dim, "W": _wide(dim), "P": triton.next_power_of_2(h + 2 * g)}
        _split[(b * n,)](qkv, cos, sin, position, *outs, n, **sizes, BACK=False)
        ctx.save_for_backward(cos, sin, position)
        ctx.shape = shape
        return outs[0].transpose(1, 2), outs[1], outs[2]

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None, None, None]:
        b, n, h, g, dim = ctx.shape
        out = given[0].new_empty(b * n, (h + 2 * g) * dim)
        grads = [each.contiguous() for each in (given[0].transpose(1, 2), *given[1:])]
        sizes = {"H": h, "G": g, "D": dim, "W": _wide(dim), "P": triton.next_power_of_2(h + 2 * g)}
        _split[(b * n,)](out, *ctx.saved_tensors, *grads, n, **sizes, BACK=True)
        return out, None, None, None, None


class _PutAfter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, before: Tensor, own: Tensor, of_row: Tensor, sums: tuple[Tensor, Tensor]
    ) -> Tensor:
        (b, g, n, dim), (_, _, p, _) = own.shape, before.shape
        out = own.new_empty(b, g, p + n, dim)
        _put_after[(b, g, triton.cdiv(p + n, _BLOCK))](
            before, own, of_row, out, p, n, g, D=dim, W=_wide(dim), T=_BLOCK
        )
        ctx.save_for_backward(*sums)
        ctx.shape = before.shape
        return out

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (r, g, p, dim), above = ctx.shape, given[0].contiguous()
        before = above.new_empty(ctx.shape)
        n = above.shape[2] - p
        _sum_before[(r, g, triton.cdiv(p, _BLOCK))](
            above, *ctx.saved_tensors, before, p, n, g, D=dim, W=_wide(dim), T=_BLOCK
        )
        return before, above[:, :, p:], None, None
