"""Results as the SDK hands them out: futures of both worlds, and methods in their *_async form."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future
from typing import Any, ParamSpec, Self, TypeVar

from tinker.lib.public_interfaces.api_future import APIFuture, AwaitableConcurrentFuture

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


def twin(method: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """The *_async form of a method that does not wait."""

    @functools.wraps(method)
    async def twin(*args: P.args, **kwargs: P.kwargs) -> R:
        return method(*args, **kwargs)

    return twin


def awaited(method: Callable[P, Any]) -> Callable[P, Coroutine[Any, Any, Any]]:
    """The *_async form of a method whose plain form returns a future of the result."""

    @functools.wraps(method)
    async def awaited(*args: P.args, **kwargs: P.kwargs) -> Any:
        return await method(*args, **kwargs)

    return awaited


class Ready:
    """A client that may be awaited or asked for its result, as the SDK's create methods allow."""

    def result(self, timeout: float | None = None) -> Self:
        return self

    async def result_async(self, timeout: float | None = None) -> Self:
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.result_async().__await__()


def then(future: Future[T], convert_result: Callable[[T], R]) -> APIFuture[R]:
    """What a future yields, converted. Cancelling it cancels the future."""
    converted: Future[R] = Future()

    def finish(over: Future[T]) -> None:
        if over.cancelled() or not converted.set_running_or_notify_cancel():
            return
        try:
            converted.set_result(convert_result(over.result()))
        except BaseException as error:  # it belongs to whoever waits for the result
            converted.set_exception(error)

    converted.add_done_callback(lambda over: over.cancelled() and future.cancel())
    future.add_done_callback(finish)
    return AwaitableConcurrentFuture(converted)


def done(work: Callable[[], R]) -> APIFuture[R]:
    future: Future[R] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # raised where the result is asked for, as over a network
        future.set_exception(error)
    return AwaitableConcurrentFuture(future)
