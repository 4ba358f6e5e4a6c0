"""A verifiers harness that runs a family's tools in its own process: no server for a rollout.

prime-rl names it metatrainer_harness. Trusted code: the job brings tasks and rewards, the tools are
the family's. Knows nothing about training.
"""

from __future__ import annotations

from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.runtimes import ProgramResult

from metatrainer import families
from metatrainer.inner.talk import BadAnswer, Message, talk, tool_schemas

REFUSED = 400
"""Status with which verifiers ends a rollout: out of turns, or stopped by the task."""


class FamilyHarnessConfig(HarnessConfig):
    """What a config says of the harness beside its id."""

    family: str
    """Family whose tools the student has."""


class FamilyHarness(vf.Harness[FamilyHarnessConfig]):
    """The student talks to its server through verifiers; the family's tools answer it here."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """One rollout. A server that fails, and a task without a world, are a failed program."""
        family = families.get(self.config.family)
        system, prompt = self.resolve_text_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(headers=headers, timeout=None) as client:

            async def ask(messages: list[Message]) -> Any:
                body = {"model": ctx.model, "messages": messages, "tools": tool_schemas(family)}
                answer = await client.post(f"{endpoint}/chat/completions", json=body)
                if answer.status_code == REFUSED and trace.stop_condition is not None:
                    return None
                answer.raise_for_status()
                return answer.json()

            try:
                await talk(ask, family, data.world, messages)
            except (httpx.HTTPError, ValueError, BadAnswer, AttributeError) as error:
                return ProgramResult(1, "", f"{type(error).__name__}: {error}")
        return ProgramResult(0, "", "")


__all__ = ["FamilyHarness", "FamilyHarnessConfig"]
