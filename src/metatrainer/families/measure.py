"""How hard a family is for the students that can be had here: untrained, without tools, trained.

Everything is measured on the embedded engine, as a run's settings evaluate, with fixed seeds.
Knows nothing about agents or how anything is shown.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace

from metatrainer import by_hand
from metatrainer.agent import policies
from metatrainer.agent.scaffold import make_workspace
from metatrainer.agent.task import Task, draw_task
from metatrainer.chat import ChatFormat
from metatrainer.config import EvalSettings, RunSettings
from metatrainer.engine import AdamParams, Engine, TrainRow
from metatrainer.errors import JobError
from metatrainer.families.base import Family, Item
from metatrainer.families.check import CONSTANT, GUESS, Check, examine, same_elsewhere
from metatrainer.students import catalogue
from metatrainer.students.evaluate import evaluate
from metatrainer.students.score import Score

N = 256
"""Hidden items of each score."""
EASY, HARD = 0.50, 0.05
"""The best untrained student must score between them, at the level of the hidden evaluation."""
UPLIFT = 0.20
"""What the reference job must add to that."""
BLIND = "no tools"
_EXAMINED, _BLIND, _TRAINED = 11, 20, 30
"""About how long things take, in scores of an untrained student."""
TAUGHT_STEPS, TAUGHT_ROWS, TAUGHT_RATE, TAUGHT_RANK = 400, 64, 1e-3, 16
"""How a student is taught answers without tools; it finds a rule of four cases in 300 steps."""
_SEED = 0


def everything(
    family: Family, settings: RunSettings, *, train: bool
) -> Iterator[tuple[float, Check]]:
    """(share of the work that is done, check): all properties of a family, one by one.

    A family that is not sound is not measured. settings: students, limits and the like of a run;
    a score is of N items. train: run the reference job too. Raises SandboxUnavailable.
    """
    evaluation = settings.evaluation.model_copy(update={"items": N})
    settings = settings.model_copy(update={"evaluation": evaluation, "seed": _SEED})
    total = _EXAMINED + len(settings.students) * len(family.levels) + _BLIND + _TRAINED * train
    done, sound, chance = 0, True, 0.0
    for check in examine(family):
        done += 1
        sound &= check.ok is not False
        if check.name in (GUESS, CONSTANT):
            chance = max(chance, check.high or 0.0)
        yield done / total, check
    if sound:
        check = same_elsewhere(family)
        done += 1
        yield done / total, check
        sound = check.ok is True
    if sound:
        for check in measure(family, settings, chance, train=train):
            done += _BLIND if check.name == BLIND else 1
            yield min(1.0, done / total), check


def measure(
    family: Family, settings: RunSettings, chance: float, *, train: bool
) -> Iterator[Check]:
    """Checks that need students, one by one.

    chance: upper end of what a guess or a constant answer may score by luck.
    train: run the reference job too, which needs the sandbox.
    Raises SandboxUnavailable.
    """
    best: Score | None = None
    for student in settings.students:
        engine = Engine.open(catalogue.verified_folder(student), student)
        for level in family.levels:
            items = family.items("hidden", _SEED, N, level)
            try:
                score = evaluate(engine, None, family, items, settings.evaluation, _SEED)
            except JobError as error:
                yield Check(f"untrained {student}, level {level}", False, error.message)
                continue
            yield _score(f"untrained {student}, level {level}", score)
            if level == family.eval_level and (best is None or score.mean > best.mean):
                best = score
    if best is None:
        return
    yield _difficulty(best, family)
    yield _without_tools(family, best.student, chance, settings.evaluation)
    if train:
        yield _trained(family, best, settings)


def _score(name: str, score: Score, ok: bool | None = None, found: str = "") -> Check:
    return Check(name, ok, found, score.n, score.mean, score.low, score.high)


def _difficulty(best: Score, family: Family) -> Check:
    ok = HARD <= best.mean <= EASY
    found = f"{best.student}, level {family.eval_level}, wanted {HARD:.0%} to {EASY:.0%}"
    if best.mean < HARD:
        found += "; too hard: too few right answers to learn from"
    if best.mean > EASY:
        found += "; too easy: too little is left to learn"
    return _score("best untrained", best, ok, found)


def _without_tools(family: Family, student: str, chance: float, settings: EvalSettings) -> Check:
    """A student that was taught the answers to training questions, and has no tools.

    Taught by cross entropy on question and answer, so that whatever a question gives away of its
    answer is learnt.
    """
    blind = replace(family, tools=())
    engine = Engine.open(catalogue.verified_folder(student), student)
    adapter = engine.create_adapter(TAUGHT_RANK, alpha=2 * TAUGHT_RANK, seed=_SEED)
    rng = random.Random(_SEED)
    rows = [_taught(engine, item) for item in family.items("train", _SEED, 4 * N)]
    for _ in range(TAUGHT_STEPS):
        adam = AdamParams(TAUGHT_RATE, grad_clip_norm=1.0)
        engine.update(rng.sample(rows, TAUGHT_ROWS), adapter, "cross_entropy", adam)
    items = family.items("hidden", _SEED, N)
    score = evaluate(engine, adapter, blind, items, settings, _SEED)
    found = f"{student}, taught to answer without tools; chance is up to {chance:.3f}"
    return _score(BLIND, score, score.low <= chance, found)


def _taught(engine: Engine, item: Item) -> TrainRow:
    """The question as a prompt without tools, its answer as what is learnt."""
    chat = ChatFormat(engine.tokenizer)
    prompt = chat.prompt([{"role": "user", "content": item.prompt}])
    answer = chat.encode(item.answer + chat.end)
    whole = prompt + answer
    weight = 1 / (len(answer) * TAUGHT_ROWS)
    weights = [0.0] * (len(prompt) - 1) + [weight] * len(answer)
    return TrainRow(tokens=whole[:-1], targets=whole[1:], weights=weights)


def _trained(family: Family, best: Score, settings: RunSettings) -> Check:
    """The student that is best untrained, trained with the reference job on the same items."""
    name = f"trained {best.student}"
    task = draw_task(settings, family.name, _SEED, _SEED)
    trial = by_hand.Trial(settings, family.name, _SEED, task.rules)
    files = reference_job(task, best.student, settings)
    verdict = by_hand.check(files, trial)
    if verdict.spec is None or not verdict.ok:
        return Check(name, False, f"the reference job is refused: {verdict.findings[0].render()}")
    result = asyncio.run(by_hand.run(files, verdict.spec, trial, _SEED)).result
    if result.post is None:
        return Check(
            name, False, f"the reference job ended with {result.outcome}: {result.message}"
        )
    gained = result.post.mean - best.mean
    found = f"{gained:+.3f} by the reference job, wanted {UPLIFT:+.2f}"
    return _score(name, result.post, gained >= UPLIFT, found)


def reference_job(task: Task, student: str, settings: RunSettings) -> dict[str, str]:
    """What the reference agent submits once it is told that a student is the best."""
    workspace = make_workspace(task, settings)
    script = policies.reference(task, random.Random(_SEED))
    message = next(script)
    while (call := message["tool_calls"][0])["name"] != "submit_job":
        if call["name"] == "write_file":
            workspace.write(**call["arguments"])
        elif call["name"] == "edit_file":
            workspace.edit(**call["arguments"])
        message = script.send([{"role": "tool", "content": f"{student} 1.00"}])
    return workspace.submission()
