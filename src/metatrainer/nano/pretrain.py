"""Pretraining of a small causal model on token sequences: AdamW, cosine schedule, one device.

Knows nothing about what the sequences say.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from metatrainer.engine.model import ModelConfig, Plain, Rope, Weights, forward, init_weights
from metatrainer.nano.traces import Trace


@dataclass(frozen=True)
class PretrainSettings:
    """How long and how fast."""

    steps: int
    batch: int
    learning_rate: float
    warmup: int = 100
    weight_decay: float = 0.05
    seed: int = 0


def pretrain(
    config: ModelConfig,
    traces: list[Trace],
    settings: PretrainSettings,
    device: str,
    on_step: Callable[[int, float, float], None] = lambda step, loss, seconds: None,
) -> Weights:
    """A model trained from scratch. on_step gets (step, mean loss of a learnt token, seconds)."""
    torch.manual_seed(settings.seed)
    weights = init_weights(config, settings.seed, device)
    leaves = {name: getattr(weights, name).requires_grad_() for name in config.shapes()}
    weights = replace(weights, **leaves, **({} if "head" in leaves else {"head": leaves["embed"]}))
    optimizer = torch.optim.AdamW(
        [
            {"params": [t for t in leaves.values() if t.dim() > 2]},
            {"params": [t for t in leaves.values() if t.dim() <= 2], "weight_decay": 0.0},
        ],
        lr=settings.learning_rate,
        betas=(0.9, 0.98),
        weight_decay=settings.weight_decay,
        fused=device.startswith("cuda"),
    )
    rope = Rope(config, device, torch.float32)
    batches = _batches(traces, settings, device)
    start = time.monotonic()
    for step in range(settings.steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings)
        ids, learn = next(batches)
        with torch.autocast(device.split(":")[0], torch.bfloat16, enabled=device != "cpu"):
            hidden, _, _ = forward(config, weights, Plain(weights), rope, ids[:, :-1])
            logits = F.linear(hidden[learn[:, 1:]], weights.head)
        loss = F.cross_entropy(logits.float(), ids[:, 1:][learn[:, 1:]])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves.values(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == settings.steps - 1:
            on_step(step, float(loss.detach()), time.monotonic() - start)
    return replace(
        weights,
        **{name: tensor.detach() for name, tensor in leaves.items()},
        **({} if "head" in leaves else {"head": leaves["embed"].detach()}),
    )


def _schedule(step: int, settings: PretrainSettings) -> float:
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def _batches(
    traces: list[Trace], settings: PretrainSettings, device: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """(ids, learn) batches without end, shuffled each pass, padded on the right."""
    rng = random.Random(settings.seed)
    width = max(len(t.tokens) for t in traces)
    ids = torch.zeros(len(traces), width, dtype=torch.int16)
    learn = torch.zeros(len(traces), width, dtype=torch.bool)
    sizes = torch.tensor([len(t.tokens) for t in traces])
    for i, trace in enumerate(traces):
        ids[i, : len(trace.tokens)] = torch.tensor(trace.tokens, dtype=torch.int16)
        learn[i, : len(trace.tokens)] = torch.tensor(trace.learn)
    ids, learn = ids.to(device), learn.to(device)
    order: list[int] = []
    while True:
        if len(order) < settings.batch:
            order = rng.sample(range(len(traces)), len(traces))
        picked = torch.tensor([order.pop() for _ in range(settings.batch)])
        longest = int(sizes[picked].max())
        rows: Tensor = picked.to(device)
        yield ids[rows, :longest].long(), learn[rows, :longest]
