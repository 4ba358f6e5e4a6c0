"""What forward_backward is given, what it gives, and the rows of several updates as one batch.

Lists of numbers and arrays of them; knows nothing about models, devices or optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from metatrainer.engine.losses import CONFIG, INPUTS, LOSSES, LossConfig
from metatrainer.errors import ConfigError


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
class Update:
    """What one adapter is trained on in one pass."""

    rows: list[TrainRow]
    adapter: int | None
    """None is the base itself, see Engine.train_all."""
    loss_fn: str
    config: LossConfig = field(default_factory=dict)
    """Settings of the loss that are not its defaults."""


@dataclass(frozen=True, eq=False)
class TrainOutput:
    """What a pass over an update's rows gave."""

    loss: float
    """The sum over all rows."""
    found: list[np.ndarray]

    @property
    def logprobs(self) -> list[list[float]]:
        """Of each row's targets, 0 where it takes no part."""
        return [row.tolist() for row in self.found]


class Batch:
    """The rows of several updates that take part in their losses, numbered through."""

    def __init__(self, updates: Sequence[Update]):
        self.updates = updates
        self.update_of: list[int] = []
        self.places: list[np.ndarray] = []
        """Positions of a row that take part."""
        self.inputs: list[dict[str, np.ndarray]] = []
        """What the loss reads there, and the targets."""
        self.lengths: list[int] = []
        self._row_of: list[int] = []
        self._loss = [0.0] * len(updates)
        self._logprobs = [[np.zeros(len(row.tokens)) for row in u.rows] for u in updates]
        for u, update in enumerate(updates):
            names = INPUTS[update.loss_fn]
            joined = {name: _joined(update.rows, name) for name in (*names, "targets")}
            taking, end = np.any([joined[name] for name in names], axis=0), 0
            for r, row in enumerate(update.rows):
                begin, end = end, end + len(row.tokens)
                places = np.flatnonzero(taking[begin:end])
                if len(places):
                    self.inputs.append({n: all_[begin + places] for n, all_ in joined.items()})
                    self.update_of.append(u)
                    self._row_of.append(r)
                    self.places.append(places)
                    self.lengths.append(len(row.tokens) - int(places[0]))

    def row(self, member: int) -> TrainRow:
        return self.updates[self.update_of[member]].rows[self._row_of[member]]

    def put(self, members: list[int], losses: dict[int, Tensor], picked: np.ndarray) -> None:
        """Note what a pass over some rows gave: losses by update, log-probabilities in order."""
        for u, loss in zip(losses, torch.stack(list(losses.values())).tolist()):
            self._loss[u] += loss
        begin = 0
        for member in members:
            places = self.places[member]
            row = self._logprobs[self.update_of[member]][self._row_of[member]]
            row[places] = picked[begin : begin + len(places)]
            begin += len(places)

    def outputs(self) -> list[TrainOutput]:
        return [TrainOutput(loss, rows) for loss, rows in zip(self._loss, self._logprobs)]


def _joined(rows: Sequence[TrainRow], name: str) -> np.ndarray:
    """A field of all rows, one after another: faster than an array for each."""
    for row in rows:
        if len(getattr(row, name)) != len(row.tokens):
            found = f"{len(getattr(row, name))} {name} for {len(row.tokens)} tokens"
            raise ConfigError(f"a row to train on has {found}; it needs one for each")
    return np.array(list(chain.from_iterable(getattr(row, name) for row in rows)))


def check_loss(loss_fn: str, config: LossConfig) -> None:
    if loss_fn not in LOSSES:
        raise ConfigError(f"unknown loss {loss_fn!r}; this engine has {', '.join(LOSSES)}")
    for key, value in config.items():
        if key not in CONFIG[loss_fn]:
            known = ", ".join(CONFIG[loss_fn]) or "no settings"
            raise ConfigError(f"{loss_fn} has no setting {key!r}; it has {known}")
        if not isinstance(value, int | float):
            raise ConfigError(f"{key} of {loss_fn} is a number, found {value!r}")
