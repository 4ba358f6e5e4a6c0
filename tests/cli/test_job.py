"""Jobs by hand through the command line: real processes, sandbox, students and hidden items."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from metatrainer import by_hand
from metatrainer.jobs.spec import JobSpec, parse_job_toml

Job = Callable[..., subprocess.CompletedProcess[str]]
PERSONA = ("--family", "persona")
FEW = ("--set", "evaluation.items=8")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """job(*arguments): run metatrainer job in a working directory of its own."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "metatrainer", "job", *arguments],
            cwd=tmp_path,
            env={**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A new job on persona."""
    by_hand.new("persona", "nano-wren", tmp_path / "persona-job")
    return tmp_path / "persona-job"


def change(path: Path, old: str, new: str) -> None:
    """Replace a text that must be in a file."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_new_job_is_valid_as_it_stands(job: Job, tmp_path: Path) -> None:
    made = job("new", "triage", "mine", "--student", "nano-finch")
    assert made.returncode == 0
    assert "metatrainer job validate mine --family triage" in made.stdout
    spec = parse_job_toml((tmp_path / "mine" / "job.toml").read_text())
    assert isinstance(spec, JobSpec) and spec.prime_rl.model == "nano-finch"
    checked = job("validate", "mine", "--family", "triage")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert checked.stdout.startswith("ok: nano-finch")
    told = json.loads(job("validate", "mine", "--family", "triage", "--json").stdout)
    (verdict,) = told["jobs"]
    assert (told["valid"], told["refused"], verdict["folder"]) == (1, 0, "mine")
    assert (verdict["ok"], verdict["findings"]) == (True, [])
    assert verdict["estimate"]["rollouts"] == 1280 and "1,280 rollouts" in checked.stdout


def test_a_job_is_tried_on_its_student(job: Job, folder: Path) -> None:
    done = job("preview", "persona-job", *PERSONA, "--rollouts", "16", "--shown", "1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "user " in done.stdout and "2 groups teach something" in done.stdout
    found = json.loads(job("preview", "persona-job", *PERSONA, "--rollouts", "8", "--json").stdout)
    assert (found["rollouts"], found["groups"]) == (8, 1)
    change(folder / "environment" / "__init__.py", "async def correct", "def correct")
    assert job("preview", "persona-job", *PERSONA).returncode == 1


def test_a_broken_job_is_refused_with_its_findings(job: Job, folder: Path) -> None:
    change(folder / "environment" / "__init__.py", "async def correct", "def correct")
    done = job("validate", "persona-job", *PERSONA)
    assert done.returncode == 1
    assert "E-ASYNC environment/__init__.py" in done.stdout and "refused: 1" in done.stderr
    for command in ("validate", "run"):
        printed = job(command, "persona-job", *PERSONA, "--json")
        assert printed.returncode == 1
        told = json.loads(printed.stdout)
        verdict = told["jobs"][0] if command == "validate" else told
        assert (verdict["ok"], verdict["findings"][0]["code"]) == (False, "E-ASYNC")


def test_another_familys_job_is_refused(job: Job, folder: Path) -> None:
    done = job("validate", "persona-job", "--family", "inventory")
    assert done.returncode == 1 and "E-WORLD" in done.stdout


def test_the_limits_are_those_of_the_settings(job: Job, folder: Path) -> None:
    done = job("validate", "persona-job", *PERSONA, "--set", "limits.max_rollouts=640")
    assert done.returncode == 1 and "E-BUDGET job.toml" in done.stdout


def test_a_job_is_run_and_scored_before_and_after(job: Job, folder: Path, tmp_path: Path) -> None:
    change(folder / "job.toml", "max_steps = 20", "max_steps = 22")
    change(folder / "job.toml", "batch_size = 64", "batch_size = 8")
    done = job("run", "persona-job", *PERSONA, *FEW)
    assert done.returncode == 0, done.stderr
    before, after = (
        next(line for line in done.stdout.splitlines() if line.startswith(word))
        for word in ("before", "after")
    )
    assert all("nano-wren" in line and line.endswith("n = 8") for line in (before, after))
    steps = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert steps == ["step", *(str(step) for step in range(2, 23, 2))], "20 at most, and the last"

    ran = json.loads(job("run", "persona-job", *PERSONA, *FEW, "--json").stdout)
    assert ran["ok"] and (ran["rollouts"], len(ran["curve"])) == (176, 22)
    for score in (ran["before"], ran["after"]):
        assert score["n"] == 8 and score["low"] <= score["mean"] <= score["high"]
    assert [path.name for path in tmp_path.iterdir()] == ["persona-job"]


def test_a_job_that_fails_says_why(job: Job, folder: Path) -> None:
    change(folder / "job.toml", "max_steps = 20", "max_steps = 2")
    # Fine where validation probes it, on 8 tasks; never at the size of a real batch.
    change(
        folder / "environment" / "__init__.py",
        "        reply = trace.last_reply.strip()\n",
        "        global SCORED\n"
        "        SCORED += 1\n"
        "        assert SCORED < 60, 'too many'\n"
        "        reply = trace.last_reply.strip()\n",
    )
    change(folder / "environment" / "__init__.py", "TASKS = 64\n", "TASKS = 64\nSCORED = 0\n")
    done = job("run", "persona-job", *PERSONA, *FEW)
    assert done.returncode == 1
    assert "env_error" in done.stdout and "too many" in done.stdout and "after" not in done.stdout


def test_a_job_compiles_for_one_gpu_and_for_two(job: Job, folder: Path, tmp_path: Path) -> None:
    one = job("compile", "persona-job", *PERSONA, "--gpus", "1")
    assert one.returncode == 0
    config = tomllib.loads(one.stdout)
    assert config["model"]["name"].endswith("nano-wren")
    assert config["run"]["name"] == "persona-job"
    command = one.stdout.splitlines()[-1]
    assert command == f"# run: CUDA_VISIBLE_DEVICES=0,0 PYTHONPATH={folder} rl @ rl.toml"
    assert "metatrainer" in one.stderr
    two = job("compile", "persona-job", *PERSONA, "--model", "Qwen/Qwen3-0.6B", "-o", "to.toml")
    assert two.stdout == f"CUDA_VISIBLE_DEVICES=0,1 PYTHONPATH={folder} rl @ to.toml\n"
    config = tomllib.loads((tmp_path / "to.toml").read_text())
    assert config["model"]["name"] == "Qwen/Qwen3-0.6B"


def test_a_dry_run_prints_what_prime_rl_would_be_told(job: Job, folder: Path) -> None:
    arguments = ("run", "persona-job", *PERSONA, "--trainer", "prime-rl", "--dry-run")
    done = job(*arguments, "--set", "inner.gpus=1")
    assert done.returncode == 0, done.stderr
    assert "CUDA_VISIBLE_DEVICES=0,0 PYTHONPATH=JOB/packages rl @ JOB/rl.toml" in done.stdout
    assert done.stdout.count("CUDA_VISIBLE_DEVICES=0 inference @ JOB/inference.toml") == 2
    plan = json.loads(job(*arguments, "--json").stdout)
    texts = [tomllib.loads(start["text"]) for start in plan["starts"]]
    assert [len(plan["starts"]), texts[1]["max_steps"]] == [3, 20]
    assert plan["starts"][1]["command"] == ["rl", "@", "JOB/rl.toml"]


def test_a_machine_without_prime_rl_is_told_so(job: Job, folder: Path) -> None:
    done = job("run", "persona-job", *PERSONA, "--trainer", "prime-rl")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no 'rl' on the PATH" in done.stderr and "Traceback" not in done.stderr
    other = job("run", "persona-job", *PERSONA, "--dry-run")
    assert other.returncode == 2 and "--trainer prime-rl" in other.stderr


def test_compile_shows_what_is_wrong_with_the_settings(job: Job, folder: Path) -> None:
    change(folder / "job.toml", "group_size = 8", "group_size = 7")
    done = job("compile", "persona-job", *PERSONA)
    assert done.returncode == 1 and done.stdout.startswith("E-BATCH job.toml:")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["new", "persna"], ["'persna'", "'persona'"]),
        (["new", "persona", "x", "--student", "nano-wrem"], ["'nano-wrem'", "'nano-wren'"]),
        (["new", "persona"], ["persona-job", "new or empty"]),
        (["validate", "nowhere", *PERSONA], ["nowhere", "metatrainer job new"]),
        (["run", "nowhere", *PERSONA], ["nowhere", "metatrainer job new"]),
        (["compile", "nowhere", *PERSONA], ["nowhere", "metatrainer job new"]),
        (["validate", "persona-job"], ["--family"]),
        (["validate", "persona-job", "--family", "persna"], ["'persona'"]),
        (["run", "persona-job", *PERSONA, "--set", 'students=["nano-wrem"]'], ["'nano-wren'"]),
        (["compile", "persona-job", "--family", "persna"], ["'persona'"]),
        (["compile", "persona-job/environment", *PERSONA], ["no job.toml"]),
        (["compile", "persona-job", *PERSONA, "--gpus", "3"], ["--gpus"]),
        (["compile", "persona-job", *PERSONA, "-o", "no/x.toml"], ["cannot write no/x.toml"]),
    ],
)
def test_what_is_not_there_exits_with_2(
    job: Job, folder: Path, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    done = job(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["persona-job"]


def test_a_folder_that_can_be_no_job_is_refused_before_it_is_read(job: Job, folder: Path) -> None:
    (folder / "secret").symlink_to("/etc/hostname")
    done = job("validate", "persona-job", *PERSONA)
    assert done.returncode == 2 and "is a link" in done.stderr
    (folder / "secret").unlink()
    (folder / "weights").write_bytes(b"\xff\xfe")
    done = job("validate", "persona-job", *PERSONA)
    assert done.returncode == 2 and "not text" in done.stderr
    (folder / "weights").write_bytes(b"x" * (1 << 20))
    done = job("validate", "persona-job", *PERSONA)
    assert done.returncode == 2 and "a job alone" in done.stderr


def test_without_a_sandbox_nothing_is_run(job: Job, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for command in ("validate", "run"):
        done = job(command, "persona-job", *PERSONA, PATH=str(tmp_path / "bin"))
        assert done.returncode == 2 and "only runs in a sandbox" in done.stderr
