"""The page's server: addresses, safety headers, who may read. Read-only.

Knows HTTP; what a page shows comes from web.views and how it looks from the templates.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from metatrainer import net
from metatrainer.errors import ConfigError, MetatrainerError
from metatrainer.ledger import Ledger
from metatrainer.web import present, views

COMPARED = 8
"""Runs in one comparison."""
_COOKIE = "metatrainer"
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


def make_app(root: Path, token: str | None = None) -> Starlette:
    """The application over the runs below `root` (or `root` itself, if it is a run).

    token: needed to read anything; None only where nobody but this machine can connect.
    """
    pages = Pages(root)
    run = "/run/{run}"
    routes = [
        Route("/", pages.index),
        Route("/compare", pages.compare),
        Route("/families", pages.families),
        Route("/families/{family}", pages.family),
        Route("/leaderboard", pages.leaderboard),
        Route(run, pages.run),
        Route(run + "/version", pages.version),
        Route(run + "/pool", pages.pool),
        Route(run + "/config", pages.config),
        Route(run + "/{phase}/{step:int}", pages.step),
        Route(run + "/episode/{episode}", pages.episode),
        Route(run + "/job/{job}", pages.job),
        Route("/metrics", pages.metrics),
        Mount("/static", StaticFiles(packages=[("metatrainer.web", "static")])),
    ]
    middleware = [Middleware(SafeHeaders), Middleware(GZipMiddleware, minimum_size=2048)]
    if token is None:
        # Against DNS rebinding: a page elsewhere cannot read this one under a name of its own.
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=[*net.LOOPBACK, "[::1]"]))
    else:
        middleware.append(Middleware(NeedsToken, token=token))
    return Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={ConfigError: pages.missing, MetatrainerError: pages.missing},
    )


class Pages:
    """One method a page. Each opens nothing but ledgers, read-only."""

    def __init__(self, root: Path):
        self._root = root
        self._open: dict[Path, Ledger] = {}
        self._lock = threading.Lock()

    @cached_property
    def _templates(self) -> Environment:
        environment = Environment(
            loader=PackageLoader("metatrainer.web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        environment.filters.update(present.FILTERS)
        return environment

    def index(self, request: Request) -> Response:
        """All runs below the root; the run itself where there is one."""
        found = views.runs(self._root)
        if found == [self._root]:
            return RedirectResponse(f"/run/{self._root.resolve().name}")
        return self._page(request, "index", runs=self._heads(found), root=str(self._root))

    def compare(self, request: Request) -> Response:
        """The curves of several runs in one chart."""
        asked = request.query_params.getlist("run")
        names = asked or [head.name for head in self._heads(self._runs())[:COMPARED]]
        chosen = [(name, views.run_view(self._ledger(name))) for name in names[:COMPARED]]
        charts = [present.comparison(term, chosen) for term in ("reward", *views.TERMS)]
        return self._page(request, "compare", runs=chosen, charts=charts)

    def leaderboard(self, request: Request) -> Response:
        """Runs by how well their agents did in the end."""
        readable = [head.name for head in self._heads(self._runs())]
        found = [(name, views.run_view(self._ledger(name))) for name in readable]
        return self._page(request, "leaderboard", rows=present.standings(found))

    def families(self, request: Request) -> Response:
        """The families of tasks."""
        from metatrainer import families

        return self._page(request, "families", families=[families.get(n) for n in families.NAMES])

    def family(self, request: Request) -> Response:
        """One family, with a sample."""
        from metatrainer import families

        family = families.get(request.path_params["family"])
        (item,) = family.items("dev", seed=0, n=1)
        calls = [(name, given, family.call(item.world, name, given)) for name, given in item.calls]
        return self._page(request, "family", family=family, item=item, calls=calls)

    def run(self, request: Request) -> Response:
        """A run."""
        view = views.run_view(self._of(request))
        charts = present.run_charts(view)
        return self._page(request, "run", view=view, run=view.head, charts=charts)

    def config(self, request: Request) -> Response:
        """A run's settings and versions."""
        view = views.run_view(self._of(request))
        return self._page(request, "config", view=view, run=view.head)

    def step(self, request: Request) -> Response:
        """A step of training, or a pass over the held-out families."""
        phase = request.path_params["phase"]
        if phase not in views.PHASES:
            raise ConfigError(f"no phase {phase[:40]!r}; there are {', '.join(views.PHASES)}")
        view = views.step_view(self._of(request), phase, request.path_params["step"])
        return self._page(
            request, "step", view=view, run=view.head, phase_title=views.PHASES[phase]
        )

    def episode(self, request: Request) -> Response:
        """An episode."""
        view = views.episode_view(self._of(request), request.path_params["episode"])
        return self._page(request, "episode", view=view, run=view.head)

    def job(self, request: Request) -> Response:
        """A job."""
        view = views.job_view(self._of(request), request.path_params["job"])
        charts = present.job_charts(view)
        return self._page(request, "job", view=view, run=view.head, charts=charts)

    def pool(self, request: Request) -> Response:
        """The pool."""
        view = views.pool_view(self._of(request))
        return self._page(request, "pool", view=view, run=view.head, lanes=present.lanes(view))

    def version(self, request: Request) -> Response:
        """A number that changes whenever the run has written: what an open page watches."""
        return JSONResponse({"version": self._of(request).version()})

    def metrics(self, request: Request) -> Response:
        """All runs for Prometheus, in its text format."""
        heads = self._heads(self._runs())
        return PlainTextResponse(
            present.prometheus(heads), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    def missing(self, request: Request, error: Exception) -> Response:
        """What is not there, as a page that says so."""
        page = self._templates.get_template("missing.html.j2")
        html = page.render(path=request.url.path, text=str(error), run=None, version=None)
        return Response(html, 404, media_type="text/html")

    def _page(self, request: Request, name: str, **shown: Any) -> Response:
        """Render a page; one that the browser has already is not sent again."""
        run = shown.setdefault("run", None)
        version = self._ledger(run.name).version() if run else None
        page = self._templates.get_template(f"{name}.html.j2")
        html = page.render(path=request.url.path, version=version, **shown).encode()
        tag = f'"{hashlib.sha256(html).hexdigest()[:20]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"etag": tag})
        return Response(html, media_type="text/html", headers={"etag": tag})

    def _heads(self, paths: list[Path]) -> list[views.Head]:
        heads = []
        for path in paths:
            try:
                heads.append(views.head(self._ledger(path.name)))
            except MetatrainerError:
                continue  # begun a moment ago, or of another version: the other runs still show
        return heads

    def _runs(self) -> list[Path]:
        return views.runs(self._root)

    def _of(self, request: Request) -> Ledger:
        return self._ledger(request.path_params["run"])

    def _ledger(self, name: str) -> Ledger:
        """A run's ledger, kept open: `version` counts from when it was opened."""
        path = next((p for p in self._runs() if p.resolve().name == name), None)
        if path is None:
            raise ConfigError(f"no run {name[:80]!r} below {self._root}")
        with self._lock:
            if path not in self._open:
                self._open[path] = Ledger(path / "ledger.sqlite", readonly=True)
            return self._open[path]


class SafeHeaders:
    """Adds the headers that keep what agents wrote from doing anything in a browser."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(
                        (k.encode(), v.encode())
                        for k, v in _HEADERS.items()
                        if k.encode() not in there
                    ),
                ]
            await send(message)

        await self._app(scope, receive, send_safely)


class NeedsToken:
    """Lets in who shows the token: once in the address (it moves to a cookie), or as a bearer."""

    def __init__(self, app: ASGIApp, token: str):
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if self._right(request.query_params.get("token")):
            response: Response = RedirectResponse(request.url.remove_query_params("token"))
            response.set_cookie(_COOKIE, self._token, httponly=True, samesite="strict")
            await response(scope, receive, send)
        elif self._right(request.cookies.get(_COOKIE)) or self._right(_bearer(request)):
            await self._app(scope, receive, send)
        else:
            text = "open the address that `metatrainer watch` printed: it ends with ?token=...\n"
            await PlainTextResponse(text, 401)(scope, receive, send)

    def _right(self, given: str | None) -> bool:
        return given is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _bearer(request: Request) -> str | None:
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    return value if kind.lower() == "bearer" else None
