"""An agent on its Tinker service, hosted or in this process, as a policy of single episodes.

It reads and writes the same tokens as in a run, through the same renderer. Knows nothing about
which adapter it samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tinker

from metatrainer.agent.policies import Message
from metatrainer.config import AgentSettings
from metatrainer.errors import AgentError, ContextFull
from metatrainer.outer.conversation import Conversation
from metatrainer.outer.service import Model
from metatrainer.shown import one_line


class Sampled:
    """The policy of one episode; many share a sampling client."""

    def __init__(self, model: Model, sampler: Any, settings: AgentSettings, seed: int):
        """sampler: of the adapter, or of the model without one."""
        self._model, self._sampler, self._settings = model, sampler, settings
        self._seed = seed
        self._talk: Conversation | None = None
        self._seen = 0

    async def act(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Message:
        """Sample the next message. Raises ContextFull, and AgentError if the service fails."""
        if self._talk is None:
            self._talk = Conversation(self._model.renderer, messages, tools)
        else:
            self._talk.answer(messages[self._seen + 1 :])
        self._seen = len(messages)
        tokens = await self._sample(self._talk.prompt)
        message = self._talk.hear(tokens)
        if self._settings.backend == "tinker":
            read = self._talk.prompt.length
            message["usage"] = {"prompt_tokens": read, "sampled_tokens": len(tokens)}
        return message

    async def _sample(self, prompt: tinker.ModelInput) -> list[int]:
        settings, context = self._settings, self._model.context
        if context is not None and prompt.length + settings.max_tokens > context:
            raise ContextFull(f"{prompt.length} tokens and a message do not fit into {context}")
        params = tinker.SamplingParams(
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            stop=self._model.renderer.get_stop_sequences(),
            seed=(self._seed + self._seen) % (1 << 31),
        )
        try:
            response = await self._sampler.sample_async(prompt, 1, params)
        except tinker.TinkerError as error:
            raise AgentError(f"the Tinker service failed: {one_line(str(error), 300)}") from None
        return list(response.sequences[0].tokens)
