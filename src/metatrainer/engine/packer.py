"""Many jobs on one engine: their requests share every pass over the model.

A job is ordinary code in a thread of its own that asks for engine work and waits for it. One
thread owns the engine; at each of its steps it advances all feeds and turns that are asked for, of
whatever jobs, by one token in one batch, and takes updates of several jobs together. Work joins
and leaves between steps. What fails is tried again alone, so that only its own job hears of it.

Knows nothing about environments, rewards or what a job is.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from metatrainer.engine.adam import AdamParams
from metatrainer.engine.decode import Sample, SamplingParams
from metatrainer.engine.engine import Engine
from metatrainer.engine.model import ModelConfig
from metatrainer.engine.updates import TrainOutput, TrainRow, Update
from metatrainer.errors import MetatrainerError

T = TypeVar("T")
_PATIENCE = 1.0
"""How long jobs that were answered together are waited for, as a share of the pass's time."""


@dataclass(frozen=True)
class _Advance:
    lane: Lane
    work: Any
    """A feed or a turn."""
    future: Future[None]


@dataclass(frozen=True)
class _Train:
    lane: Lane
    update: Update
    adam: AdamParams
    future: Future[tuple[TrainOutput, dict[str, float]]]

    @property
    def tokens(self) -> int:
        return sum(len(row.tokens) for row in self.update.rows)


@dataclass(frozen=True)
class _Call:
    lane: Lane
    work: Callable[[Engine], Any]
    future: Future[Any]


_Item = _Advance | _Train | _Call


class Packer:
    """The thread that owns an engine, and the work that is asked of it."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self._queue: queue.Queue[_Item | None] = queue.Queue()
        self._advancing: list[_Advance] = []
        self._training: list[_Train] = []
        self._away: set[Lane] = set()
        """Jobs that are waited for, until a moment."""
        self._until = 0.0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="packer", daemon=True)
        self._thread.start()

    def lane(self) -> Lane:
        """The engine as one job sees it."""
        return Lane(self)

    def close(self) -> None:
        """End the thread. Whoever waits is told so."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def put(self, item: _Item) -> None:
        """Ask for work; its future tells when it is done."""
        if self._closed:
            raise MetatrainerError("the engine is closed")
        self._queue.put(item)

    def _run(self) -> None:
        while self._take():
            if self._advancing and len(self._training) <= len(self._advancing):
                self._advance()
            elif self._training:  # most of those who wait, wait for this
                self._train()
        waiting: list[_Item] = [*self._advancing, *self._training]
        while not self._queue.empty():  # asked while it was being closed
            if item := self._queue.get():
                waiting.append(item)
        for item in waiting:
            item.future.set_exception(MetatrainerError("the engine is closed"))

    def _take(self) -> bool:
        """Take what was asked; wait if there is nothing to do, or more to come. False: the end."""
        while True:
            idle = not self._advancing and not self._training
            patience = max(0.0, self._until - time.monotonic()) if self._away else 0.0
            try:
                item = self._queue.get(timeout=None if idle else patience)
            except queue.Empty:
                self._away.clear()
                return True
            if item is None:
                return False
            if isinstance(item, _Call):
                with _charged([(item.lane, 1)]):
                    _settle(item.future, item.work, self.engine)
                continue
            self._away.discard(item.lane)
            if isinstance(item, _Train):
                self._training.append(item)
            else:
                self._advancing.append(item)

    def _await(self, answered: list[Lane], began: float) -> None:
        """After a pass that answered most jobs: they will ask again soon, and then go together."""
        if len(answered) > len(self._advancing) + len(self._training):
            self._away = set(answered)
        now = time.monotonic()
        self._until = now + _PATIENCE * (now - began)

    def _advance(self) -> None:
        items, began = self._next_batch(), time.monotonic()
        with _charged([(item.lane, item.work.rows) for item in items]):
            try:
                self.engine.advance([item.work for item in items])
            except Exception:
                self._advance_apart(items)
        answered = [item for item in self._advancing if _finished(item)]
        self._advancing = [item for item in self._advancing if not item.future.done()]
        self._await([item.lane for item in answered], began)

    def _next_batch(self) -> list[_Advance]:
        """Those who came first, as many as make a batch; as rows stop, the next ones join."""
        rows = 0
        items: list[_Advance] = []
        for item in self._advancing:
            if items and rows + item.work.rows > self.engine.rows:
                break
            items.append(item)
            rows += item.work.rows
        return items

    def _advance_apart(self, items: list[_Advance]) -> None:
        """What cannot be done together is done one by one; what cannot be done at all, fails."""
        for item in items:
            try:
                self.engine.advance([item.work])
            except Exception as error:
                item.future.set_exception(error)

    def _train(self) -> None:
        items, self._training, began = self._training, [], time.monotonic()
        with _charged([(item.lane, item.tokens) for item in items]):
            try:
                outputs = self.engine.forward_backward_many([item.update for item in items])
            except Exception:
                for item in items:
                    _settle(item.future, self._train_alone, item)
                return
        for item, output in zip(items, outputs):
            with _charged([(item.lane, 1)]):
                _settle(item.future, self._step, item, output)
        self._await([item.lane for item in items], began)

    def _train_alone(self, item: _Train) -> tuple[TrainOutput, dict[str, float]]:
        self.engine.clear_gradient(item.update.adapter)  # of the pass that failed
        (output,) = self.engine.forward_backward_many([item.update])
        return self._step(item, output)

    def _step(self, item: _Train, output: TrainOutput) -> tuple[TrainOutput, dict[str, float]]:
        return output, self.engine.optim_step(item.update.adapter, item.adam)


class Lane:
    """The engine as one job sees it: its calls are the engine's own, and block until done."""

    def __init__(self, packer: Packer):
        self._packer = packer
        self._waited = 0.0
        self.charged = 0.0
        """Seconds of the engine's passes that this job has caused, by its share of them."""

    @property
    def config(self) -> ModelConfig:
        return self._packer.engine.config

    @property
    def tokenizer(self) -> Any:
        return self._packer.engine.tokenizer

    @property
    def name(self) -> str:
        return self._packer.engine.name

    def clock(self) -> float:
        """Seconds that go on only for this job's own work, not while it waits for others'."""
        return time.monotonic() - self._waited + self.charged

    def decoder(self, adapter: int | None, seeds: list[int]) -> Any:
        """See Engine.decoder."""
        return self._packer.engine.decoder(adapter, seeds)

    def feed(self, decoder: Any, tokens: list[list[int]]) -> None:
        """See Engine.feed."""
        self._wait(_Advance(self, self._packer.engine.feeding(decoder, tokens), Future()))

    def sample_turn(self, decoder: Any, params: SamplingParams) -> list[Sample]:
        """See Engine.sample_turn."""
        turn = self._packer.engine.turn(decoder, params)
        if not turn.done:
            self._wait(_Advance(self, turn, Future()))
        return turn.samples

    def update(
        self, rows: list[TrainRow], adapter: int, loss_fn: str, adam: AdamParams
    ) -> tuple[TrainOutput, dict[str, float]]:
        """See Engine.update."""
        return self._wait(_Train(self, Update(rows, adapter, loss_fn), adam, Future()))

    def create_adapter(self, rank: int, alpha: float | None = None, seed: int = 0) -> int:
        """See Engine.create_adapter."""
        made = self._packer.engine.fresh_adapter(rank, alpha, seed)  # meanwhile others go on
        return self.call(lambda engine: engine.add_adapter(made))

    def delete_adapter(self, adapter: int) -> None:
        """See Engine.delete_adapter."""
        self.call(lambda engine: engine.delete_adapter(adapter))

    def call(self, work: Callable[[Engine], T]) -> T:
        """Anything else, between two steps."""
        return self._wait(_Call(self, work, Future()))

    def _wait(self, item: _Item) -> Any:
        began = time.monotonic()
        self._packer.put(item)
        try:
            return item.future.result()
        finally:
            self._waited += time.monotonic() - began


@contextmanager
def _charged(shares: list[tuple[Lane, int]]) -> Iterator[None]:
    """Charge the time of a block to lanes, by their shares of it."""
    began = time.monotonic()
    yield
    each = (time.monotonic() - began) / max(1, sum(share for _, share in shares))
    for lane, share in shares:
        lane.charged += share * each


def _finished(item: _Advance) -> bool:
    if item.work.done and not item.future.done():
        item.future.set_result(None)
    return item.future.done()


def _settle(future: Future[Any], work: Callable[..., Any], *given: Any) -> None:
    try:
        future.set_result(work(*given))
    except BaseException as error:  # it belongs to whoever asked; the thread goes on
        future.set_exception(error)
