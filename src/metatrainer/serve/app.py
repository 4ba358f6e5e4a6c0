"""The routes of Tinker's API, over the in-process clients: who asks what, and how it is answered.

Knows HTTP and the SDK's messages; all that is asked is done by metatrainer.tinker.client. Whatever
is wrong with a request becomes an answer that the SDK turns into an exception of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, cast

import tinker
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from tinker import types
from tinker.types.try_again_response import TryAgainResponse

from metatrainer.errors import ConfigError
from metatrainer.serve import wire
from metatrainer.serve.http import Guarded, answering, body_of, failed, gone, number, read
from metatrainer.serve.promises import Promises
from metatrainer.tinker.checkpoints import refusal
from metatrainer.tinker.client import SamplingClient, ServiceClient, TrainingClient
from metatrainer.tinker.convert import bad_request
from metatrainer.tinker.futures import then
from metatrainer.tinker.rest import RestClient

WAIT_SECONDS = 20.0
"""How long an answer is waited for before the client is told to ask again; it waits for 45."""
SESSION_SECONDS = 300.0
"""Without a heartbeat, which comes every ten, a session is taken for gone."""
PREFIX = "/api/v1"


@dataclass
class _Session:
    """One program's connection, and what lives as long as it does."""

    seen: float = field(default_factory=time.monotonic)
    models: dict[str, TrainingClient] = field(default_factory=dict)
    samplers: dict[str, SamplingClient] = field(default_factory=dict)


class Server:
    """What the routes share.

    service: does all that is asked. models: names that may be asked for. key: what a client has to
    bring; None lets everybody in.
    """

    def __init__(self, service: ServiceClient, models: tuple[str, ...], key: str | None):
        self._service = service
        self._names = models
        self._key = key
        self._rest: RestClient = service.create_rest_client()
        self._sessions: dict[str, _Session] = {}
        self._promises = Promises()
        self._count = itertools.count()

    def app(self) -> ASGIApp:
        """The application."""
        posts: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
            "weights_info": self._weights_info,
            "sessions/{id}/finish": self._finish,
        }
        gets: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "training_runs": self._list_runs,
            "training_runs/{run}": self._get_run,
            "training_runs/{run}/checkpoints": self._list_checkpoints,
            "samplers/{id}": self._get_sampler,
        }
        checkpoint = "training_runs/{run}/checkpoints/{kind}/{name}"
        routes = [
            *(Route(f"{PREFIX}/{at}", answering(f), methods=["POST"]) for at, f in posts.items()),
            *(Route(f"{PREFIX}/{at}", answering(f), methods=["GET"]) for at, f in gets.items()),
            Route(f"{PREFIX}/{checkpoint}", answering(self._delete), methods=["DELETE"]),
        ]
        return Guarded(Starlette(routes=routes, lifespan=self._lifespan), self._key)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(self._sweep())
        yield
        sweeping.cancel()

    async def _sweep(self) -> None:
        """Let go of what dead clients left, and of answers that were fetched."""
        while True:
            await asyncio.sleep(SESSION_SECONDS / 10)
            self._promises.sweep()
            for id, session in list(self._sessions.items()):
                if time.monotonic() - session.seen > SESSION_SECONDS:
                    self._end(id)

    def _end(self, id: str) -> None:
        # The adapters go with the clients that hold them.
        self._sessions.pop(id, None)
        self._promises.forget(id)

    def _session(self, id: str | None) -> _Session:
        session = self._sessions.get(id or "")
        if session is None:
            raise gone(f"no session {id}; it has ended, begin another")
        session.seen = time.monotonic()
        return session

    def _model(self, id: str | None) -> tuple[str, TrainingClient]:
        for name, session in self._sessions.items():
            if id in session.models:
                session.seen = time.monotonic()
                return name, session.models[id]
        raise refusal(tinker.NotFoundError, f"no model {id}; its session has ended, or never was")

    def _sampler(self, id: str | None) -> tuple[str, SamplingClient]:
        for name, session in self._sessions.items():
            if id in session.samplers:
                session.seen = time.monotonic()
                return name, session.samplers[id]
        raise refusal(tinker.NotFoundError, f"no sampling session {id}")

    def _known(self, model: str | None) -> str:
        if model not in self._names:
            served = ", ".join(self._names)
            raise bad_request(f"model {model!r} is not served here; served: {served}")
        return model

    def _promise(
        self, id: str, session: str, begin: Callable[[], Future[Any]], **more: Any
    ) -> types.UntypedAPIFuture:
        return types.UntypedAPIFuture(request_id=self._promises.take(id, session, begin), **more)

    # Sessions

    async def _client_config(self, request: Request) -> BaseModel:
        return types.ClientConfigResponse(
            # One chunk after another, so that they are added up in the same order each time.
            parallel_fwdbwd_chunks=False,
            proto_compress_fwdbwd=True,
        )

    async def _dynamic_config(self, request: Request) -> BaseModel:
        return types.ClientDynamicConfigResponse(sample_cancel_enabled=True)

    async def _create_session(self, request: Request) -> BaseModel:
        await read(request, types.CreateSessionRequest)
        id = f"session-{secrets.token_hex(8)}"
        self._sessions[id] = _Session()
        return types.CreateSessionResponse(session_id=id)

    async def _heartbeat(self, request: Request) -> BaseModel:
        self._session((await read(request, types.SessionHeartbeatRequest)).session_id)
        return types.SessionHeartbeatResponse()

    async def _finish(self, request: Request) -> None:
        self._end(request.path_params["id"])

    async def _telemetry(self, request: Request) -> BaseModel:
        await body_of(request)  # thrown away
        return types.TelemetryResponse(status="accepted")

    # Training

    async def _create_model(self, request: Request) -> BaseModel:
        asked = await read(request, types.CreateModelRequest)
        session, base = self._session(asked.session_id), self._known(asked.base_model)
        if asked.lora_config is None:
            raise bad_request("only LoRA adapters are trained here; give a lora_config")
        lora, id = asked.lora_config, _model_id(asked.session_id, asked.model_seq_id)

        def begin() -> Future[Any]:
            metadata = {k: str(v) for k, v in (asked.user_metadata or {}).items()}
            client = self._service.create_lora_training_client(base, lora.rank, lora.seed, metadata)
            session.models[id] = client
            made = types.CreateModelResponse(model_id=id)
            return then(client.adapter, lambda _: made).future()

        return self._promise(f"{id}:made", asked.session_id, begin)

    async def _load_weights(self, request: Request) -> BaseModel:
        asked = await read(request, types.LoadWeightsRequest)
        if asked.model_id is not None:
            owner, client = self._model(asked.model_id)
            load = client.load_state_with_optimizer if asked.optimizer else client.load_state
            id = f"{asked.model_id}:{asked.seq_id}"
            return self._promise(id, owner, lambda: load(asked.path).future())
        session = self._session(asked.session_id)

        def begin() -> Future[Any]:
            made = (
                self._service.create_training_client_from_state_with_optimizer
                if asked.optimizer
                else self._service.create_training_client_from_state
            )
            new = made(asked.path, asked.user_metadata)
            session.models[id] = new
            answer = types.LoadWeightsResponse(path=asked.path, model_id=id)
            return then(new.adapter, lambda _: answer).future()

        id = _model_id(asked.session_id, asked.model_seq_id)
        return self._promise(f"{id}:made", str(asked.session_id), begin)

    async def _get_info(self, request: Request) -> BaseModel:
        id = (await read(request, types.GetInfoRequest)).model_id
        _, client = self._model(id)
        return client.get_info().model_copy(update={"model_id": id})

    async def _forward_backward(self, request: Request) -> BaseModel:
        asked = wire.read_pass(await body_of(request))
        owner, client = self._model(asked.model_id)
        do = client.forward_backward if asked.backward else client.forward
        loss = cast(types.LossFnType, asked.loss_fn)
        id = f"{asked.model_id}:{asked.seq_id}"
        return self._promise(id, owner, lambda: do(asked.data, loss, asked.config).future())

    async def _optim_step(self, request: Request) -> BaseModel:
        asked = await read(request, types.OptimStepRequest)
        owner, client = self._model(asked.model_id)
        params = cast(types.AdamParams, asked.optim_params)
        id = f"{asked.model_id}:{asked.seq_id}"
        return self._promise(id, owner, lambda: client.optim_step(params).future())

    async def _save_weights(self, request: Request) -> BaseModel:
        asked = await read(request, types.SaveWeightsRequest)
        owner, client = self._model(asked.model_id)
        name = asked.path or f"state-{next(self._count)}"
        id = f"{asked.model_id}:{asked.seq_id}"
        return self._promise(
            id, owner, lambda: client.save_state(name, overwrite=asked.overwrite).future()
        )

    async def _save_for_sampler(self, request: Request) -> BaseModel:
        asked = await read(request, types.SaveWeightsForSamplerRequest)
        owner, client = self._model(asked.model_id)
        id, name = f"{asked.model_id}:{asked.seq_id}", asked.path
        if name is not None:
            return self._promise(id, owner, lambda: client.save_weights_for_sampler(name).future())

        def begin() -> Future[Any]:
            sampler = client.save_weights_and_get_sampling_client()
            sampling = self._keep(self._session(owner), sampler)
            answer = types.SaveWeightsForSamplerResponseInternal(sampling_session_id=sampling)
            return then(cast(Future[int], sampler.adapter), lambda _: answer).future()

        return self._promise(id, owner, begin)

    # Sampling

    async def _create_sampling_session(self, request: Request) -> BaseModel:
        asked = await read(request, types.CreateSamplingSessionRequest)
        session = self._session(asked.session_id)
        if asked.model_path is not None:
            sampler = self._service.create_sampling_client(model_path=asked.model_path)
        else:
            sampler = self._service.create_sampling_client(base_model=self._known(asked.base_model))
        return types.CreateSamplingSessionResponse(sampling_session_id=self._keep(session, sampler))

    def _keep(self, session: _Session, sampler: SamplingClient) -> str:
        id = f"sampling-{secrets.token_hex(8)}"
        session.samplers[id] = sampler
        return id

    async def _get_sampler(self, request: Request) -> BaseModel:
        id = request.path_params["id"]
        _, sampler = self._sampler(id)
        return types.GetSamplerResponse(sampler_id=id, base_model=sampler.get_base_model())

    async def _sample(self, request: Request) -> BaseModel:
        asked = await read(request, types.SampleRequest)
        owner, sampler = self._sampler(asked.sampling_session_id)
        for option in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
            if getattr(asked, option):
                raise bad_request(f"{option} is not supported here; leave it out")
        if asked.target_prompt_logprobs is not None or asked.prompt_logprobs_last_n is not None:
            raise bad_request("of a prompt's log-probabilities only all can be had here")
        id = f"{asked.sampling_session_id}:{asked.seq_id}"
        return self._promise(
            id,
            owner,
            lambda: sampler.sample(
                asked.prompt,
                asked.num_samples,
                asked.sampling_params,
                include_prompt_logprobs=bool(asked.prompt_logprobs),
            ).future(),
            sample_sequence_ids=[f"{id}:{i}" for i in range(asked.num_samples)],
        )

    # Answers

    async def _retrieve(self, request: Request) -> BaseModel | Response:
        id = (await read(request, types.FutureRetrieveRequest)).request_id
        try:
            done = await self._promises.wait(id, WAIT_SECONDS)
        except KeyError:
            raise gone(f"no request {id}; its answer was fetched long ago") from None
        if done is None:
            return TryAgainResponse(request_id=id, queue_state="active")
        try:
            answer = done.result()
        except CancelledError:
            return failed("the request was cancelled", "user")
        except (tinker.APIStatusError, ConfigError, ValueError) as error:
            return failed(str(error), "user")
        except Exception as error:  # the engine's; the client has to hear of it
            return failed(f"{type(error).__name__}: {error}", "server")
        if (packed := wire.write(answer)) is not None:
            return Response(packed, 200, None, wire.MEDIA_TYPE)
        return cast(BaseModel, answer)

    async def _cancel(self, request: Request) -> None:
        self._promises.cancel((await read(request, types.FutureRetrieveRequest)).request_id)

    # What there is

    async def _health(self, request: Request) -> BaseModel:
        return types.HealthResponse(status="ok")

    async def _capabilities(self, request: Request) -> BaseModel:
        return types.GetServerCapabilitiesResponse(
            supported_models=[
                types.SupportedModel(model_name=name, trainable=True, sampleable=True)
                for name in self._names
            ]
        )

    async def _list_runs(self, request: Request) -> BaseModel:
        asked = {key: number(request, key) for key in ("limit", "offset")}
        given = {key: value for key, value in asked.items() if value is not None}
        return self._rest.list_training_runs(**given).result()

    async def _get_run(self, request: Request) -> BaseModel:
        return self._rest.get_training_run(self._run_id(request)).result()

    async def _list_checkpoints(self, request: Request) -> BaseModel:
        return self._rest.list_checkpoints(self._run_id(request)).result()

    def _run_id(self, request: Request) -> str:
        """The run that a path names, or that the model which it names trains."""
        named: str = request.path_params["run"]
        for session in self._sessions.values():
            if named in session.models:
                return session.models[named].model_id
        return named

    async def _weights_info(self, request: Request) -> BaseModel:
        asked = await read(request, _Path)
        return self._rest.get_weights_info_by_tinker_path(asked.tinker_path).result()

    async def _delete(self, request: Request) -> None:
        at = request.path_params
        path = f"tinker://{self._run_id(request)}/{at['kind']}/{at['name']}"
        self._rest.delete_checkpoint_from_tinker_path(path).result()


def _model_id(session: str | None, number: int | None) -> str:
    """What the SDK takes a model's id to be."""
    return f"{session}:train:{number}"


class _Path(BaseModel):
    tinker_path: str
