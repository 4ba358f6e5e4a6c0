"""Runpod's REST API, version 2: the few calls that a pool of warm pods needs.

Limits and passing faults of the service are waited out here. A create that may or may not have come
through is not repeated: the caller looks by name first. Knows nothing about jobs, ssh or money.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from metatrainer.errors import ConfigError, PoolError
from metatrainer.shown import one_line

KEY = "RUNPOD_API_KEY"
CALL_SECONDS = 60.0
TRIES = 6
"""How often a call is made that the service limits or cannot serve just now."""
WAIT_SECONDS = 2.0
"""Before the second try; it doubles. Where the service says how long, that counts."""
MAX_WAIT_SECONDS = 60.0
MESSAGE_CHARS = 300

_NO_STOCK = re.compile(r"no (longer any )?instances|not available|unavailable|capacity|stock", re.I)
_NO_CREDIT = re.compile(r"balance|credit|funds|spend(ing)? limit|payment", re.I)
_RESET = re.compile(r"\b(?:t|reset)=(\d+)")

M = TypeVar("M", bound=BaseModel)
Status = Literal["PROVISIONING", "STARTING", "RUNNING", "EXITED", "ERROR", "TERMINATED"]


class _Answer(BaseModel):
    """Part of an answer; the service may add to it."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Price(_Answer):
    """Dollars for one GPU and an hour."""

    secure: float | None = None
    community: float | None = None


class GpuType(_Answer):
    """One line of the catalogue."""

    id: str
    availability: Literal["NONE", "LOW", "MEDIUM", "HIGH"] | None = "NONE"
    price: Price = Price()

    def usd_per_hour(self, cloud: str) -> float | None:
        """Price of one, None where that cloud has none."""
        return self.price.secure if cloud == "SECURE" else self.price.community


class Address(_Answer):
    """Where a pod's sshd listens."""

    host: str
    port: int = Field(ge=1, le=65535)
    username: str = "root"


class _Ways(_Answer):
    direct: Address | None = None


class _PodGpu(_Answer):
    id: str = ""


class Pod(_Answer):
    """A pod as the service sees it."""

    id: str = Field(min_length=1)
    name: str
    status: Status
    usd_per_hour: float = Field(0.0, alias="cost", ge=0)
    gpu: _PodGpu | None = None
    ssh: _Ways | None = None

    @property
    def address(self) -> Address | None:
        """None until the pod has been given a port."""
        return self.ssh.direct if self.ssh else None

    @property
    def over(self) -> bool:
        """It does no work any more, and never will."""
        return self.status in ("EXITED", "ERROR", "TERMINATED")


class Runpod:
    """An account, by its key."""

    def __init__(self, url: str, key: str, wait_seconds: float = WAIT_SECONDS):
        """wait_seconds: see WAIT_SECONDS."""
        self._wait_seconds = wait_seconds
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"},
            timeout=CALL_SECONDS,
        )

    async def close(self) -> None:
        """Give up the connections."""
        await self._http.aclose()

    async def gpus(self, cloud: str) -> list[GpuType]:
        """The catalogue with stock and prices."""
        query = {"include": "AVAILABILITY", "product": "POD", "cloud": cloud}
        answer = await self._read("GET", "/catalog/gpus", params=query)
        return [_parsed(GpuType, row) for row in _rows(answer, "gpus")]

    async def pods(self) -> list[Pod]:
        """All pods of the account that are not terminated."""
        rows = _rows(await self._read("GET", "/pods"), "pods")
        pods = [_parsed(Pod, row) for row in rows]
        return [pod for pod in pods if pod.status != "TERMINATED"]

    async def create(self, body: Mapping[str, Any]) -> Pod | None:
        """Rent a pod; None where there is none of that kind now.

        Raises ConfigError for what will not do at any time, PoolError where the pod may be there or
        not: look for its name.
        """
        answer = await self._call("POST", "/pods", json=body)
        if answer.status_code == 400 and _NO_STOCK.search(_said(answer)):
            return None
        self._check(answer)
        return _parsed(Pod, _json(answer))

    async def terminate(self, id: str) -> None:
        """End a pod, and the bill for it. One that is gone is gone."""
        answer = await self._call("DELETE", f"/pods/{id}")
        if answer.status_code != 404:
            self._check(answer)

    async def billed(self, ids: Sequence[str], since: float) -> dict[str, float]:
        """Dollars on the bill for each pod that is on it. since: Unix time."""
        start = datetime.fromtimestamp(since, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        usd: dict[str, float] = {}
        for id in ids:
            query = {"podId": id, "startTime": start, "bucketSize": "hour"}
            answer = await self._read("GET", "/billing/pods", params=query)
            for row in _rows(answer, "records"):
                usd[id] = usd.get(id, 0.0) + float(row["totalAmount"])
        return usd

    async def _read(self, method: str, path: str, **what: Any) -> Any:
        answer = await self._call(method, path, **what)
        self._check(answer)
        return _json(answer)

    async def _call(self, method: str, path: str, **what: Any) -> httpx.Response:
        """The service's answer, after limits and passing faults. Raises PoolError without one."""
        why = ""
        for n in range(TRIES):
            wait = min(self._wait_seconds * 2**n, MAX_WAIT_SECONDS)
            try:
                answer = await self._http.request(method, path, **what)
            except httpx.HTTPError as error:
                why = f"{type(error).__name__} {error}".strip()
            else:
                if answer.status_code != 429 and answer.status_code < 500:
                    return answer
                why = f"{answer.status_code} {_said(answer)}"
                wait = _told_to_wait(answer) or wait
            # Was a pod made or not? Only a refusal for being too fast says that none was.
            if method == "POST" and not why.startswith("429"):
                break
            if n < TRIES - 1:
                await asyncio.sleep(min(wait, MAX_WAIT_SECONDS))
        raise PoolError(f"Runpod does not answer {method} {path}: {why}")

    def _check(self, answer: httpx.Response) -> None:
        """Raises ConfigError for what the service refuses, with what to do about it."""
        if answer.is_success:
            return
        said = _said(answer)
        if answer.status_code in (401, 403):
            raise ConfigError(f"Runpod refuses the key in {KEY} ({said}); make one that may write")
        if answer.status_code == 402 or _NO_CREDIT.search(said):
            raise ConfigError(f"the Runpod account has no credit ({said}); add some, then go on")
        what = f"{answer.status_code} {answer.request.method} {answer.request.url.path}"
        raise ConfigError(f"Runpod refuses {what}: {said}")


def key_from_environment() -> str:
    """The owner's key. Raises ConfigError without one."""
    if key := os.environ.get(KEY, "").strip():
        return key
    raise ConfigError(
        f'pool.kind is "runpod", which needs an API key in {KEY}; set it, or use another pool'
    )


def _parsed(kind: type[M], row: Any) -> M:
    try:
        return kind.model_validate(row)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise PoolError(f"Runpod's answer has changed: {where}: {first['msg']}") from None


def _rows(answer: Any, name: str) -> list[Any]:
    """A list, bare or under its name."""
    rows = answer.get(name) if isinstance(answer, dict) else answer
    if not isinstance(rows, list):
        raise PoolError(f"Runpod's answer has changed: no list of {name}")
    return rows


def _json(answer: httpx.Response) -> Any:
    try:
        return answer.json()
    except ValueError:
        kind = answer.headers.get("content-type", "something")
        raise PoolError(f"Runpod answered {kind} in place of JSON: {_said(answer)}") from None


def _said(answer: httpx.Response) -> str:
    """What an answer says is wrong."""
    try:
        told = answer.json()
    except ValueError:
        told = answer.text
    if isinstance(told, dict):
        told = next((told[k] for k in ("detail", "message", "error", "title") if k in told), told)
    return one_line(str(told), MESSAGE_CHARS)


def _told_to_wait(answer: httpx.Response) -> float | None:
    """Seconds, by Retry-After or by the RateLimit headers; None if neither says."""
    after = answer.headers.get("retry-after", "")
    reset = _RESET.search(answer.headers.get("ratelimit", ""))
    told = after or (reset[1] if reset else answer.headers.get("ratelimit-reset", ""))
    return float(told) if told.replace(".", "", 1).isdigit() else None
