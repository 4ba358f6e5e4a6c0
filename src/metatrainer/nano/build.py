"""The recipe of the nano models: conversations, tokenizer, two students and a trainer agent.

`build` makes them from nothing, seeded; `check` measures them. On one H200 pretraining takes about
five minutes; the conversations take a few minutes of two CPU cores and need the sandbox.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from metatrainer import chat, families
from metatrainer.agent import tools
from metatrainer.agent.policies import Message
from metatrainer.chat import ChatFormat
from metatrainer.config import EvalSettings, RunSettings
from metatrainer.engine import Engine
from metatrainer.engine.files import save_model
from metatrainer.engine.model import ModelConfig
from metatrainer.errors import ConfigError
from metatrainer.families import Family
from metatrainer.inner.rollout import Limits, Question, roll_out
from metatrainer.nano import corpus
from metatrainer.nano.pretrain import PretrainSettings, pretrain
from metatrainer.nano.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer
from metatrainer.nano.traces import (
    HABITS,
    NO_TOOLS,
    Skill,
    Trace,
    student_messages,
    student_traces,
)
from metatrainer.students.catalogue import sha256
from metatrainer.students.evaluate import evaluate

Say = Callable[[str], None]

VOCABULARY = 1152
CONVERSATIONS = 3000
"""Conversations that the agent is pretrained on; corpus.jsonl.gz beside the models keeps them."""
STUDENT_TRACES = 160_000
CORPUS = "corpus.jsonl.gz"
TOKENIZER = "tokenizer"
CHECK_ITEMS = 256


Size = tuple[int, int, int, int]
"""Hidden size, layers, heads, context."""


@dataclass(frozen=True)
class StudentRecipe:
    """One student: its size, and what it is shown of each family."""

    name: str
    size: Size
    skills: dict[str, Skill]
    pretraining: PretrainSettings


STUDENTS = (
    StudentRecipe(
        "nano-wren",
        size=(80, 2, 2, 512),
        skills={
            "persona": Skill(share=0.25, right=0.12, lazy=0.3),
            "inventory": Skill(share=0.06, right=0.01, lazy=0.9),
            "ledger": Skill(share=0.30, right=0.18, lazy=0.3),
            "routes": Skill(share=0.06, right=0.01, lazy=0.9),
            "calendar": Skill(share=0.08, right=0.02, lazy=0.9),
            "triage": Skill(share=0.25, right=0.12, lazy=0.3),
        },
        pretraining=PretrainSettings(steps=6000, batch=256, learning_rate=4e-3, seed=1),
    ),
    StudentRecipe(
        "nano-finch",
        size=(80, 2, 4, 512),
        skills={
            "persona": Skill(share=0.06, right=0.01, lazy=0.9),
            "inventory": Skill(share=0.22, right=0.07, lazy=0.4),
            "ledger": Skill(share=0.08, right=0.02, lazy=0.9),
            "routes": Skill(share=0.20, right=0.07, lazy=0.4),
            "calendar": Skill(share=0.24, right=0.15, lazy=0.3),
            "triage": Skill(share=0.20, right=0.05, lazy=0.5),
        },
        pretraining=PretrainSettings(steps=6000, batch=256, learning_rate=3e-3, seed=2),
    ),
)
AGENT = "nano-agent"
AGENT_SIZE: Size = (128, 4, 4, 2048)
AGENT_PRETRAINING = PretrainSettings(steps=3000, batch=16, learning_rate=2e-3, seed=3)
NAMES = (*(recipe.name for recipe in STUDENTS), AGENT)


def build(out: Path, device: str, seed: int, say: Say) -> None:
    """Make everything that is not there yet below `out`, and the manifest.

    To make a model again, delete its folder first; to start over, delete `out`.
    """
    conversations = _conversations(out, seed, say)
    if not (out / TOKENIZER / "tokenizer.json").exists():
        say("tokenizer")
        tokenizer = train_tokenizer(_texts(conversations, seed), VOCABULARY)
        save_tokenizer(tokenizer, out / TOKENIZER, AGENT_SIZE[3])
    for name in NAMES:
        if not (out / name / "model.safetensors").exists():
            build_model(name, out, device, seed, say)
    _write_manifest(out)


def build_model(name: str, out: Path, device: str, seed: int, say: Say) -> None:
    """Pretrain one of NAMES, once the conversations and the tokenizer are there."""
    chat_format = ChatFormat(load_tokenizer(out / TOKENIZER))
    if name == AGENT:
        traces = [corpus.agent_trace(c, chat_format) for c in _conversations(out, seed, say)]
        traces = [t for t in traces if len(t.tokens) <= AGENT_SIZE[3]]
        _make(out, name, AGENT_SIZE, traces, AGENT_PRETRAINING, device, say)
    else:
        recipe = next(r for r in STUDENTS if r.name == name)
        traces = student_traces(recipe.skills, STUDENT_TRACES, seed, chat_format)
        _make(out, name, recipe.size, traces, recipe.pretraining, device, say)


def _make(
    out: Path,
    name: str,
    size: Size,
    traces: list[Trace],
    settings: PretrainSettings,
    device: str,
    say: Say,
) -> None:
    """Pretrain one model on traces and write its folder."""
    tokenizer = load_tokenizer(out / TOKENIZER)
    config = model_config(size, len(tokenizer))
    lengths = sorted(len(t.tokens) for t in traces)
    say(f"{name}: {len(traces)} sequences, median {lengths[len(lengths) // 2]} tokens")

    def on_step(step: int, loss: float, seconds: float) -> None:
        left = seconds / max(1, step) * (settings.steps - step)
        say(f"{name}: step {step} of {settings.steps}, loss {loss:.3f}, {left:.0f} s left")

    weights = pretrain(config, traces, settings, device, on_step)
    save_model(out / name, config, weights)
    save_tokenizer(tokenizer.backend_tokenizer, out / name, config.max_position_embeddings)


def model_config(size: Size, vocabulary: int) -> ModelConfig:
    """A nano model's config; the vocabulary is rounded up to a multiple of 64."""
    hidden_size, layers, heads, context = size
    return ModelConfig(
        vocab_size=-(-vocabulary // 64) * 64,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=context,
    )


def _conversations(out: Path, seed: int, say: Say) -> list[list[Message]]:
    path = out / CORPUS
    if not path.exists():
        settings = RunSettings(students=tuple(recipe.name for recipe in STUDENTS))
        found = corpus.conversations_now(settings, CONVERSATIONS, seed, say)
        path.parent.mkdir(parents=True, exist_ok=True)
        with gzip.GzipFile(path, "wb", mtime=0) as file:
            file.write("".join(json.dumps(line) + "\n" for line in found).encode())
    with gzip.open(path, "rt") as file:
        return [json.loads(line) for line in file]


def _texts(conversations: list[list[Message]], seed: int) -> Iterator[str]:
    """What the tokenizer learns its merges from."""
    rng = random.Random(seed)
    yield chat.system_text("", tools.schemas())
    for conversation in conversations[::10]:
        for message in conversation:
            yield chat.QWEN.turn(message["role"], corpus.said(message))
    for name in families.NAMES:
        family = families.get(name)
        yield chat.system_text("", [tool.schema for tool in family.tools])
        for level in family.levels:
            for item in family.items("train", seed, 1500, level):
                yield item.prompt
                habit = rng.choice([None, NO_TOOLS, *HABITS[name]])
                for said, heard in student_messages(family, item, rng, habit):
                    yield said
                    yield heard or ""


def _write_manifest(out: Path) -> None:
    entries = []
    for name, role in [(r.name, "student") for r in STUDENTS] + [(AGENT, "agent")]:
        engine = Engine(out / name)
        entries.append(
            {
                "name": name,
                "role": role,
                "parameters": engine.base.count,
                "sha256": sha256(out / name),
            }
        )
    (out / "manifest.json").write_text(json.dumps(entries, indent=2) + "\n")


def check(models: Path, say: Say) -> list[dict[str, object]]:
    """Measure every student on every family and level, untrained; prints and returns the rows.

    score: share of right replies at temperature 1. called: share of first messages that call a
    tool. argument: share of those calls whose name argument is the one in the question, which is
    what little models find hardest.
    """
    rows: list[dict[str, object]] = []
    for recipe in STUDENTS:
        if not (models / recipe.name).exists():
            raise ConfigError(f"no {recipe.name} in {models}; make it with: metatrainer nano build")
        engine = Engine(models / recipe.name)
        for name in families.NAMES:
            family = families.get(name)
            called, argument = right_arguments(engine, family)
            for level in family.levels:
                items = family.items("hidden", 0, CHECK_ITEMS, level)
                score = evaluate(engine, None, family, items, EvalSettings(), 0)
                rows.append(
                    {
                        "student": recipe.name,
                        "family": name,
                        "level": level,
                        "n": CHECK_ITEMS,
                        "score": score.mean,
                        "low": score.low,
                        "high": score.high,
                        "called": called,
                        "argument": argument,
                    }
                )
                say(
                    f"{recipe.name:11} {name:10} level {level}: {score.mean:.2f} "
                    f"[{score.low:.2f}, {score.high:.2f}]  called {called:.2f}  "
                    f"right argument {argument:.2f}"
                )
    return rows


def right_arguments(engine: Engine, family: Family) -> tuple[float, float]:
    """(share of first messages that call a tool, share of those with the question's name)."""
    items = family.items("hidden", 1, CHECK_ITEMS)
    questions = [Question(item.prompt, item.world) for item in items]
    rollouts = roll_out(engine, None, family, questions, Limits(1, 64), list(range(CHECK_ITEMS)))
    called = right = 0
    for item, rollout in zip(items, rollouts):
        calls = rollout.messages[1].get("tool_calls")
        if calls:
            called += 1
            wanted = next(iter(item.calls[0][1].values()))
            right += wanted in calls[0]["arguments"].values()
    return called / CHECK_ITEMS, right / max(1, called)
