"""One job cannot see or change the next one through the validator and its warm sandbox."""

from __future__ import annotations

import asyncio

import pytest

from metatrainer.agent.scaffold import ENVIRONMENT, JOB, job_toml
from metatrainer.agent.task import draw_task
from metatrainer.agent.validator import Validator
from metatrainer.config import RunSettings
from metatrainer.jobs.validate import Verdict

RULES = draw_task(RunSettings(), "persona", 0, 5).rules
STARTER = RULES.family.starter_files()
GOOD = {
    **STARTER,
    JOB: job_toml("nano-wren", "1e-3", batch_size=64, group_size=8, max_steps=5),
}
LEAVE = """
import builtins, json, os, pathlib, subprocess, sys
import verifiers.v1
builtins.left = sys.left = verifiers.v1.left = "x"
os.environ["LEFT"] = "x"
for folder in ("/tmp", "/dev/shm"):
    pathlib.Path(folder, "left").write_text("x")
subprocess.Popen(["/bin/sleep", "60"])
"""
LOOK = """
import builtins, os, sys
import verifiers.v1
names = [hasattr(place, "left") for place in (builtins, sys, verifiers.v1)]
files = [file for folder in ("/tmp", "/dev/shm") for file in os.listdir(folder) if file == "left"]
others = [pid for pid in os.listdir("/proc") if pid.isdigit() and int(pid) not in (1, os.getpid())]
known = "LEFT" in os.environ
raise Exception(f"{sum(names)} names, {len(files)} files, {len(others)} processes, {known}")
"""
CHANGE = """
import asyncio, gc, sys
import verifiers.v1 as vf
for module in list(sys.modules.values()):
    if hasattr(module, "Submission"):
        module.Submission.score = lambda self, batch: [
            {"reward": float(n % 2), "parts": {}, "error": None} for n in range(len(batch))]
        module.Submission.load = lambda self, limit: []
vf.Task.score = vf.Taskset.load = None
sys.modules["random"].Random = None
"""


def job(code: str) -> dict[str, str]:
    """The good job, with code that runs when it is imported."""
    return {**GOOD, ENVIRONMENT: f"{GOOD[ENVIRONMENT]}\n{code}"}


def validate(*jobs: dict[str, str]) -> list[Verdict]:
    """Verdicts on jobs one after the other in the same sandbox."""

    async def all_of_them() -> list[Verdict]:
        validator = Validator(sandboxes=1)
        await validator.start()
        try:
            return [await validator.validate(files, RULES) for files in jobs]
        finally:
            await validator.close()

    return asyncio.run(all_of_them())


def test_what_a_job_leaves_the_next_does_not_see() -> None:
    left, looked, after = validate(job(LEAVE + LOOK), job(LOOK), GOOD)
    assert "3 names, 2 files, 1 processes, True" in left.findings[0].found, "it leaves nothing"
    assert "0 names, 0 files, 0 processes, False" in looked.findings[0].found
    assert after.ok and after.findings == []


def test_what_a_job_changes_is_changed_for_itself_alone() -> None:
    constant = "        return 1.0 if self.data.answer in reply else 0.0\n"
    assert constant in GOOD[ENVIRONMENT]
    useless = {**GOOD, ENVIRONMENT: GOOD[ENVIRONMENT].replace(constant, "        return 1.0\n")}
    changed, good, refused = validate(job(CHANGE), GOOD, useless)
    assert changed.findings, "it changes nothing"
    assert good.ok and good.findings == []
    assert [finding.code for finding in refused.findings] == ["E-SPREAD"]


@pytest.mark.parametrize("last", ["import os; os._exit(1)", "import os\nos.kill(os.getpid(), 9)"])
def test_a_job_that_breaks_its_sandbox_breaks_it_for_itself_alone(last: str) -> None:
    broken, good = validate(job(last), GOOD)
    assert [finding.code for finding in broken.findings] == ["E-CRASH"]
    assert good.ok and good.findings == []
