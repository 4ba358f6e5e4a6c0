"""The embedded engine: one base model, a bank of LoRA adapters, sampling and training on them.

Its calls are Tinker's (sample, forward_backward, optim_step, save, load) on plain lists of token
ids. Synchronous and for one thread. Knows nothing about chat formats, environments or rewards.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from metatrainer.engine import memory
from metatrainer.engine.adam import AdamParams, Trained, details
from metatrainer.engine.batching import common_prefix, families_of, micro_batches
from metatrainer.engine.decode import Decoder, Feed, Sample, SamplingParams, Turn, draw
from metatrainer.engine.files import load_model, load_tokenizer
from metatrainer.engine.full import STATE_FILE, FullWeights
from metatrainer.engine.head import target_logprobs
from metatrainer.engine.lora import Adapter
from metatrainer.engine.losses import CONFIG, INPUTS, LOSSES, LossConfig
from metatrainer.engine.model import (
    Plain,
    Prefix,
    Project,
    Rope,
    Weights,
    extend,
    forward,
)
from metatrainer.engine.prefix import PrefixStore
from metatrainer.engine.project import LowRank, Merged, Part, merges, projector
from metatrainer.engine.updates import Batch, TrainOutput, TrainRow, Update, check_loss
from metatrainer.errors import ConfigError

if TYPE_CHECKING:
    from metatrainer.engine.slots import SlotEngine

_CPU_TOKENS, _GPU_TOKENS = 2048, 98304
"""Padded tokens of a micro-batch: on a CPU as many as its cache holds the activations of (of 512 to
16384, 2048 was fastest for the nano students), on a GPU as many as keep it busy."""
_CPU_FIXED, _GPU_FIXED = 256, 65536
"""What a micro-batch costs by itself, in tokens: on a GPU its launches."""
_GPU_SHARE = 0.7
"""Of a GPU's free memory, what a micro-batch may fill."""
_CPU_ROWS, _GPU_ROWS = 128, 4096
"""Rows of a decoding step, likewise: a CPU reads the keys and values of so many from its cache."""
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


class Engine:
    """A base model and its adapters."""

    def __init__(
        self,
        folder: str | Path,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        name: str | None = None,
    ):
        """folder: a Hugging Face folder or a GGUF file. name: what the model is called, else that.

        Raises ConfigError for what is no model, or one that does not fit into memory.
        """
        self.folder = Path(folder)
        self.name = name or self.folder.name.removesuffix(".gguf")
        self.device, self.dtype = device, dtype
        self.config, self.base = load_model(self.folder, device, dtype)
        self.rope = Rope(self.config, device, dtype)
        self._adapters: dict[int, Adapter] = {}
        self._next_adapter = 0
        self._next_seed = 0
        self._merged: dict[int, tuple[int, Weights]] = {}
        self._merges = merges(self.config)
        self._low_rank: tuple[Any, LowRank] | None = None
        self._budget = _CPU_TOKENS if device == "cpu" else _GPU_TOKENS
        self._fixed = _CPU_FIXED if device == "cpu" else _GPU_FIXED
        self.rows = _CPU_ROWS if device == "cpu" else _GPU_ROWS
        self._slots = self._open_slots() if device.startswith("cuda") else None
        self._prefixes = PrefixStore(_PREFIX_BYTES)
        self._tokenizer: Any = None
        self._full: FullWeights | None = None

    @classmethod
    def open(cls, folder: Path, name: str | None = None) -> Engine:
        """On the GPU, in bfloat16, where torch has one; else on the CPU, in float32."""
        if torch.cuda.is_available():
            return cls(folder, "cuda", torch.bfloat16, name)
        return cls(folder, name=name)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers has it."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    def _open_slots(self) -> SlotEngine:
        from metatrainer.engine.slots import SlotEngine  # needs Triton

        return SlotEngine(self.config, self.base, self.rope, self._project, self._get)

    def clock(self) -> float:
        """Seconds from some moment on, to measure a job's time by."""
        return time.monotonic()

    # All weights

    def train_all(self, folder: Path | None = None) -> None:
        """From here on the base itself is what adapter None trains; from a saved state, if given.

        Raises ConfigError where others sit on this base: a job that trains it has it to itself.
        """
        if self._adapters:
            raise ConfigError(
                f"{len(self._adapters)} adapters sit on this base; open another engine to train it"
            )
        self._full = self._full or FullWeights(self.config, self.base)
        if folder:
            details(folder / STATE_FILE)
            self._full.load(folder / STATE_FILE)
            self._prefixes.forget(None)

    # Adapters

    def create_adapter(self, rank: int, alpha: float | None = None, seed: int = 0) -> int:
        """A fresh adapter that changes nothing yet; alpha defaults to the rank."""
        return self.add_adapter(self.fresh_adapter(rank, alpha, seed))

    def fresh_adapter(self, rank: int, alpha: float | None, seed: int) -> Adapter:
        """What create_adapter makes, not yet the engine's: for any thread."""
        if rank < 1:
            raise ConfigError(f"lora rank {rank}: it must be at least 1")
        adapter = Adapter(self.config, rank, float(alpha or rank), self.device)
        adapter.initialise(seed)
        return adapter

    def delete_adapter(self, adapter: int) -> None:
        """Forget an adapter."""
        self._adapters.pop(adapter, None)
        self._merged.pop(adapter, None)
        self._prefixes.forget(adapter)

    def snapshot(self, adapter: int) -> int:
        """A frozen copy of an adapter, to sample from while the original trains on."""
        return self.add_adapter(self._get(adapter).copy())

    def save_state(self, adapter: int | None, folder: Path) -> None:
        """Weights and optimizer state, exact; those of None are for train_all."""
        if adapter is None:
            self._trained(None).save(folder / STATE_FILE)
        else:
            self._get(adapter).save_state(folder)

    def load_state(self, folder: Path, optimizer: bool = True) -> int:
        """A new adapter from what save_state wrote, with or without its optimizer state."""
        adapter = Adapter.load_state(self.config, folder, self.device)
        return self.add_adapter(adapter if optimizer else adapter.copy())

    def save_adapter(self, adapter: int, folder: Path) -> None:
        """A PEFT folder."""
        self._get(adapter).save_peft(folder, self.folder.name)

    def load_adapter(self, folder: Path) -> int:
        """A new adapter from a PEFT folder."""
        return self.add_adapter(Adapter.load_peft(self.config, folder, self.device))

    def add_adapter(self, adapter: Adapter) -> int:
        """Take an adapter into the bank; its number."""
        if self._full:
            raise ConfigError("this engine trains its base; open another one for adapters")
        self._next_adapter += 1
        self._adapters[self._next_adapter] = adapter
        return self._next_adapter

    def _get(self, adapter: int) -> Adapter:
        if adapter not in self._adapters:
            raise ConfigError(f"no adapter {adapter}; it was deleted or never made")
        return self._adapters[adapter]

    def _trained(self, adapter: int | None) -> Trained:
        """What updates of an adapter change."""
        if adapter is not None:
            return self._get(adapter)
        if self._full is None:
            raise ConfigError("the base is not trained here; train_all says that it shall be")
        return self._full

    @torch.no_grad()
    def weights(self, adapter: int | None) -> Weights:
        """The weights that an adapter makes, kept until it changes; of a large model, one set."""
        if adapter is None:
            return self.base
        current = self._get(adapter)
        if self._is_stale(adapter):
            if not self._merges:
                self._merged.clear()
            self._merged[adapter] = (current.version, current.weights(self.base))
        return self._merged[adapter][1]

    def _is_stale(self, adapter: int) -> bool:
        known = self._merged.get(adapter)
        return known is None or known[0] != self._get(adapter).version

    def _project(self, parts: list[tuple[int | None, int]]) -> Project:
        """What multiplies tokens of these adapters (adapter, tokens), in order; no gradients."""
        alone = len({adapter for adapter, _ in parts}) == 1
        # On a GPU one graph serves whatever adapters a step has; the base alone needs none of it.
        if self._merges or (alone and (self._slots is None or parts[0][0] is None)):
            return Merged([(self.weights(adapter), tokens) for adapter, tokens in parts])
        found = [(a, None if a is None else self._get(a)) for a, _ in parts]
        key = [(a, adapter and adapter.version) for a, adapter in found], [n for _, n in parts]
        if self._low_rank is None or self._low_rank[0] != key:
            low_rank = [Part(adapter, n) for (_, adapter), (_, n) in zip(found, parts)]
            self._low_rank = key, LowRank(self.base, low_rank)
        return self._low_rank[1]

    # Sampling

    def decoder(self, adapter: int | None, seeds: list[int]) -> Any:
        """A batch of rows to feed and to sample over several turns."""
        if self._slots:
            return self._slots.decoder(adapter, seeds)
        return Decoder(self.config, adapter, seeds, self.device, self.dtype)

    def feeding(self, decoder: Any, tokens: list[list[int]]) -> Any:
        """The work of appending tokens to each row (an empty list leaves a row as it is)."""
        return self._slots.feed(decoder, tokens) if self._slots else Feed(decoder, tokens)

    def turn(self, decoder: Any, params: SamplingParams) -> Any:
        """The work of sampling each row until it stops."""
        return self._slots.turn(decoder, params) if self._slots else Turn(decoder, params)

    def feed(self, decoder: Any, tokens: list[list[int]]) -> None:
        """Append tokens to each row of a decoder."""
        self.advance([self.feeding(decoder, tokens)])

    def sample_turn(self, decoder: Any, params: SamplingParams) -> list[Sample]:
        """Sample each row of a decoder until it stops."""
        turn = self.turn(decoder, params)
        while not turn.done:
            self.advance([turn])
        return turn.samples

    @torch.inference_mode()
    def advance(self, works: Sequence[Any]) -> None:
        """Move feeds and turns, each of another decoder, by a step in one pass."""
        if self._slots:
            return self._slots.advance(works)
        waiting = [work for work in works if isinstance(work, Turn) and not work.drawn]
        if waiting:
            draw(waiting, self.base.head)
        chunks = [work.chunk() for work in works]
        parts = [(w.decoder.adapter, chunk.ids.numel()) for w, chunk in zip(works, chunks)]
        hidden = extend(self.config, self.base, self._project(parts), self.rope, chunks)
        for work, states in zip(works, hidden):
            work.take(states)

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
        turns = [
            (members, self.turn(self._prefilled(adapter, [requests[i] for i in members]), params))
            for (adapter, params), members in batches.items()
        ]
        while going := [turn for _, turn in turns if not turn.done]:
            self.advance(going)
        for members, turn in turns:
            for row, (i, sample) in enumerate(zip(members, turn.samples)):
                samples[i] = sample
                if self._slots is None:
                    known = requests[i].prompt + sample.tokens
                    self._prefixes.add(requests[i].adapter, known, turn.decoder.cache, row)
        return [samples[i] for i in range(len(requests))]

    def _prefilled(self, adapter: int | None, requests: list[SampleRequest]) -> Decoder:
        """A decoder that has read the prompts, using what is known of their beginnings."""
        if adapter is not None and self._is_stale(adapter):
            self._prefixes.forget(adapter)
        prompts = [request.prompt for request in requests]
        seeds = [self._seed(request.seed) for request in requests]
        decoder = self.decoder(adapter, seeds)
        if self._slots:
            self.feed(decoder, prompts)
            return decoder
        self._learn_shared(adapter, prompts)
        known = [self._prefixes.longest(adapter, prompt) for prompt in prompts]
        for row, entry in enumerate(known):
            if entry is not None:
                decoder.cache.fill(row, entry.keys, entry.values)
        new = [p[entry.length if entry else 0 :] for p, entry in zip(prompts, known)]
        self.feed(decoder, new)
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
            self.feed(decoder, leads)
            for row, lead in enumerate(leads):
                self._prefixes.add(adapter, lead, decoder.cache, row)

    def _seed(self, seed: int | None) -> int:
        if seed is None:
            self._next_seed += 1
            return self._next_seed
        return seed

    @torch.no_grad()
    def logprobs(self, sequences: list[list[int]], adapter: int | None) -> list[list[float]]:
        """For each sequence the log-probability of every token after the first."""
        project = Plain(self.weights(adapter))
        out = []
        for sequence in sequences:
            ids = torch.tensor([sequence], device=self.device)
            hidden, _, _ = forward(self.config, self.base, project, self.rope, ids[:, :-1])
            logits = F.linear(hidden[0], self.base.head).float()
            picked = logits.gather(1, ids[0, 1:, None])[:, 0] - logits.logsumexp(dim=-1)
            out.append(picked.tolist())
        return out

    # Training

    def forward_backward(
        self,
        rows: list[TrainRow],
        adapter: int | None,
        loss_fn: str,
        backward: bool = True,
        config: LossConfig | None = None,
    ) -> TrainOutput:
        """Add the gradient of the summed loss to the adapter's. backward=False only evaluates.

        Raises ConfigError for a loss, or a setting of it, that this engine does not have.
        """
        (output,) = self.forward_backward_many(
            [Update(rows, adapter, loss_fn, config or {})], backward
        )
        return output

    def forward_backward_many(
        self, updates: Sequence[Update], backward: bool = True
    ) -> list[TrainOutput]:
        """The same for several adapters in shared passes: rows of one touch no other's gradient."""
        for update in updates:
            check_loss(update.loss_fn, update.config)
            self._trained(update.adapter)  # there is one
        batch = Batch(updates)
        todo = micro_batches(
            batch.lengths, min(self._budget, self._fitting()), batch.update_of, self._fixed
        )
        found = []  # looked at when all is asked for: a GPU goes on meanwhile
        while todo:
            members = sorted(todo.pop())  # rows of one adapter side by side
            try:
                found.append((members, *self._micro_batch(batch, members, backward)))
            except memory.EXCEPTIONS as error:
                if not memory.is_out_of_memory(error):
                    raise
                longest, half = max(batch.lengths[m] for m in members), len(members) // 2
                if not half:
                    said = f"no memory to train on one row of {longest} tokens"
                    raise ConfigError(said) from error
                todo += [members[:half], members[half:]]
                self._budget = longest * len(members) // 2
                warnings.warn(
                    f"out of memory: micro-batches of {self._budget} tokens from here on",
                    stacklevel=2,
                )
        for members, losses, picked in found:
            batch.put(members, losses, picked.cpu().double().numpy())
        return batch.outputs()

    def _fitting(self) -> int:
        """Tokens of a micro-batch that a GPU's free memory has room for."""
        if self._slots is None:
            return self._budget
        c = self.config
        heads = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
        kept = 4 * c.hidden_size + 3 * heads + 3 * c.intermediate_size  # for the way back
        size = (c.num_hidden_layers * kept + 2 * c.vocab_size) * self.base.embed.element_size()
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return max(_CPU_TOKENS, int(_GPU_SHARE * free / size))

    def update(
        self, rows: list[TrainRow], adapter: int | None, loss_fn: str, adam: AdamParams
    ) -> tuple[TrainOutput, dict[str, float]]:
        """forward_backward and optim_step in one."""
        output = self.forward_backward(rows, adapter, loss_fn)
        return output, self.optim_step(adapter, adam)

    def clear_gradient(self, adapter: int | None) -> None:
        """Forget what forward_backward has added since the last step."""
        self._trained(adapter).grad.zero_()

    def _micro_batch(
        self, batch: Batch, members: list[int], backward: bool
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Losses and log-probabilities of some of a batch's rows; their gradients are added."""
        with torch.set_grad_enabled(backward):
            losses, picked = self._losses(batch, members)
            if backward:
                # Gradients are added once all are there: a pass that fails leaves none behind.
                trained = [self._trained(batch.updates[u].adapter) for u in losses]
                leaves = [leaf for each in trained for leaf in each.leaves]
                total = torch.stack(list(losses.values())).sum()
                gradients = torch.autograd.grad(total, leaves)
                torch._foreach_add_([leaf.grad for leaf in leaves], gradients)
        return {u: loss.detach() for u, loss in losses.items()}, picked

    def _losses(self, batch: Batch, members: list[int]) -> tuple[dict[int, Tensor], Tensor]:
        """The summed loss of each update, and the log-probability of every target, row by row."""
        rows = [batch.row(m) for m in members]
        places = [batch.places[m] for m in members]
        firsts = [int(place[0]) for place in places]
        by_update: dict[int, list[int]] = {}
        for m in members:
            by_update.setdefault(batch.update_of[m], []).append(m)
        owners = [batch.update_of[m] for m in members]
        prefix = self._shared_beginnings(batch, rows, firsts, owners)
        starts = firsts if prefix else [0] * len(rows)
        ids = self._padded([row.tokens[start:] for row, start in zip(rows, starts)])
        width = ids.shape[1]
        at = [i * width + place - start for i, (place, start) in enumerate(zip(places, starts))]
        # All of it before the first product, so that a GPU need not wait for it.
        where, targets = (
            self._joined(at),
            self._joined([batch.inputs[m]["targets"] for m in members]),
        )
        inputs = {
            u: {
                name: self._joined([batch.inputs[m][name] for m in mine])
                for name in INPUTS[batch.updates[u].loss_fn]
            }
            for u, mine in by_update.items()
        }
        weights, project = self._multiplied(batch, owners, width)
        hidden, _, _ = forward(self.config, weights, project, self.rope, ids, prefix)
        states = hidden.flatten(0, 1).index_select(0, where)
        picked = target_logprobs(states, weights.head, targets)
        losses, begin = {}, 0
        for u, mine in by_update.items():
            loss_fn, end = batch.updates[u].loss_fn, begin + sum(len(batch.places[m]) for m in mine)
            config = {**CONFIG[loss_fn], **batch.updates[u].config}
            losses[u] = LOSSES[loss_fn](picked[begin:end], inputs[u], config)
            begin = end
        return losses, picked.detach()

    def _joined(self, values: Sequence[np.ndarray]) -> Tensor:
        """Arrays one after another as a tensor of the device, floats in single precision."""
        whole = np.concatenate(values)
        kind = torch.float32 if whole.dtype.kind == "f" else torch.long
        return self._there(torch.from_numpy(whole).to(kind))

    def _padded(self, rows: list[list[int]]) -> Tensor:
        """[rows, longest] token ids, padded on the right."""
        width = max(1, max(len(row) for row in rows))
        padded = np.array([row + [0] * (width - len(row)) for row in rows])
        return self._there(torch.from_numpy(padded))

    def _there(self, here: Tensor) -> Tensor:
        """A tensor on the device, without waiting for what that does."""
        return here if self._slots is None else here.pin_memory().to(self.device, non_blocking=True)

    def _multiplied(self, batch: Batch, owners: list[int], tokens: int) -> tuple[Weights, Project]:
        """What rows of `tokens` tokens each go through, differentiable in what they train."""
        if self._full:
            weights = self._full.weights()
            return weights, Plain(weights)
        counts = Counter(owners)  # in the order of the rows
        adapters = {u: batch.updates[u].adapter for u in counts}
        parts = [
            Part(self._get(a), counts[u] * tokens) for u, a in adapters.items() if a is not None
        ]
        return self.base, projector(self.config, self.base, parts)

    def _shared_beginnings(
        self, batch: Batch, rows: list[TrainRow], firsts: list[int], owners: list[int]
    ) -> Prefix | None:
        """What rows have before their first target, computed once for each different beginning.

        None where rows share too little to be worth a pass of its own.
        """
        unique: dict[tuple[int, tuple[int, ...]], int] = {}
        of_row = [
            unique.setdefault((owner, tuple(row.tokens[:first])), len(unique))
            for row, first, owner in zip(rows, firsts, owners)
        ]
        if sum(firsts) - sum(len(tokens) for _, tokens in unique) < _SHARED_TOKENS:
            return None
        ids = self._padded([list(tokens) for _, tokens in unique])
        weights, project = self._multiplied(batch, [owner for owner, _ in unique], ids.shape[1])
        _, keys, values = forward(self.config, weights, project, self.rope, ids)
        length = torch.tensor([len(tokens) for _, tokens in unique])
        return Prefix(keys, values, self._there(length), self._there(torch.tensor(of_row)))

    def optim_step(self, adapter: int | None, params: AdamParams) -> dict[str, float]:
        """One Adam step on the gradients added since the last one."""
        norm = self._trained(adapter).adam_step(params)
        if adapter is None:
            self._prefixes.forget(None)
        return {"grad_norm": norm}
