"""A run's trained agent as a folder for others: adapter, model card, prompts, config, an example.

The adapter has PEFT's layout, all else comes from the run's ledger and its config. Knows nothing
about where the folder goes from here.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metatrainer import cards, families, folders
from metatrainer.agent import tools
from metatrainer.config import RunSettings
from metatrainer.errors import ConfigError, MetatrainerError
from metatrainer.ledger import Ledger
from metatrainer.outer import checkpoints
from metatrainer.outer.preflight import KEY
from metatrainer.report.summary import Summary, summarise
from metatrainer.report.text import duration, headline
from metatrainer.rundir import RunDir
from metatrainer.students import catalogue
from metatrainer.students.score import wilson
from metatrainer.verify import Verified, verify

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
PROMPTS, TOOLS = "prompts", "tools.json"


@dataclass(frozen=True)
class Checkpoint:
    """The agent after so many steps of a run."""

    step: int
    path: str
    """Where the service has it: tinker://..."""


def checkpoint(run: RunDir, step: int | None) -> Checkpoint:
    """The agent after a step, or the newest. Raises ConfigError where there is none."""
    saved = {
        record["batch"]: Checkpoint(record["batch"], record["sampler_path"])
        for record in checkpoints.records(run.path / "logs", "sampler_path")
    }
    if not saved:
        raise ConfigError(
            f"run {run.name} has no trained agent yet; go on with it: "
            f"metatrainer train --resume {run.path}"
        )
    step = max(saved) if step is None else step
    if step not in saved:
        there = f"{min(saved)} to {max(saved)}" if len(saved) > 1 else str(max(saved))
        raise ConfigError(f"run {run.name} has no agent after step {step}; there is {there}")
    return saved[step]


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: list[Path]
    """In the folder."""
    verified: Verified | None


def export(run: RunDir, found: Checkpoint, out: Path, *, verified: bool = False) -> Exported:
    """Write an agent's folder, whole or not at all.

    verified: compare the adapter with what the run recorded, see `verify`. Raises ConfigError for a
    folder that holds something and a checkpoint that is gone.
    """
    settings = run.settings
    with folders.whole(out) as folder:
        _write_adapter(run, settings, found.path, folder)
        with Ledger(run.ledger, readonly=True) as ledger, ledger.transaction():
            summary, prompts = summarise(ledger), _prompts(ledger)
            row = ledger.run()
            assert row is not None  # a summary was made of it
            compared = verify(settings, ledger, found.step, folder) if verified else None
        _write_prompts(prompts, folder / PROMPTS)
        shutil.copyfile(run.config, folder / run.config.name)
        versions = json.loads(row.versions)
        texts = {
            "README.md": _card(settings, summary, found, versions),
            "example.py": _example(settings, list(prompts)),
        }
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    files = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())
    return Exported(files, compared)


def _write_adapter(run: RunDir, settings: RunSettings, path: str, folder: Path) -> None:
    if settings.agent.backend == "tinker":
        _download(settings.agent.model, path, folder)
        return
    import tinker

    from metatrainer.tinker.checkpoints import CheckpointStore

    try:
        saved, _ = CheckpointStore(run.path / "checkpoints").find(path)
    except tinker.NotFoundError as error:
        raise ConfigError(str(error)) from None
    for name in ADAPTER:
        shutil.copyfile(saved / "adapter" / name, folder / name)


def _download(model: str, path: str, folder: Path) -> None:
    """Fetch an adapter from the hosted service and rename its tensors as PEFT has them."""
    from tinker_cookbook import weights
    from tinker_cookbook.exceptions import WeightsError

    if not os.environ.get(KEY):
        raise ConfigError(f"the agent is on hosted Tinker; set its API key in {KEY}")
    raw, converted = folder / ".tinker", folder / ".peft"
    try:
        weights.download(tinker_path=path, output_dir=str(raw))
        weights.build_lora_adapter(
            base_model=model, adapter_path=str(raw), output_path=str(converted)
        )
    except (WeightsError, OSError) as error:
        raise MetatrainerError(f"cannot fetch {path}: {error}") from error
    for name in ADAPTER:
        os.replace(converted / name, folder / name)
    for left in (raw, converted):
        shutil.rmtree(left)


# The first message of the first episode of each family.
_PROMPTS = """
SELECT family, content, min(episode.rowid)
FROM message JOIN episode ON episode.id = message.episode JOIN task ON task.id = episode.task
WHERE message.n = 0 GROUP BY family ORDER BY min(episode.rowid)
"""


def _prompts(ledger: Ledger) -> dict[str, str]:
    """What the agent was told, once for each family."""
    return {family: json.loads(text)["content"] for family, text, _ in ledger.query(_PROMPTS)}


def _write_prompts(prompts: dict[str, str], folder: Path) -> None:
    folder.mkdir()
    for family, text in prompts.items():
        (folder / f"{family}.md").write_text(text, encoding="utf-8")
    (folder / TOOLS).write_text(json.dumps(tools.schemas(), indent=2) + "\n", encoding="utf-8")


def _card(
    settings: RunSettings, summary: Summary, found: Checkpoint, versions: dict[str, str]
) -> str:
    agent = settings.agent
    terms = summary.terms
    shown = [i for i, step in enumerate(summary.reward.steps) if step < found.step]
    low, high = wilson(settings.evaluation.items // 2, settings.evaluation.items)
    return cards.render(
        "agent.md.j2",
        run=summary.run,
        step=found.step,
        planned=settings.outer.steps,
        last=found.step == settings.outer.steps,
        checkpoint=found.path,
        base=agent.model,
        hub_base=agent.backend == "tinker",
        sha256=_hash(settings),
        rank=agent.lora_rank,
        start=agent.start and Path(agent.start).name,
        seed=settings.seed,
        versions=versions,
        headline=headline(summary),
        families=_families(settings),
        students=settings.students,
        reward=settings.reward,
        curve=[
            {
                "step": summary.reward.steps[i],
                "reward": summary.reward.per_step[i],
                "validation": terms["validation"].per_step[i],
                "quality": terms["quality"].per_step[i],
                "episodes": len(summary.reward.episodes[i]),
            }
            for i in shown
        ],
        heldout=summary.heldout,
        duration=duration(summary.seconds),
        jobs=summary.jobs,
        spending=summary.spending,
        items=settings.evaluation.items,
        error=100 * (high - low) / 2,
    )


def _example(settings: RunSettings, played: list[str]) -> str:
    agent = settings.agent
    return cards.render(
        "example.py.j2",
        families=played or list(settings.families),
        base=agent.model,
        shipped=agent.backend == "embedded",
        nano=agent.renderer == "nano",
        max_tokens=agent.max_tokens,
        temperature=agent.temperature,
    )


def _families(settings: RunSettings) -> list[dict[str, Any]]:
    parts = {"trained on": settings.families, "held out": settings.heldout}
    found = [(families.get(name), part) for part, names in parts.items() for name in names]
    return [{"name": family.name, "goal": family.goal, "part": part} for family, part in found]


def _hash(settings: RunSettings) -> str | None:
    """Hash of the base model's weights, where they are here."""
    if settings.agent.backend == "tinker":
        return None
    return catalogue.sha256(catalogue.agent_folder(settings.agent.model))
