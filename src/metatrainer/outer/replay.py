"""Recording what the agent samples, and answering from the record after a restart.

A wrapper around any Tinker service, hosted or in process: within an episode every sample is in the
ledger before the episode sees it, and a turn that is there already is not sampled again. So a run
that was killed goes on where it was, with the same tokens, and pays for nothing twice.

Knows nothing about what an episode does.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tinker import types

from metatrainer.errors import LedgerError
from metatrainer.ledger import Ledger, TurnRow
from metatrainer.outer.plan import derive

_TOGETHER = 0.002
"""Seconds that a sample may wait for others to be written with."""


@dataclass
class _Playing:
    episode: str
    turn: int = 0


_playing: ContextVar[_Playing | None] = ContextVar("playing", default=None)


def now_playing(episode: str) -> None:
    """Say that what this asyncio task samples from here on belongs to an episode."""
    _playing.set(_Playing(episode))


class Recorder:
    """The record of one run.

    decode: token ids -> text, for people who read the ledger.
    """

    def __init__(self, ledger: Ledger, seed: int, decode: Callable[[list[int]], str]):
        self._ledger = ledger
        self._seed = seed
        self._decode = decode
        self._known: dict[str, list[TurnRow]] = {}
        self._waiting: list[tuple[tuple, asyncio.Future[None]]] = []

    def recall(self, playing: _Playing, prompt: types.ModelInput) -> types.SampleResponse | None:
        """What this turn sampled before, if it did. Raises LedgerError if it does not fit."""
        if playing.episode not in self._known:
            self._known[playing.episode] = self._ledger.turns(playing.episode)
        turns = self._known[playing.episode]
        if playing.turn >= len(turns):
            return None
        row = turns[playing.turn]
        if row.prompt_tokens != prompt.length:
            raise LedgerError(
                f"turn {row.turn} of {row.episode} was sampled after {row.prompt_tokens} tokens, "
                f"now there are {prompt.length}: the run was begun with other settings or another "
                "version of metatrainer; go on with those, or start a new run"
            )
        return _response(row)

    async def keep(
        self, playing: _Playing, prompt: types.ModelInput, sampled: types.SampledSequence, s: float
    ) -> None:
        """Write a sample down; it is on disk after this. s: the seconds it took."""
        message = {
            "role": "assistant",
            "content": self._decode(sampled.tokens),
            "stop_reason": sampled.stop_reason,
        }
        row = (
            playing.episode,
            playing.turn,
            json.dumps(message),
            prompt.length,
            sampled.tokens,
            sampled.logprobs,
            s,
        )
        written = asyncio.get_running_loop().create_future()
        if not self._waiting:
            # Rollouts are sampled in batches: what arrives together is one write to the disk.
            asyncio.get_running_loop().call_later(_TOGETHER, self._write)
        self._waiting.append((row, written))
        await written

    def _write(self) -> None:
        waiting, self._waiting = self._waiting, []
        try:
            with self._ledger.transaction():
                for row, _ in waiting:
                    self._ledger.record_turn(*row)
        except Exception as error:
            failure: Exception | None = error
        else:
            failure = None
        for _, written in waiting:
            if written.done():
                continue  # its rollout was cancelled
            if failure:
                written.set_exception(failure)
            else:
                written.set_result(None)

    def seed(self, playing: _Playing) -> int:
        """The seed of a turn's sample, the same in every process."""
        return derive(self._seed, "sample", playing.episode, playing.turn)


class RecordingSampler:
    """A sampling client that records. Outside of episodes it is the client that it wraps."""

    def __init__(self, client: Any, recorder: Recorder):
        """client: a sampling client, or (as SDK 0.38 returns them) a future of one."""
        self._client = client
        self._recorder = recorder

    async def sample_async(
        self,
        prompt: types.ModelInput,
        num_samples: int,
        sampling_params: types.SamplingParams,
        **kwargs: Any,
    ) -> types.SampleResponse:
        """As the SDK's; within an episode from the record, or into it."""
        playing = _playing.get()
        if playing is None:
            client = await _ready(self._client)
            return await client.sample_async(prompt, num_samples, sampling_params, **kwargs)
        response = self._recorder.recall(playing, prompt)
        if response is None:
            response = await self._sample(playing, prompt, sampling_params)
        playing.turn += 1
        return response

    async def _sample(
        self, playing: _Playing, prompt: types.ModelInput, params: types.SamplingParams
    ) -> types.SampleResponse:
        began = time.monotonic()
        client = await _ready(self._client)
        seeded = params.model_copy(update={"seed": self._recorder.seed(playing)})
        response = await client.sample_async(prompt, 1, seeded)
        (sampled,) = response.sequences
        await self._recorder.keep(playing, prompt, sampled, time.monotonic() - began)
        return response

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class _RecordingTrainer:
    """A training client whose sampling clients record."""

    def __init__(self, client: Any, recorder: Recorder):
        self._client = client
        self._recorder = recorder

    def create_sampling_client(self, model_path: str) -> RecordingSampler:
        return RecordingSampler(self._client.create_sampling_client(model_path), self._recorder)

    async def save_weights_and_get_sampling_client_async(self) -> RecordingSampler:
        client = await self._client.save_weights_and_get_sampling_client_async()
        return RecordingSampler(client, self._recorder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class RecordingService:
    """A service whose sampling clients record, also those of its training clients."""

    def __init__(self, service: Any, recorder: Recorder):
        self._service = service
        self._recorder = recorder

    async def create_lora_training_client_async(self, *args: Any, **kwargs: Any) -> Any:
        return await self._trainer(self._service.create_lora_training_client_async, args, kwargs)

    async def create_training_client_from_state_async(self, *args: Any, **kwargs: Any) -> Any:
        create = self._service.create_training_client_from_state_async
        return await self._trainer(create, args, kwargs)

    async def create_training_client_from_state_with_optimizer_async(
        self, *args: Any, **kwargs: Any
    ) -> Any:
        create = self._service.create_training_client_from_state_with_optimizer_async
        return await self._trainer(create, args, kwargs)

    async def create_sampling_client_async(self, *args: Any, **kwargs: Any) -> RecordingSampler:
        client = await self._service.create_sampling_client_async(*args, **kwargs)
        return RecordingSampler(client, self._recorder)

    async def _trainer(self, create: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return _RecordingTrainer(await create(*args, **kwargs), self._recorder)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)


async def _ready(client: Any) -> Any:
    return await client if inspect.isawaitable(client) else client


def _response(row: TurnRow) -> types.SampleResponse:
    return types.SampleResponse(
        sequences=[
            types.SampledSequence(
                stop_reason=json.loads(row.message)["stop_reason"],
                sequence_id=f"{row.episode}:{row.turn}",
                _tokens_list=row.tokens,
                _logprobs_list=row.logprobs,
            )
        ]
    )
