"""The one thread that owns an Engine, which is not safe to share.

Work is done in the order of arrival, except that samples that wait together are drawn by one
`engine.sample` call. Knows nothing about Tinker's types.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from metatrainer.engine import Engine, Sample, SampleRequest
from metatrainer.errors import MetatrainerError

T = TypeVar("T")

Requests = Callable[[Engine], list[SampleRequest]]

SETTLE = 0.02
"""Seconds to wait for one more draw before a batch starts. Rollouts that were answered together
ask again within this time; without it the first to ask would be sampled alone."""


@dataclass(frozen=True)
class _Call:
    work: Callable[[Engine], Any]
    future: Future


@dataclass(frozen=True)
class _Draw:
    requests: Requests
    adapter: Future[int] | None
    future: Future[list[Sample]]

    def prepare(self, engine: Engine) -> list[SampleRequest]:
        requests = self.requests(engine)
        if self.adapter is None:
            return requests
        return [replace(request, adapter=self.adapter.result()) for request in requests]


@dataclass(frozen=True)
class _Close:
    pass


class EngineThread:
    """Runs an engine's calls on a thread of its own and hands out futures.

    open_engine: builds the engine; it runs on the thread too, so that opening does not block. If
    it fails, every call gets its error.
    """

    def __init__(self, open_engine: Callable[[], Engine]):
        self._queue: queue.Queue[_Call | _Draw | _Close] = queue.Queue()
        self._open_engine = open_engine
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def call(self, work: Callable[[Engine], T]) -> Future[T]:
        """Run `work` with the engine, after everything that was asked before."""
        future: Future[T] = Future()
        self._put(_Call(work, future))
        return future

    def sample(self, requests: Requests, adapter: Future[int] | None) -> Future[list[Sample]]:
        """Draw what `requests` lists, from the adapter that an earlier call yields."""
        future: Future[list[Sample]] = Future()
        self._put(_Draw(requests, adapter, future))
        return future

    def forget(self, adapter: Future[int]) -> None:
        """Delete an adapter, once what was asked of it before is done."""
        if not self._closed:
            self.call(lambda engine: engine.delete_adapter(adapter.result()))

    def close(self) -> None:
        """Finish what was asked, then end the thread. Later calls raise."""
        if not self._closed:
            self._put(_Close())
            self._closed = True
            self._thread.join()

    def _put(self, item: _Call | _Draw | _Close) -> None:
        if self._closed:
            raise MetatrainerError("the engine is closed; open the service again to use it")
        self._queue.put(item)

    def _run(self) -> None:
        try:
            engine = self._open_engine()
        except BaseException as error:  # whoever asks has to hear of it, whatever it is
            self._refuse(error)
            return
        item = self._queue.get()
        while not isinstance(item, _Close):
            if isinstance(item, _Call):
                _answer(item.future, item.work, engine)
                item = self._queue.get()
            else:
                item = self._draw_with_waiting(engine, item)

    def _refuse(self, error: BaseException) -> None:
        while not isinstance(item := self._queue.get(), _Close):
            item.future.set_exception(error)

    def _draw_with_waiting(self, engine: Engine, first: _Draw) -> _Call | _Draw | _Close:
        """Serve `first` and the draws that wait with it. Returns the item that comes after."""
        draws = [first]
        while True:
            try:
                item = self._queue.get(timeout=SETTLE)
            except queue.Empty:
                _draw(engine, draws)
                return self._queue.get()
            if not isinstance(item, _Draw):
                _draw(engine, draws)
                return item
            draws.append(item)


def _answer(future: Future[T], work: Callable[[Engine], T], engine: Engine) -> None:
    if future.set_running_or_notify_cancel():
        _settle(future, work, engine)


def _settle(future: Future[T], work: Callable[[Engine], T], engine: Engine) -> None:
    try:
        result = work(engine)
    except BaseException as error:  # it belongs to the caller; the thread goes on
        future.set_exception(error)
    else:
        future.set_result(result)


def _draw(engine: Engine, draws: list[_Draw]) -> None:
    """One call for all draws; if it fails, one for each, so that a bad one fails alone."""
    wanted = [draw for draw in draws if draw.future.set_running_or_notify_cancel()]
    try:
        prepared = [draw.prepare(engine) for draw in wanted]
        samples = iter(engine.sample([request for each in prepared for request in each]))
    except Exception:
        for draw in wanted:
            _settle(draw.future, partial(_draw_alone, draw), engine)
        return
    for draw, requests in zip(wanted, prepared, strict=True):
        draw.future.set_result([next(samples) for _ in requests])


def _draw_alone(draw: _Draw, engine: Engine) -> list[Sample]:
    return engine.sample(draw.prepare(engine))
