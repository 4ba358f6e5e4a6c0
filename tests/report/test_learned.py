"""What an agent learned, from ledgers whose content is known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from metatrainer import families
from metatrainer.agent.scaffold import job_toml
from metatrainer.errors import ConfigError
from metatrainer.jobs.spec import parse_job_toml
from metatrainer.ledger import Ledger
from metatrainer.report.learned import ALL, learned, read_table
from metatrainer.report.submission import features, fingerprint

STARTER = families.get("persona").starter_files()
PACKAGE = "environment/__init__.py"


def job(student: str, rate: str = "3e-3", *edits: tuple[str, str]) -> dict[str, str]:
    """A submission: the starter's files, edited, and its job.toml."""
    text = STARTER[PACKAGE]
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    toml = job_toml(student, rate, batch_size=64, group_size=8, max_steps=20)
    return {**STARTER, PACKAGE: text, "job.toml": toml}


class Run:
    """A ledger, written episode by episode."""

    def __init__(self, folder: Path):
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.ledger.create_run("r", "nano", "{}", 0, {})
        for family in ("persona", "inventory"):
            self.ledger.add_task(family, family, "train", "{}")
        for student, score in (("nano-wren", 0.3), ("nano-finch", 0.1)):
            self.ledger.record_eval("baseline", student, "persona", 128, score, 0, 1, 1.0)
        self.n = 0

    def play(
        self,
        step: int,
        family: str,
        files: dict[str, str] | None,
        *,
        group: int = 0,
        quality: float = 0.0,
        refused: int = 0,
        phase: str = "train",
    ) -> None:
        """An episode with so many refused submissions, then a job or none."""
        self.n += 1
        id = f"e{self.n}"
        self.ledger.open_episode(id, phase, step, group, self.n, family)
        self.ledger.record_turn(id, 0, "{}", 9, [1, 2], [-0.25, -0.75], 1.0)
        for n in range(refused):
            self.ledger.record_attempt(id, n + 1, False, "{}", "{}", 0.0)
        student = None
        if files:
            spec = parse_job_toml(files["job.toml"])
            assert not isinstance(spec, list)
            student = spec.prime_rl.model
            self.ledger.record_attempt(id, refused + 1, True, "{}", json.dumps(files), 0.0)
            for attempt in (1, 2):  # lost once: still one job
                self.ledger.start_job(f"j{id}", id, attempt, student, spec.model_dump_json())
        self.ledger.finish_episode(
            id, float(files is not None), quality, 0, quality, "ok", None, None, student, 1.0
        )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    exact = ("self.data.answer in reply", "reply == self.data.answer")
    more = ("TASKS = 64", "TASKS = 256")
    made.play(0, "persona", job("nano-finch"), quality=0.2, refused=1)
    made.play(0, "persona", None, refused=3)
    made.play(0, "inventory", job("nano-finch", "1e-2"), group=1, quality=0.1)
    made.play(0, "inventory", job("nano-finch", "1e-2"), group=1, quality=0.1)
    made.ledger.finish_step(0, 0.1, "{}", 1.0)
    made.play(1, "persona", job("nano-wren", "1e-3", exact, more), quality=0.6)
    made.play(1, "persona", job("nano-wren", "3e-3", exact, more), quality=0.4)
    made.ledger.finish_step(1, 0.5, "{}", 1.0)
    made.play(2, "persona", None)  # of a step that is not done
    made.play(0, "persona", None, phase="play")
    return made


def test_the_two_rungs_are_apart(run: Run) -> None:
    first, second = learned(run.ledger).training()
    assert (first.step, first.family, first.episodes) == (0, ALL, 4)
    assert (first.valid, first.first_try, first.attempts) == (0.75, 0.5, 1.75)
    assert first.quality == pytest.approx(0.4 / 3), "of the jobs alone"
    assert (second.valid, second.first_try, second.quality) == (1.0, 1.0, 0.5)


def test_steps_and_families_have_their_own_cells(run: Run) -> None:
    found = learned(run.ledger)
    assert found.families == ["inventory", "persona"]
    assert [(c.step, c.valid) for c in found.training("persona")] == [(0, 0.5), (1, 1.0)]
    assert [c.step for c in found.training("inventory")] == [0]
    (inventory,) = found.training("inventory")
    assert (inventory.dead_groups, found.training()[0].dead_groups) == (1.0, 0.5)


def test_choices_settings_and_features_are_those_of_the_jobs(run: Run) -> None:
    found = learned(run.ledger)
    before, after = found.training("persona")
    assert (before.students, before.best_chosen) == ({"nano-finch": 1}, 0.0)
    assert (after.students, after.best_chosen) == ({"nano-wren": 2}, 1.0)
    assert found.training("inventory")[0].best_chosen is None, "nobody was measured there"
    assert after.settings == {
        "learning_rate": 0.002, "max_steps": 20, "batch_size": 64, "group_size": 8, "lora_rank": 16,
    }  # fmt: skip
    assert (before.tasks, before.exact, before.rewards, before.calls) == (64, 0.0, 1.0, 0.0)
    assert (after.tasks, after.exact, after.levels) == (256, 1.0, {"1": 2})
    assert found.training()[0].novelty == pytest.approx(2 / 3), "one came twice"
    assert after.entropy == 0.5


def test_what_a_table_says_is_best_counts(run: Run, tmp_path: Path) -> None:
    jobs = [
        {"family": "persona", "after": {"mean": mean}}
        if mean
        else {"family": "persona", "after": None}
        for mean in (0.9, None, 0.2)
    ]
    rows = [
        {"student": "nano-wren", "trained": jobs[2:]},
        {"student": "nano-finch", "trained": jobs[:2]},
    ]
    path = tmp_path / "students.json"
    path.write_text(json.dumps({"benchmark": "students", "rows": rows}))
    table = read_table(path)
    assert table == {"persona": {"nano-wren": 0.2, "nano-finch": 0.9}}
    shares = [cell.best_chosen for cell in learned(run.ledger, table).training("persona")]
    assert shares == [1.0, 0.0]


@pytest.mark.parametrize("text", ["", "[]", '{"rows": [{"student": "a"}]}', "{}"])
def test_another_file_is_no_table(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(ConfigError, match=r"students\.py prints one"):
        read_table(tmp_path / "t.json")
    with pytest.raises(ConfigError, match="cannot read"):
        read_table(tmp_path / "none.json")


def test_an_empty_ledger_has_nothing_to_say(tmp_path: Path) -> None:
    assert learned(Run(tmp_path).ledger).cells == []


def test_layout_and_comments_make_no_new_submission() -> None:
    files = job("nano-wren")
    commented = {**files, PACKAGE: "# mine\n\n" + files[PACKAGE].replace("    ", "  ")}
    lines = files["job.toml"].splitlines()
    moved = {**files, "job.toml": "\n".join([lines[0], *lines[5:0:-1], *lines[6:]])}
    assert fingerprint(commented) == fingerprint(moved) == fingerprint(files)
    assert fingerprint(job("nano-wren", "1e-3")) != fingerprint(files)
    assert fingerprint(job("nano-wren", "3e-3", ("TASKS = 64", "TASKS = 65"))) != fingerprint(files)


def test_features_of_an_environment_of_ones_own() -> None:
    text = """
import verifiers.v1 as vf
LEVELS = range(3)
class T(vf.Task):
    @vf.reward(weight=0.5)
    async def right(self, trace):
        return float(self.data.answer == trace.last_reply)
    @vf.reward
    async def used(self, trace):
        return float(any(m.tool_calls for m in trace.assistant_messages))
    async def helper(self, trace): ...
"""
    found = features({PACKAGE: text})
    assert (found.rewards, found.exact, found.calls) == (2, True, True)
    assert (found.tasks, found.levels) == (None, None)


@pytest.mark.parametrize("text", ["def f(:", "\0", "(" * 5_000, "TASKS = 'many'"])
def test_text_that_is_no_program_has_no_features(text: str) -> None:
    files = {PACKAGE: text, "job.toml": "["}
    assert features(files).tasks is None and features(files).rewards == 0
    assert fingerprint(files)
