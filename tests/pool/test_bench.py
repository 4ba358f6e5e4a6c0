"""A slot's work for real: engine, sandbox, GRPO and hidden evaluation, on a tiny random model."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny

from metatrainer import families
from metatrainer.agent.scaffold import ENVIRONMENT, JOB, job_toml
from metatrainer.config import EvalSettings, LimitSettings, RunSettings
from metatrainer.errors import EnvError, JobError
from metatrainer.pool import jobdir
from metatrainer.pool.base import STOPPED, JobOrder, JobResult
from metatrainer.pool.bench import Bench
from metatrainer.pool.worker import Setup, run_job
from metatrainer.students import catalogue

STUDENT = "tiny"
SETTINGS = RunSettings(
    students=(STUDENT,),
    evaluation=EvalSettings(items=8, max_turns=2, max_tokens=8),
    limits=LimitSettings(max_seconds=20),
)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    models = tmp_path_factory.mktemp("models")
    folder = tiny.make_model(models / STUDENT)
    entry = {
        "name": STUDENT,
        "role": "student",
        "parameters": 1,
        "sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
    }
    (models / "manifest.json").write_text(json.dumps([entry]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "MODELS", models)
        catalogue.models.cache_clear()
        bench = Bench(Setup(slot=0, settings=SETTINGS, secret_seed=7))
        yield bench
        bench.close()
    catalogue.models.cache_clear()


def make_order(folder: Path, job: str | None = None, **environment: str) -> JobOrder:
    """An order for two steps of eight rollouts. environment: old text -> new, in the starter."""
    files = dict(families.get("persona").starter_files())
    for old, new in environment.items():
        assert old in files[ENVIRONMENT]
        files[ENVIRONMENT] = files[ENVIRONMENT].replace(old, new)
    shape = {"batch_size": 8, "group_size": 4, "max_steps": 2}
    files[JOB] = job or job_toml(STUDENT, "1e-3", **shape).replace(
        "[environment]", "max_tokens = 8\n[environment]"
    )
    order = JobOrder(job_id="j", family="persona", job_dir=folder / "j", student=STUDENT, seed=3)
    jobdir.create(order, files)
    return order


def run(bench: Bench, order: JobOrder) -> JobResult:
    return run_job(bench, order, 0, threading.Event())


def test_a_job_trains_scores_and_saves_an_adapter(bench: Bench, tmp_path: Path) -> None:
    order = make_order(tmp_path, **{"1.0 if self.data.answer in reply": "len(reply) / 99 if reply"})
    before = bench.baseline("persona", STUDENT)
    result = run(bench, order)
    assert result.outcome == "ok", result.message
    assert result.post and (result.post.student, result.post.n) == (STUDENT, 8)
    assert (result.rollouts, len(result.curve)) == (16, 2)
    assert result.adapter
    for conversations in (result.samples["before"], result.samples["after"]):
        assert [c["messages"][0]["role"] for c in conversations] == ["user"] * 3
    assert (result.adapter / "adapter_model.safetensors").exists()
    assert jobdir.read_result(order.job_dir, "j") == result
    assert bench.baseline("persona", STUDENT) == before  # the base is as it was


def test_a_score_that_fails_is_taken_again_without_training_again(
    bench: Bench, tmp_path: Path
) -> None:
    order = make_order(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_score", lambda *given: 1 / 0)
        assert run(bench, order).outcome == "lost"
    trained = jobdir.read_trained(order.job_dir, "j")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "_train", lambda *given: 1 / 0)
        again = run(bench, order.model_copy(update={"attempt": 2}))
    assert trained and trained.post is None
    assert (again.outcome, again.attempt, again.curve) == ("ok", 2, trained.curve)
    whole = run(bench, make_order(tmp_path / "whole"))
    assert whole.post == again.post  # one try or two, the same score


def test_a_reward_that_fails_ends_the_job_with_the_reason(bench: Bench, tmp_path: Path) -> None:
    broken = run(bench, make_order(tmp_path, **{"trace.last_reply.strip()": "str(1 / 0)"}))
    assert broken.outcome == "env_error"
    assert "ZeroDivisionError" in broken.message


def test_a_reward_that_kills_its_process_does_not_harm_the_slot(
    bench: Bench, tmp_path: Path
) -> None:
    deadly = {"reply = trace": "__import__('os').kill(__import__('os').getpid(), 9); reply = trace"}
    with pytest.raises(EnvError) as caught:
        bench.train(make_order(tmp_path / "bad", **deadly), threading.Event())
    assert caught.value.kind == "crash"
    assert run(bench, make_order(tmp_path / "good")).outcome == "ok"


def test_a_job_past_its_time_is_stopped(bench: Bench, tmp_path: Path) -> None:
    job = job_toml(STUDENT, "1e-3", batch_size=64, group_size=8, max_steps=1000)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(JobError) as caught:
        limits = LimitSettings(max_seconds=0.5)
        patch.setattr(bench, "_settings", SETTINGS.model_copy(update={"limits": limits}))
        bench.train(make_order(tmp_path, job), threading.Event())
    assert caught.value.outcome == "timeout"


def test_a_job_that_is_told_to_stop_stops_and_stays_open(bench: Bench, tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    order = make_order(tmp_path)
    result = run_job(bench, order, 5, stop)
    assert (result.outcome, result.slot) == (STOPPED, 5)
    assert jobdir.read_result(order.job_dir, "j") is None


def test_a_folder_that_was_changed_after_validation_is_refused(
    bench: Bench, tmp_path: Path
) -> None:
    order = make_order(tmp_path)
    other = order.model_copy(update={"student": "nano-wren"})
    with pytest.raises(JobError, match="names tiny, not nano-wren"):
        bench._train(other, bench._lane(STUDENT), families.get("persona"), threading.Event())
    (order.job_dir / "files" / JOB).write_text("[prime_rl]\n")
    with pytest.raises(JobError, match="no longer valid"):
        bench.train(order, threading.Event())
