"""Rollouts: students answer questions in one batch, calling tools over several turns.

The same loop serves training and the hidden evaluation. Knows families' tools and the chat format;
knows nothing about rewards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from metatrainer.chat import ChatFormat, Turn
from metatrainer.engine import Engine, Lane, SamplingParams
from metatrainer.errors import JobError
from metatrainer.families import Family


@dataclass(frozen=True)
class Question:
    """What one rollout starts from."""

    prompt: str
    world: Mapping[str, Any]
    system: str = ""


@dataclass
class Rollout:
    """One conversation: token ids as sampled, and the same as messages."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    """All ids after the prompt, the student's and the tools'."""
    logprobs: list[float] = field(default_factory=list)
    """Log-probability of each sampled id; 0 for ids that were not sampled."""
    sampled: list[bool] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    """OpenAI-style, without the system message."""
    finished: bool = False
    """The student ended by itself with a reply that calls no tool."""

    @property
    def reply(self) -> str:
        """The final answer; empty if the student never gave one."""
        return self.messages[-1]["content"] if self.finished else ""


@dataclass(frozen=True)
class Limits:
    """How far one rollout may go."""

    max_turns: int
    max_tokens: int
    """Of one message."""
    temperature: float = 1.0


def roll_out(
    engine: Engine | Lane,
    adapter: int | None,
    family: Family,
    questions: Sequence[Question],
    limits: Limits,
    seeds: list[int],
) -> list[Rollout]:
    """One rollout for each question, all in one batch. `seeds` makes each reproducible alone.

    Raises JobError("context") for a prompt that leaves the student no room to reply.
    """
    chat = ChatFormat(engine.tokenizer)
    schemas = [tool.schema for tool in family.tools]
    rollouts = []
    for question in questions:
        system = [{"role": "system", "content": question.system}] if question.system else []
        messages = [{"role": "user", "content": question.prompt}]
        rollouts.append(Rollout(chat.prompt([*system, *messages], schemas), messages=messages))
    longest = max(len(r.prompt) for r in rollouts)
    if longest + limits.max_tokens >= engine.config.max_position_embeddings:
        raise JobError(
            "context",
            f"a prompt of {longest} tokens and a reply of up to {limits.max_tokens} do not fit "
            f"into the student's {engine.config.max_position_embeddings}; shorten the prompt",
        )
    params = SamplingParams(limits.max_tokens, limits.temperature, stop=chat.stop)
    decoder = engine.decoder(adapter, seeds)
    engine.feed(decoder, [r.prompt for r in rollouts])
    active = list(range(len(rollouts)))
    for turn_number in range(limits.max_turns):
        heard: dict[int, list[int]] = {}
        for i, sample in zip(active, engine.sample_turn(decoder, params)):
            rollout = rollouts[i]
            _append(rollout, sample.tokens, sample.logprobs)
            turn = chat.parse(sample.tokens)
            rollout.messages.append(_assistant(turn))
            results = _results(family, questions[i].world, turn)
            rollout.finished = turn.clean and not results
            if turn.clean and results and turn_number + 1 < limits.max_turns:
                answers = [{"role": "tool", "content": r} for r in results]
                heard[i] = chat.continuation(answers)
                rollout.messages += answers
        fits = {i: ids for i, ids in heard.items() if _fits(engine, rollouts[i], ids, limits)}
        if not fits:
            break
        decoder.keep([seat for seat, i in enumerate(active) if i in fits])
        active = [i for i in active if i in fits]
        engine.feed(decoder, [fits[i] for i in active])
        for i in active:
            _append(rollouts[i], fits[i], None)
    return rollouts


def _append(rollout: Rollout, tokens: list[int], logprobs: list[float] | None) -> None:
    rollout.tokens += tokens
    rollout.logprobs += logprobs if logprobs is not None else [0.0] * len(tokens)
    rollout.sampled += [logprobs is not None] * len(tokens)


def _assistant(turn: Turn) -> dict[str, Any]:
    calls = [{"name": c.name, "arguments": c.arguments} for c in turn.calls]
    return {"role": "assistant", "content": turn.text, **({"tool_calls": calls} if calls else {})}


def _results(family: Family, world: Mapping[str, Any], turn: Turn) -> list[str]:
    """Answers to a message's tool calls, malformed ones included."""
    answers = [family.call(world, call.name, call.arguments) for call in turn.calls]
    return answers + [f"error: {problem}" for problem in turn.errors]


def _fits(engine: Engine | Lane, rollout: Rollout, ids: list[int], limits: Limits) -> bool:
    used = len(rollout.prompt) + len(rollout.tokens) + len(ids)
    return used + limits.max_tokens < engine.config.max_position_embeddings
