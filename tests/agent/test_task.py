from __future__ import annotations

import json
import re

import pytest

from metatrainer import families
from metatrainer.agent import instructions
from metatrainer.agent.scaffold import ENVIRONMENT, JOB, make_workspace
from metatrainer.agent.task import draw_task
from metatrainer.config import AgentSettings, LimitSettings, RunSettings
from metatrainer.errors import ConfigError
from metatrainer.jobs.spec import TrainingSpec
from metatrainer.reward import RewardConfig

SETTINGS = RunSettings()


def test_a_task_is_drawn_the_same_again() -> None:
    assert draw_task(SETTINGS, "persona", 3, 99) == draw_task(SETTINGS, "persona", 3, 99)
    one, other = draw_task(SETTINGS, "persona", 3, 99), draw_task(SETTINGS, "persona", 4, 99)
    assert one.dev != other.dev
    assert one.rules.hidden == other.rules.hidden
    assert one.id != other.id


def test_hidden_items_come_from_the_hidden_seed_alone() -> None:
    one, other = draw_task(SETTINGS, "persona", 3, 99), draw_task(SETTINGS, "persona", 3, 98)
    assert one.dev == other.dev
    assert len(one.rules.hidden) == SETTINGS.evaluation.items
    worlds = [item.world for item in other.rules.hidden]
    assert not [item for item in one.rules.hidden if item.world in worlds]


def test_the_recorded_task_names_split_and_examples_but_nothing_hidden() -> None:
    task = draw_task(SETTINGS, "triage", 3, 987_654_321)
    assert (task.split, draw_task(SETTINGS, "persona", 3, 1).split) == ("heldout", "train")
    assert json.loads(task.spec_json)["dev"] == [item.prompt for item in task.dev]
    assert "987654321" not in task.spec_json
    assert not [i for i in task.rules.hidden if i.prompt in task.spec_json]


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(ConfigError, match="persona"):
        draw_task(SETTINGS, "persona1", 0, 0)


@pytest.mark.parametrize("family", families.NAMES)
def test_instructions_tell_the_task_and_stay_short(family: str) -> None:
    task = draw_task(SETTINGS, family, 3, 99)
    text = instructions.render(task, SETTINGS)
    assert task.family.goal in text
    for item in task.dev:
        assert item.prompt in text
        assert f"Right reply: {item.answer}" in text
    for tool in task.family.tools:
        assert f"{tool.name}({', '.join(tool.parameters['properties'])})" in text
    for key in TrainingSpec.model_fields:
        assert re.search(rf"^{key}: ", text, re.MULTILINE)
    for student in SETTINGS.students:
        assert student in text
    assert not [item for item in task.rules.hidden if item.prompt in text]
    assert 200 < len(text.split()) < 420
    assert max(map(len, text.splitlines())) < 240


def test_instructions_follow_the_settings() -> None:
    settings = RunSettings(
        reward=RewardConfig(uplift=1.2, absolute=0.8),
        limits=LimitSettings(max_attempts=7, max_rollouts=999, max_seconds=12.5),
        agent=AgentSettings(max_turns=13),
        students=("nano-owl",),
    )
    text = instructions.render(draw_task(settings, "persona", 3, 99), settings)
    assert "60% x (score after - best untrained score) + 40% x score after" in text
    assert "At most 7 submissions and 13 messages" in text
    assert "at most 999" in text
    assert "12.5 seconds" in text
    assert "model: nano-owl" in text
    default = instructions.render(draw_task(SETTINGS, "persona", 3, 99), SETTINGS)
    assert "75% x (score after - best untrained score) + 25% x score after" in default


def test_the_starter_holds_an_environment_and_no_job() -> None:
    """What is trained, and how, is the agent's to write."""
    task = draw_task(SETTINGS, "persona", 3, 99)
    files = make_workspace(task, SETTINGS).submission()
    assert ENVIRONMENT in files
    assert JOB not in files


def test_the_bare_scaffold_holds_the_instructions_alone() -> None:
    settings = RunSettings(agent=AgentSettings(scaffold="bare"))
    workspace = make_workspace(draw_task(settings, "persona", 3, 99), settings)
    assert workspace.paths() == ["INSTRUCTIONS.md"]
    assert workspace.submission() == {}
