"""Whether an exported adapter is the agent of a run: its recorded samples, asked of peft again.

Reference is transformers with peft on the base model, which share nothing with the engine that
sampled. Knows nothing about what else is in the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metatrainer.agent import tools
from metatrainer.config import RunSettings
from metatrainer.errors import ConfigError, MetatrainerError
from metatrainer.ledger import Ledger, TurnRow

EPISODES = 3
TOLERANCE = 0.02
"""Nats between the two, on average, that 16-bit floats on a GPU explain."""


@dataclass(frozen=True)
class Verified:
    """How well recorded log-probabilities are reproduced, in nats a token."""

    episodes: list[str]
    tokens: int
    mean: float
    worst: float


def verify(settings: RunSettings, ledger: Ledger, step: int, folder: Path) -> Verified:
    """Compare the adapter in a folder with what the agent sampled after a step.

    Raises ConfigError where there is nothing to compare, and MetatrainerError where it is another
    agent.
    """
    if settings.agent.backend != "embedded":
        raise ConfigError(f"{settings.agent.model} is not on this machine to be asked again")
    played = _played(ledger, step, last=step == settings.outer.steps)
    if not played:
        raise ConfigError(f"no episode of the agent after step {step} is on record to verify it by")
    model, renderer = _load(settings, folder)
    gaps = [
        gap
        for episode in played
        for prompt, turn in _turns(ledger, episode, renderer)
        for gap in _gaps(model, prompt, turn)
    ]
    found = Verified(played, len(gaps), sum(gaps) / len(gaps), max(gaps))
    if found.mean > TOLERANCE:
        raise MetatrainerError(
            f"this adapter is not the agent that played {', '.join(played)}: its log-probabilities "
            f"are {found.mean:.3f} nats away on average, {TOLERANCE} at most can be rounding"
        )
    return found


def _played(ledger: Ledger, step: int, last: bool) -> list[str]:
    """Episodes in which the agent after a step was sampled."""
    rows = [
        *(row for row in ledger.episodes("heldout_after") if last),
        *(row for row in ledger.episodes("train") if row.step == step),
    ]
    return [row.id for row in rows if row.done and ledger.turns(row.id)][:EPISODES]


def _load(settings: RunSettings, folder: Path) -> tuple[Any, Any]:
    """The model with the adapter, in 32-bit floats, and the run's chat format."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from metatrainer.outer import renderer
    from metatrainer.students import catalogue

    base = catalogue.agent_folder(settings.agent.model)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    chat = renderer.get(settings.agent.renderer, tokenizer)
    return PeftModel.from_pretrained(model, folder).eval(), chat


def _turns(ledger: Ledger, episode: str, renderer: Any) -> Iterator[tuple[list[int], TurnRow]]:
    """Each turn of an episode with the prompt that it was sampled on."""
    from metatrainer.outer.conversation import Conversation

    messages = [json.loads(row.content) for row in ledger.messages(episode)]
    said = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    talk = Conversation(renderer, messages[: said[0]], tools.schemas())
    for turn, end in zip(ledger.turns(episode), [*said[1:], len(messages)]):
        yield talk.prompt.to_ints(), turn
        talk.hear(turn.tokens)
        talk.answer(messages[said[turn.turn] + 1 : end])


def _gaps(model: Any, prompt: list[int], turn: TurnRow) -> list[float]:
    """Differences of the log-probabilities of a turn's tokens."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *turn.tokens]])).logits[0, len(prompt) - 1 : -1]
    tokens = torch.tensor(turn.tokens)[:, None]
    found = logits.float().log_softmax(-1).gather(1, tokens)[:, 0]
    return (found - torch.tensor(turn.logprobs)).abs().tolist()
