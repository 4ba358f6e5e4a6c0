"""The embedded engine: one base model, a bank of LoRA adapters, sampling and training on them.

Its calls are Tinker's (sample, forward_backward, optim_step, save, load) on plain lists of token
ids. Synchronous and for one thread. Knows nothing about chat formats, environments or rewards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from metatrainer.engine.batching import common_prefix, families_of, micro_batches
from metatrainer.engine.decode import Decoder, Sample, SamplingParams
from metatrainer.engine.lora import AdamParams, Adapter
from metatrainer.engine.losses import INPUTS, LOSSES
from metatrainer.engine.model import (
    ModelConfig,
    Prefix,
    Rope,
    Weights,
    forward,
    load_weights,
)
from metatrainer.engine.prefix import PrefixStore
from metatrainer.errors import ConfigError

_MICRO_BATCH_TOKENS = 16384
_PREFIX_BYTES = 1 << 30
_SHARED_TOKENS = 64
"""Beginnings that save as many tokens are worth computing once, in a pass of their own."""


@dataclass(frozen=True)
class SampleRequest:
    """One row to sample."""

    prompt: list[int]
    params: SamplingParams
    adapter: int | None = None
    """None is the base model."""
    seed: int | None = None
    """Seed of the row's own random stream; None takes the engine's next one."""


@dataclass(frozen=True)
class TrainRow:
    """One sequence to train on; all lists have the length of `tokens`.

    targets[t] is the token that follows tokens[t]. Positions whose weight (cross_entropy) or
    advantage and old log-probability (importance_sampling) are 0 take no part.
    """

    tokens: list[int]
    targets: list[int]
    weights: list[float] = field(default_factory=list)
    old_logprobs: list[float] = field(default_factory=list)
    advantages: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class TrainOutput:
    """loss: the sum over all rows. logprobs: of each row's targets, 0 where it takes no part."""

    loss: float
    logprobs: list[list[float]]


class Engine:
    """A base model and its adapters."""

    def __init__(self, folder: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32):
        self.folder = Path(folder)
        self.config = ModelConfig.from_folder(self.folder)
        self.device, self.dtype = device, dtype
        self.base: Weights = load_weights(self.folder, self.config).to(device, dtype)
        self.rope = Rope(self.config, device, dtype)
        self._adapters: dict[int, Adapter] = {}
        self._next_adapter = 0
        self._next_seed = 0
        self._effective: dict[int, tuple[int, Weights]] = {}
        self._prefixes = PrefixStore(_PREFIX_BYTES)
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        """The folder's tokenizer, as transformers loads it."""
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.folder)
        return self._tokenizer

    # Adapters

    def create_adapter(self, rank: int, alpha: float | None = None, seed: int = 0) -> int:
        """A fresh adapter that changes nothing yet; alpha defaults to the rank."""
        if rank < 1:
            raise ConfigError(f"lora rank {rank}: it must be at least 1")
        adapter = Adapter(self.config, rank, float(alpha or rank), self.device)
        adapter.initialise(seed)
        return self._add(adapter)

    def delete_adapter(self, adapter: int) -> None:
        """Forget an adapter."""
        self._adapters.pop(adapter, None)
        self._effective.pop(adapter, None)
        self._prefixes.forget(adapter)

    def snapshot(self, adapter: int) -> int:
        """A frozen copy of an adapter, to sample from while the original trains on."""
        return self._add(self._get(adapter).copy())

    def save_state(self, adapter: int, folder: Path) -> None:
        """Weights and optimizer state, exact."""
        self._get(adapter).save_state(folder)

    def load_state(self, folder: Path, optimizer: bool = True) -> int:
        """A new adapter from what save_state wrote, with or without its optimizer state."""
        adapter = Adapter.load_state(self.config, folder, self.device)
        return self._add(adapter if optimizer else adapter.copy())

    def save_adapter(self, adapter: int, folder: Path) -> None:
        """A PEFT folder."""
        self._get(adapter).save_peft(folder, self.folder.name)

    def load_adapter(self, folder: Path) -> int:
        """A new adapter from a PEFT folder."""
        return self._add(Adapter.load_peft(self.config, folder, self.device))

    def _add(self, adapter: Adapter) -> int:
        self._next_adapter += 1
        self._adapters[self._next_adapter] = adapter
        return self._next_adapter

    def _get(self, adapter: int) -> Adapter:
        if adapter not in self._adapters:
            raise ConfigError(f"no adapter {adapter}; it was deleted or never made")
        return self._adapters[adapter]

    @torch.no_grad()
    def weights(self, adapter: int | None) -> Weights:
        """The weights that an adapter makes, kept until the adapter changes."""
        if adapter is None:
            return self.base
        current = self._get(adapter)
        if self._effective_is_stale(adapter):
            self._effective[adapter] = (current.version, current.weights(self.base))
        return self._effective[adapter][1]

    # Sampling

    def decoder(self, adapter: int | None, seeds: list[int]) -> Decoder:
        """A batch to sample over several turns."""
        return Decoder(self.config, self.weights(adapter), self.rope, seeds)

    def sample(self, requests: list[SampleRequest]) -> list[Sample]:
        """Sample each request once; requests of one adapter and one setting share a batch.

        Raises ConfigError for a prompt that is empty or longer than the model's context.
        """
        samples: dict[int, Sample] = {}
        batches: dict[tuple[int | None, SamplingParams], list[int]] = {}
        for i, request in enumerate(requests):
            if not 0 < len(request.prompt) < self.config.max_position_embeddings:
                raise ConfigError(
                    f"a prompt of {len(request.prompt)} tokens; this model takes 1 to "
                    f"{self.config.max_position_embeddings - 1}"
                )
            batches.setdefault((request.adapter, request.params), []).append(i)
        for (adapter, params), members in batches.items():
            decoder = self._prefilled(adapter, [requests[i] for i in members])
            for row, (i, sample) in enumerate(zip(members, decoder.sample(params))):
                samples[i] = sample
                known = requests[i].prompt + sample.tokens
                self._prefixes.add(adapter, known, decoder.cache, row)
        return [samples[i] for i in range(len(requests))]

    def _prefilled(self, adapter: int | None, requests: list[SampleRequest]) -> Decoder:
        """A decoder that has read the prompts, using what is known of their beginnings."""
        if adapter is not None and self._effective_is_stale(adapter):
            self._prefixes.forget(adapter)
        prompts = [request.prompt for request in requests]
        self._learn_shared(adapter, prompts)
        decoder = self.decoder(adapter, [self._seed(request.seed) for request in requests])
        known = [self._prefixes.longest(adapter, prompt) for prompt in prompts]
        for row, entry in enumerate(known):
            if entry is not None:
                decoder.cache.fill(row, entry.keys, entry.values)
        decoder.feed([p[entry.length if entry else 0 :] for p, entry in zip(prompts, known)])
        return decoder

    def _learn_shared(self, adapter: int | None, prompts: list[list[int]]) -> None:
        """Compute once what several new prompts begin with."""
        new = [p for p in prompts if self._prefixes.longest(adapter, p) is None]
        leads = []
        for members in families_of(new):
            rows = [new[i] for i in members]
            length = common_prefix(rows, min(len(row) for row in rows) - 1)
            if len(rows) > 1 and length >= _SHARED_TOKENS:
                leads.append(rows[0][:length])
        if leads:
            decoder = self.decoder(adapter, [0] * len(leads))
            decoder.feed(leads)
            for row, lead in enumerate(leads):
                self._prefixes.add(adapter, lead, decoder.cache, row)

    def _effective_is_stale(self, adapter: int) -> bool:
        known = self._effective.get(adapter)
        return known is None or known[0] != self._get(adapter).version

    def _seed(self, seed: int | None) -> int:
        if seed is None:
            self._next_seed += 1
            return self._next_seed
        return seed

    @torch.no_grad()
    def logprobs(self, sequences: list[list[int]], adapter: int | None) -> list[list[float]]:
        """For each sequence the log-probability of every token after the first."""
        weights = self.weights(adapter)
        out = []
        for sequence in sequences:
            ids = torch.tensor([sequence], device=self.device)
            hidden, _, _ = forward(self.config, weights, self.rope, ids[:, :-1])
            logits = F.linear(hidden[0], weights.head).float()
            picked = logits.gather(1, ids[0, 1:, None])[:, 0] - logits.logsumexp(dim=-1)
            out.append(picked.tolist())
        return out

    # Training

    def forward_backward(
        self, rows: list[TrainRow], adapter: int, loss_fn: str, backward: bool = True
    ) -> TrainOutput:
        """Add the gradient of the summed loss to the adapter's. backward=False only evaluates.

        Raises ConfigError for a loss this engine does not have.
        """
        if loss_fn not in LOSSES:
            raise ConfigError(f"unknown loss {loss_fn!r}; this engine has {', '.join(LOSSES)}")
        total, logprobs = 0.0, [[0.0] * len(row.tokens) for row in rows]
        places = [_places(row, INPUTS[loss_fn]) for row in rows]
        taking_part = [i for i, found in enumerate(places) if found]
        lengths = [len(rows[i].tokens) - places[i][0] for i in taking_part]
        for batch in micro_batches(lengths, _MICRO_BATCH_TOKENS):
            members = [taking_part[j] for j in batch]
            with torch.set_grad_enabled(backward):
                loss, picked = self._batch_loss(
                    [rows[i] for i in members], [places[i] for i in members], adapter, loss_fn
                )
                if backward:
                    loss.backward()
            total += float(loss.detach())
            values = iter(picked.tolist())
            for i in members:
                for t in places[i]:
                    logprobs[i][t] = next(values)
        return TrainOutput(total, logprobs)

    def _batch_loss(
        self, rows: list[TrainRow], places: list[list[int]], adapter: int, loss_fn: str
    ) -> tuple[Tensor, Tensor]:
        """The summed loss, and the log-probability of every target that takes part, row by row."""
        weights = self._get(adapter).weights(self.base)
        firsts = [found[0] for found in places]
        prefix = self._shared_beginnings(rows, firsts, weights)
        starts = firsts if prefix else [0] * len(rows)
        ids = _padded([row.tokens[start:] for row, start in zip(rows, starts)], self.device)
        hidden, _, _ = forward(self.config, weights, self.rope, ids, prefix)
        flat = [(i, t) for i, found in enumerate(places) for t in found]
        row_of = torch.tensor([i for i, _ in flat], device=self.device)
        place_of = torch.tensor([t - starts[i] for i, t in flat], device=self.device)
        logits = F.linear(hidden[row_of, place_of], weights.head).float()
        targets = torch.tensor([rows[i].targets[t] for i, t in flat], device=self.device)
        picked = -F.cross_entropy(logits, targets, reduction="none")
        inputs = {
            name: torch.tensor([getattr(rows[i], name)[t] for i, t in flat], device=self.device)
            for name in INPUTS[loss_fn]
        }
        return LOSSES[loss_fn](picked, inputs), picked

    def _shared_beginnings(
        self, rows: list[TrainRow], firsts: list[int], weights: Weights
    ) -> Prefix | None:
        """What rows have before their first target, computed once for each different beginning.

        None where rows share too little to be worth a pass of its own.
        """
        unique: dict[tuple[int, ...], int] = {}
        of_row = [
            unique.setdefault(tuple(row.tokens[:first]), len(unique))
            for row, first in zip(rows, firsts)
        ]
        if sum(firsts) - sum(map(len, unique)) < _SHARED_TOKENS:
            return None
        ids = _padded([list(beginning) for beginning in unique], self.device)
        _, keys, values = forward(self.config, weights, self.rope, ids)
        length = torch.tensor([len(beginning) for beginning in unique], device=self.device)
        return Prefix(keys, values, length, torch.tensor(of_row, device=self.device))

    def optim_step(self, adapter: int, params: AdamParams) -> dict[str, float]:
        """One Adam step on the gradients added since the last one."""
        return {"grad_norm": self._get(adapter).adam_step(params)}


def _places(row: TrainRow, names: tuple[str, ...]) -> list[int]:
    """Positions of a row that take part in a loss with these inputs."""
    return [t for t, values in enumerate(zip(*(getattr(row, n) for n in names))) if any(values)]


def _padded(rows: list[list[int]], device: str) -> Tensor:
    """[rows, longest] token ids, padded on the right."""
    width = max(1, max(len(row) for row in rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
