"""How long a job's conversations are in its student's own tokens, and what the job would take.

Knows tokenizers and the chat format; runs no submitted code and no model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from metatrainer.chat import ChatFormat, call_text
from metatrainer.families import Family
from metatrainer.jobs.findings import Finding
from metatrainer.jobs.probes import Message, Probe
from metatrainer.jobs.spec import JOB_FILE, JobSpec
from metatrainer.sandbox.host import TaskRow
from metatrainer.students import catalogue


@dataclass(frozen=True)
class Estimate:
    """What a job would take, before it is run."""

    rollouts: int
    prompt_tokens: int
    """Of all its rollouts' prompts."""
    tokens: int
    """About how many tokens its rollouts have in all, if the student works like a right one."""
    most_tokens: int
    """Of all its rollouts, if each is as long as seq_len lets it take part in training."""


@dataclass(frozen=True)
class Lengths:
    """In tokens of the student."""

    context: int
    """What the student can read at once."""
    prompt: float
    """Mean of the prompts, with the tools in them."""
    longest_prompt: int
    whole: float
    """Mean of whole conversations that end right."""
    longest_message: int
    """Of those that a right student writes."""

    def fault(self, spec: JobSpec, package: str) -> Finding | None:
        """A prompt that leaves no room for a reply."""
        room = self.context - spec.prime_rl.max_tokens
        if self.longest_prompt < room:
            return None
        found = f"a prompt has {self.longest_prompt} tokens"
        allowed = f"under {room}: the context of {self.context} less max_tokens"
        return Finding("E-CONTEXT", package, None, found, allowed, "shorten the prompts")

    def warnings(self, spec: JobSpec) -> list[Finding]:
        """Messages that are cut off, and conversations too long to be trained on."""
        s = spec.prime_rl
        found = []
        if self.longest_message > s.max_tokens:
            said = f"max_tokens = {s.max_tokens} cuts messages off that a right student writes"
            allowed = f"{self.longest_message} tokens are needed"
            found.append(Finding("W-CUT", JOB_FILE, None, said, allowed, "raise max_tokens"))
        if self.whole > s.seq_len:
            said = f"seq_len = {s.seq_len} leaves conversations out of training"
            allowed = f"a right one has {self.whole:.0f} tokens"
            found.append(Finding("W-SEQ", JOB_FILE, None, said, allowed, "raise seq_len"))
        return found

    def estimate(self, spec: JobSpec) -> Estimate:
        """Tokens of the whole job."""
        n = spec.rollouts
        most = max(spec.prime_rl.seq_len, self.longest_prompt)
        return Estimate(n, round(n * self.prompt), round(n * self.whole), n * most)


def measure(
    spec: JobSpec, family: Family, rows: list[TaskRow], asked: list[Probe]
) -> Lengths | None:
    """Lengths of a job's prompts, and of the right conversations among the probes.

    None for a student whose files are not here.
    """
    found = _student(spec.prime_rl.model)
    if found is None:
        return None
    chat, context = found
    tools = [tool.schema for tool in family.tools]
    prompts = [len(chat.prompt(_begin(row), tools)) for row in rows]
    right = [probe for probe in asked if probe.kind == "right"]
    said = [_said(chat, message) for p in right for message in p.messages]
    heard = [_heard(chat, message) for p in right for message in p.messages]
    whole = fmean(prompts) + (sum(said) + sum(heard)) / len(right)
    return Lengths(context, fmean(prompts), max(prompts), whole, max(said))


def _begin(row: TaskRow) -> list[dict[str, Any]]:
    system = [{"role": "system", "content": row.system_prompt}] if row.system_prompt else []
    return [*system, {"role": "user", "content": row.prompt}]


def _said(chat: ChatFormat, message: Message) -> int:
    """Tokens that a student writes for a message of its own."""
    if message["role"] != "assistant":
        return 0
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    texts = [message["content"], *(call_text(c["name"], c["arguments"]) for c in calls)]
    return len(chat.encode("\n".join(filter(None, texts)) + chat.end))


def _heard(chat: ChatFormat, message: Message) -> int:
    """Tokens of a tool's result and what stands around it."""
    return len(chat.continuation([message])) if message["role"] == "tool" else 0


@lru_cache(maxsize=16)
def _student(name: str) -> tuple[ChatFormat, int] | None:
    """The chat format of a student, and its context."""
    path = catalogue.get(name).folder
    if not path.exists():
        return None
    if path.is_dir():
        # Without transformers, which takes seconds to import.
        from tokenizers import Tokenizer

        config = json.loads(Path(path, "config.json").read_text())
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        return ChatFormat(tokenizer), int(config["max_position_embeddings"])
    from metatrainer.engine.files import load_tokenizer
    from metatrainer.engine.gguf_file import read_gguf

    raw, _ = read_gguf(path)
    return ChatFormat(load_tokenizer(path)), int(raw["max_position_embeddings"])
