"""One request of HTTP: who may ask, what its body says, and how an answer or a refusal is written.

Knows the form in which the SDK takes errors; nothing about what is asked.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import tinker
import zstandard
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from metatrainer.errors import ConfigError
from metatrainer.tinker.checkpoints import refusal
from metatrainer.tinker.convert import bad_request

MAX_BODY = 64 * 1024 * 1024
"""Bytes of a request, unpacked. The SDK sends 5 MB at most."""

M = TypeVar("M", bound=BaseModel)


class Guarded:
    """Lets only those in who bring the key."""

    def __init__(self, app: ASGIApp, key: str | None):
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._key is not None:
            brought = Request(scope).headers.get("X-API-Key", "")
            if not hmac.compare_digest(brought.encode(), self._key.encode()):
                said = "wrong or missing API key; set TINKER_API_KEY to the server's"
                await problem(401, said)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def answering(
    handle: Callable[[Request], Awaitable[Any]],
) -> Callable[[Request], Awaitable[Response]]:
    """A route: what is returned as JSON, what is raised as an error of the SDK's form."""

    async def answer(request: Request) -> Response:
        try:
            done = await handle(request)
        except tinker.APIStatusError as error:
            return problem(error.status_code, error.message)
        except ValueError as error:  # the SDK's parsers raise it for what they cannot read
            return problem(422, str(error))
        except ConfigError as error:
            return problem(422, str(error))
        if isinstance(done, Response):
            return done
        if done is None:
            return Response(status_code=204)
        return Response(done.model_dump_json(exclude_none=True), 200, None, "application/json")

    return answer


async def body_of(request: Request) -> bytes:
    """A request's body, unpacked. Raises APIStatusError where it is too large."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY:
            raise refusal(tinker.BadRequestError, f"a request has at most {MAX_BODY} bytes")
    if request.headers.get("Content-Encoding") != "zstd":
        return bytes(body)
    try:
        with zstandard.ZstdDecompressor().stream_reader(bytes(body)) as reader:
            unpacked = reader.read(MAX_BODY + 1)
    except zstandard.ZstdError as error:
        raise bad_request(f"the request is not zstd: {error}") from None
    if len(unpacked) > MAX_BODY:
        raise bad_request(f"a request has at most {MAX_BODY} bytes, unpacked")
    return unpacked


async def read(request: Request, kind: type[M]) -> M:
    try:
        return kind.model_validate_json(await body_of(request))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise refusal(
            tinker.UnprocessableEntityError, f"{kind.__name__}: {where}: {first['msg']}"
        ) from None


def number(request: Request, key: str) -> int | None:
    given = request.query_params.get(key)
    if given is None:
        return None
    if not given.isdecimal():
        raise bad_request(f"{key} is a number, got {given!r}")
    return int(given)


def problem(status: int, message: str) -> Response:
    return JSONResponse({"detail": message}, status)


def failed(message: str, category: str) -> Response:
    """A request that was taken and came to nothing."""
    return JSONResponse({"error": message, "category": category})


def gone(message: str) -> tinker.APIStatusError:
    request = httpx.Request("POST", "tinker://served")
    return tinker.APIStatusError(message, response=httpx.Response(410, request=request), body=None)
