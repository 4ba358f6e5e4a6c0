"""Tinker's clients over the embedded engine: the SDK's surface, types and errors, no network.

What tinker-cookbook's training loops call is here, in plain and in *_async form, and nothing
else of the SDK. Knows nothing about who calls.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tinker import types
from tinker.lib.public_interfaces.api_future import APIFuture, AwaitableConcurrentFuture

from metatrainer.engine import Engine
from metatrainer.tinker import convert
from metatrainer.tinker.checkpoints import CheckpointStore, RunInfo
from metatrainer.tinker.futures import Ready, awaited, then, twin
from metatrainer.tinker.rest import RestClient
from metatrainer.tinker.worker import EngineThread

SDK_VERSION = "0.38.0"
"""The tinker SDK whose surface this is; a contract test compares the two."""

T = TypeVar("T")
R = TypeVar("R")
P = ParamSpec("P")


class ServiceClient:
    """Opens engines by model name and makes the other clients.

    root: folder of all checkpoints.
    open_engine: model name -> Engine; called once for each model, on the engine's own thread.
    seed: of adapters that are made without a seed.
    """

    def __init__(self, root: Path, open_engine: Callable[[str], Engine], seed: int = 0):
        self._store = CheckpointStore(root)
        self._open_engine = open_engine
        self._seed = seed
        self._models: dict[str, _Model] = {}

    def close(self) -> None:
        """End the engines' threads."""
        for model in self._models.values():
            model.worker.close()
        self._models.clear()

    def create_lora_training_client(
        self,
        base_model: str,
        rank: int = 32,
        seed: int | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> TrainingClient:
        """A new adapter on a base model."""
        info = self._store.open_run(base_model, rank, user_metadata or {})
        seed = self._seed if seed is None else seed
        return self._train(info, lambda engine: engine.create_adapter(rank, seed=seed))

    create_lora_training_client_async = twin(create_lora_training_client)

    def create_training_client_from_state(
        self, path: str, user_metadata: dict[str, str] | None = None
    ) -> TrainingClient:
        """Weights of a checkpoint with a fresh optimizer."""
        return self._train_from(path, user_metadata, optimizer=False)

    create_training_client_from_state_async = twin(create_training_client_from_state)

    def create_training_client_from_state_with_optimizer(
        self, path: str, user_metadata: dict[str, str] | None = None
    ) -> TrainingClient:
        """Weights and optimizer of a checkpoint: training goes on as if it had not stopped."""
        return self._train_from(path, user_metadata, optimizer=True)

    create_training_client_from_state_with_optimizer_async = twin(
        create_training_client_from_state_with_optimizer
    )

    def create_sampling_client(
        self, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        """Sampling from saved sampler weights, or from a base model without an adapter."""
        if model_path is not None:
            folder, info = self._store.find(model_path, "sampler_weights")
            return self._model(info.base_model).sampler_of_folder(folder)
        if base_model is None:
            raise ValueError("create_sampling_client needs a model_path or a base_model")
        return SamplingClient(self._model(base_model), None)

    create_sampling_client_async = twin(create_sampling_client)

    def create_rest_client(self) -> RestClient:
        """Looks after checkpoints."""
        return RestClient(self._store)

    def get_server_capabilities(self) -> types.GetServerCapabilitiesResponse:
        """The models that are open, each with its context length."""
        return types.GetServerCapabilitiesResponse(
            supported_models=[
                types.SupportedModel(
                    model_name=name,
                    max_context_length=model.context(),
                    trainable=True,
                    sampleable=True,
                )
                for name, model in self._models.items()
            ]
        )

    async def get_server_capabilities_async(self) -> types.GetServerCapabilitiesResponse:
        return await asyncio.to_thread(self.get_server_capabilities)

    def _model(self, name: str) -> _Model:
        if name not in self._models:
            self._models[name] = _Model(name, lambda: self._open_engine(name))
        return self._models[name]

    def _train(self, info: RunInfo, make: Callable[[Engine], int]) -> TrainingClient:
        return TrainingClient(self._model(info.base_model), info, self._store, make)

    def _train_from(
        self, path: str, user_metadata: dict[str, str] | None, optimizer: bool
    ) -> TrainingClient:
        folder, saved = self._store.find(path, "weights")
        info = self._store.open_run(
            saved.base_model, saved.lora_rank, user_metadata or saved.user_metadata
        )
        return self._train(info, lambda e: e.load_state(folder / "state", optimizer=optimizer))


class TrainingClient(Ready):
    """Trains one adapter. Calls are carried out in the order in which they are made."""

    def __init__(
        self,
        model: _Model,
        info: RunInfo,
        store: CheckpointStore,
        make: Callable[[Engine], int],
    ):
        self.model_id = info.run_id
        self._model = model
        self._info = info
        self._store = store
        self._adapter = model.adapter(self, make)

    @property
    def adapter(self) -> Future[int]:
        """What is trained, once it is there. Not of the SDK."""
        return self._adapter

    def forward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Losses and log-probabilities without gradients."""
        return self._pass(data, loss_fn, loss_fn_config, backward=False)

    forward_async = twin(forward)

    def forward_backward(
        self,
        data: list[types.Datum],
        loss_fn: types.LossFnType,
        loss_fn_config: Mapping[str, float | str] | None = None,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        """Losses, log-probabilities, and gradients added to those that wait for optim_step."""
        return self._pass(data, loss_fn, loss_fn_config, backward=True)

    forward_backward_async = twin(forward_backward)

    def optim_step(
        self,
        optim_params: types.AdamParams | None = None,
        *,
        adam_params: types.AdamParams | None = None,
    ) -> APIFuture[types.OptimStepResponse]:
        """One Adam update from the gradients so far, which are then gone."""
        params = convert.adam_params(optim_params or adam_params or types.AdamParams())
        return self._call(
            lambda engine, adapter: types.OptimStepResponse(
                metrics=engine.optim_step(adapter, params)
            )
        )

    optim_step_async = twin(optim_step)

    def save_state(
        self,
        name: str,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
    ) -> APIFuture[types.SaveWeightsResponse]:
        """Weights and optimizer on disk. They stay until deleted, whatever ttl_seconds says."""

        def save(engine: Engine, adapter: int) -> types.SaveWeightsResponse:
            path = self._store.save(
                self._info,
                "weights",
                name,
                lambda folder: engine.save_state(adapter, folder / "state"),
                overwrite,
            )
            return types.SaveWeightsResponse(path=path, type="save_weights")

        return self._call(save)

    save_state_async = twin(save_state)

    def load_state(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        """Weights of a checkpoint in place of the present ones, with a fresh optimizer."""
        return self._load(path, optimizer=False)

    load_state_async = twin(load_state)

    def load_state_with_optimizer(self, path: str) -> APIFuture[types.LoadWeightsResponse]:
        """Weights and optimizer of a checkpoint in place of the present ones."""
        return self._load(path, optimizer=True)

    load_state_with_optimizer_async = twin(load_state_with_optimizer)

    def save_weights_for_sampler(
        self,
        name: str,
        ttl_seconds: int | None = None,
    ) -> APIFuture[types.SaveWeightsForSamplerResponse]:
        """The adapter as a PEFT folder. It stays until deleted, whatever ttl_seconds says."""

        def save(engine: Engine, adapter: int) -> types.SaveWeightsForSamplerResponse:
            path = self._store.save(
                self._info,
                "sampler_weights",
                name,
                lambda folder: engine.save_adapter(adapter, folder / "adapter"),
                overwrite=True,
            )
            return types.SaveWeightsForSamplerResponse(path=path, type="save_weights_for_sampler")

        return self._call(save)

    save_weights_for_sampler_async = twin(save_weights_for_sampler)

    def save_weights_and_get_sampling_client(self) -> SamplingClient:
        """Sampling from a frozen copy of the adapter as it is now; nothing is written."""
        adapter = self._adapter
        return self._model.sampler(lambda engine: engine.snapshot(adapter.result()))

    save_weights_and_get_sampling_client_async = twin(save_weights_and_get_sampling_client)

    def create_sampling_client(self, model_path: str) -> SamplingClient:
        """Sampling from saved sampler weights."""
        folder, _ = self._store.find(model_path, "sampler_weights")
        return self._model.sampler_of_folder(folder)

    create_sampling_client_async = twin(create_sampling_client)

    def get_info(self) -> types.GetInfoResponse:
        """What is trained here."""
        return types.GetInfoResponse(
            type="get_info",
            model_data=types.ModelData(
                model_name=self._info.base_model, tokenizer_id=self._info.base_model
            ),
            model_id=self.model_id,
            is_lora=True,
            lora_rank=self._info.lora_rank,
            model_name=self._info.base_model,
        )

    get_info_async = twin(get_info)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._model.tokenizer()

    def _load(self, path: str, optimizer: bool) -> APIFuture[types.LoadWeightsResponse]:
        folder, saved = self._store.find(path, "weights")
        if saved.base_model != self._info.base_model:
            raise convert.bad_request(
                f"{path} is of {saved.base_model}, and this trains {self._info.base_model}"
            )
        before = self._adapter
        self._adapter = self._model.adapter(
            self, lambda engine: engine.load_state(folder / "state", optimizer=optimizer)
        )
        self._model.worker.forget(before)
        response = types.LoadWeightsResponse(path=path, model_id=self.model_id, type="load_weights")
        return then(self._adapter, lambda _: response)

    def _pass(
        self,
        data: Sequence[types.Datum],
        loss_fn: str,
        config: Mapping[str, float | str] | None,
        backward: bool,
    ) -> APIFuture[types.ForwardBackwardOutput]:
        settings = convert.check_loss(loss_fn, config)

        def work(engine: Engine, adapter: int) -> types.ForwardBackwardOutput:
            rows = [convert.train_row(d, loss_fn, engine.config.vocab_size) for d in data]
            return convert.train_output(
                engine.forward_backward(rows, adapter, loss_fn, backward, settings)
            )

        return self._call(work)

    def _call(self, work: Callable[[Engine, int], R]) -> APIFuture[R]:
        adapter = self._adapter
        future = self._model.worker.call(lambda engine: work(engine, adapter.result()))
        return AwaitableConcurrentFuture(future)


class SamplingClient(Ready):
    """Samples from frozen weights. Requests that wait together are sampled together."""

    _names = itertools.count()

    def __init__(self, model: _Model, adapter: Future[int] | None):
        self._model = model
        self._adapter = adapter
        self._name = f"sampler-{next(self._names)}"
        self._requests = itertools.count()

    @property
    def adapter(self) -> Future[int] | None:
        """What is sampled from, once it is there; None is the base model. Not of the SDK."""
        return self._adapter

    def sample(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        include_prompt_logprobs: bool = False,
    ) -> APIFuture[types.SampleResponse]:
        """Continuations of one prompt, with the log-probability of every token.

        include_prompt_logprobs: of the prompt's tokens, too.
        """
        name = f"{self._name}:{next(self._requests)}"
        # Asked first of the one thread that answers both, so it is there when the draws are.
        scored = self.compute_logprobs(prompt).future() if include_prompt_logprobs else None
        drawn = self._model.worker.sample(
            lambda engine: convert.sample_requests(prompt, sampling_params, num_samples, engine),
            self._adapter,
        )
        return then(
            drawn,
            lambda samples: convert.sample_response(samples, name, scored and scored.result()),
        )

    sample_async = awaited(sample)

    def compute_logprobs(self, prompt: types.ModelInput) -> APIFuture[list[float | None]]:
        """Log-probability of every token of a prompt; the first has none."""
        adapter = self._adapter

        def work(engine: Engine) -> list[float | None]:
            ids = convert.prompt_ids(prompt, engine.config.vocab_size)
            return [None, *engine.logprobs([ids], adapter.result() if adapter else None)[0]]

        return AwaitableConcurrentFuture(self._model.worker.call(work))

    compute_logprobs_async = awaited(compute_logprobs)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._model.tokenizer()

    def get_base_model(self) -> str:
        """Name of the base model."""
        return self._model.name

    get_base_model_async = twin(get_base_model)


class _Model:
    """A base model by name: its engine's thread, and adapters that live as long as their client."""

    def __init__(self, name: str, open_engine: Callable[[], Engine]):
        self.name = name
        self.worker = EngineThread(open_engine)
        self._tokenizer: Any = None

    def adapter(self, owner: object, make: Callable[[Engine], int]) -> Future[int]:
        """An adapter that is deleted once its owner is gone."""
        adapter = self.worker.call(make)
        weakref.finalize(owner, self.worker.forget, adapter).atexit = False
        return adapter

    def sampler(self, make: Callable[[Engine], int]) -> SamplingClient:
        """A sampling client with an adapter of its own."""
        adapter = self.worker.call(make)
        client = SamplingClient(self, adapter)
        weakref.finalize(client, self.worker.forget, adapter).atexit = False
        return client

    def sampler_of_folder(self, folder: Path) -> SamplingClient:
        """A sampling client on saved sampler weights."""
        return self.sampler(lambda engine: engine.load_adapter(folder / "adapter"))

    def tokenizer(self) -> Any:
        """The engine's tokenizer; blocks until the engine is open."""
        if self._tokenizer is None:
            self._tokenizer = self.worker.call(lambda engine: engine.tokenizer).result()
        return self._tokenizer

    def context(self) -> int:
        """Tokens that the model takes at most; blocks until the engine is open."""
        config = self.worker.call(lambda engine: engine.config).result()
        return config.max_position_embeddings
