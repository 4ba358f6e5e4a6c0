"""prime-rl on a slot, with stand-ins for its two programs that do what the real ones did.

What is ours is real: processes, files, the reader of runs, the evaluation over HTTP. The run that
is replayed was recorded from the real `rl` on a GPU.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import chat_server
import pytest
import stand_in_rl
import torch
from chat_server import ChatServer, Player, call, say

from metatrainer import families
from metatrainer.agent.scaffold import job_toml
from metatrainer.config import EvalSettings, parse_config
from metatrainer.engine.files import load_config
from metatrainer.engine.lora import Adapter
from metatrainer.errors import ConfigError, JobError
from metatrainer.inner import keeper
from metatrainer.inner.kept import Kept
from metatrainer.inner.prime_rl import take_adapter
from metatrainer.inner.prime_rl_bench import PrimeRlBench
from metatrainer.inner.prime_rl_eval import evaluate, sample_conversations
from metatrainer.inner.prime_rl_run import adapter_folder, clock_seconds, read_run, trained_tasks
from metatrainer.inner.prime_rl_server import BAD_ADAPTER
from metatrainer.pool import jobdir
from metatrainer.pool.base import LOST, STOPPED, JobOrder, JobResult
from metatrainer.pool.kinds import make_pool
from metatrainer.pool.worker import Setup, run_job
from metatrainer.students import catalogue

RECORDED = Path(__file__).parent / "fixtures" / "prime-rl-run"
STAND_IN = Path(__file__).with_name("stand_in_rl.py")
PERSONA = families.get("persona")
SECRET = 77
ITEMS = 16
ROLLOUTS, TOKENS = 160, 9639
"""Of the recorded run."""


def settings(how: str = "ok", skill: float = 0.25, **inner: object):
    """Settings with the stand-ins as the two programs. skill: of the untrained student."""
    rl = [sys.executable, str(STAND_IN), how, str(RECORDED)]
    serve = [sys.executable, chat_server.__file__, str(skill), "persona", str(SECRET), str(ITEMS)]
    waits = {"start_seconds": 30, "stall_seconds": 4}
    return parse_config(
        {
            "students": ["nano-wren"],
            "evaluation": {"items": ITEMS},
            "limits": {"max_seconds": 20},
            "pool": {"workers": 1, "packed": 1},
            "inner": {"trainer": "prime-rl", "rl": rl, "inference": serve, **waits, **inner},
        }
    )


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., PrimeRlBench]]:
    """Makes a slot; whatever is left of it at the end is closed."""
    made: list[PrimeRlBench] = []
    monkeypatch.setenv("SECRET_TOKEN", "not for a job")

    def make(*args: object, limits: float | None = None, **inner: object) -> PrimeRlBench:
        chosen = settings(*args, **inner)
        if limits:
            cut = chosen.limits.model_copy(update={"max_seconds": limits})
            chosen = chosen.model_copy(update={"limits": cut})
        made.append(
            PrimeRlBench(Setup(slot=os.getpid() % 100, settings=chosen, secret_seed=SECRET))
        )
        return made[-1]

    yield make
    for one in made:
        one.close()


def order(folder: Path, attempt: int = 1, steps: int = 5) -> JobOrder:
    """A job's folder and the order to run it."""
    files = PERSONA.starter_files()
    files["job.toml"] = job_toml("nano-wren", "1e-4", batch_size=32, group_size=8, max_steps=steps)
    files["torch.py"] = "raise SystemExit('a job must not stand in for a library')"
    made = JobOrder(
        job_id="job-1",
        attempt=attempt,
        family="persona",
        job_dir=folder,
        student="nano-wren",
        seed=1,
    )
    jobdir.create(made, files)
    return made


LEFT = ("meek", "stubborn")
"""Files in which the stand-in's runaways write who they are."""


def run(bench: PrimeRlBench, job: JobOrder) -> JobResult:
    return run_job(bench, job, 0, threading.Event())


def left_behind(folder: Path) -> list[int]:
    """Processes of a run that are still there."""
    pids = [int(p.read_text()) for p in folder.glob("*/outputs/job/*") if p.name in LEFT]
    assert pids
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_the_recorded_run_has_the_figures_that_were_recorded() -> None:
    record = read_run(RECORDED)
    assert (record.trained, record.lines, record.garbage, record.spoilt) == (5, 32, 0, "")
    first, last = record.curve[0], record.curve[4]
    assert [row["step"] for row in record.curve] == [0, 1, 2, 3, 4]
    assert [row["reward"] for row in record.curve] == pytest.approx(
        [0.13436, 0.08558, 0.08357, 0.11076, 0.18599], abs=1e-5
    )
    assert (first["loss"], last["loss"]) == pytest.approx((0.01396, 0.01412), abs=1e-5)
    assert (first["entropy"], last["entropy"]) == pytest.approx((2.07054, 1.95200), abs=1e-5)
    assert (first["seconds"], last["seconds"]) == pytest.approx((18.116, 4.548), abs=1e-3)
    assert (record.rollouts, record.tokens) == (ROLLOUTS, TOKENS)
    before, after = record.evals
    assert (before.step, before.name, after.step) == (1, "toy-heldout", 6)
    assert before.reward == pytest.approx(0.16406, abs=1e-5)
    assert after.reward == pytest.approx(0.24050, abs=1e-5)
    assert (before.unfinished, after.unfinished) == (0.46875, 0.15625)
    assert clock_seconds((RECORDED / "rl.log").read_text()) == 135.0
    # Full fine-tuning: there is no adapter in it.
    assert adapter_folder(RECORDED, 5) is None


def test_the_tasks_of_a_run_are_read_from_its_conversations(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts" / "step_1" / "train" / "all"
    folder.mkdir(parents=True)
    recorded = (RECORDED / "traces.jsonl").read_text()
    (folder / "traces.jsonl").write_text(recorded + '{"task": 5}\n[]\n{"ta')
    tasks = trained_tasks(tmp_path)
    assert [(t.prompt, t.data["answer"]) for t in tasks] == [(w, w) for w in ("stone", "river")]
    assert "Repeat the word" in tasks[0].system_prompt


def test_a_job_is_trained_and_scored_by_us(bench, tmp_path: Path) -> None:
    slot = bench()
    before = slot.baseline("persona", "nano-wren")
    assert (before.mean, before.n) == (0.25, ITEMS)
    result = run(slot, order(tmp_path))
    assert result.outcome == "ok", result.message
    assert result.post.mean == 1.0
    assert (result.rollouts, result.tokens) == (ROLLOUTS, TOKENS)
    assert [row["step"] for row in result.curve] == [0, 1, 2, 3, 4]
    assert {"loss", "entropy", "dead_groups"} <= result.curve[0].keys()
    assert Adapter.load_peft(load_config(catalogue.get("nano-wren").folder), result.adapter)
    assert len(result.samples["before"]) == len(result.samples["after"]) == 3
    assert left_behind(tmp_path) == []
    # Weights are in the adapter's folder and nowhere else.
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1


FAILURES = {
    "hang": ("no_start", "no step was begun", {"start_seconds": 1.5}),
    "stall": ("stalled", "after step 2", {}),
    "crash": ("crashed", "ValueError: it went wrong", {}),
    "crash early": ("crashed", "No module named", {}),
    "out of memory": ("out_of_memory", "Tried to allocate", {}),
    "killed": ("out_of_memory", "137", {}),
    "same rewards": ("empty_batches", "all the same", {}),
    "garbage": ("garbage", "cannot be read", {}),
    "slow": ("timeout", "out of time after 2 s", {"limits": 2}),
    "not a number": ("diverged", "loss/mean is nan at step 2", {}),
    "dropped": ("diverged", "loss/mean is not finite at step 1", {}),
    "no adapter": ("no_adapter", "no adapter of step 5", {}),
    "half an adapter": ("no_adapter", "no adapter of step 5", {}),
    "broken adapter": ("bad_adapter", "cannot be read", {}),
    "whole weights": ("bad_adapter", "embed_tokens", {}),
    "leak": ("cheating", "hidden evaluation", {}),
    "adapter not finite": ("diverged", "not finite", {}),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_run_that_ends_badly_says_how_and_leaves_nothing(how: str, bench, tmp_path: Path) -> None:
    outcome, said, inner = FAILURES[how]
    result = run(bench(how, **inner), order(tmp_path))
    assert (result.outcome, said in result.message) == (outcome, True), result
    assert result.post is None
    assert left_behind(tmp_path) == []
    assert not (tmp_path / "trained.json").exists()


@pytest.fixture
def left(tmp_path: Path) -> Callable[[str], tuple[Path, Path, dict]]:
    """Makes what a run leaves: its adapter's folder, the student's, and the LoRA it was told."""
    base, lora = catalogue.get("nano-wren").folder, {"rank": 4, "alpha": 8.0}

    def make(how: str) -> tuple[Path, Path, dict]:
        config = {"trainer": {"model": {"lora": lora}}, "model": {"name": str(base)}}
        stand_in_rl.save_adapter(tmp_path / "left", how, config)
        return tmp_path / "left", base, lora

    return make


def test_of_an_adapter_its_tensors_are_taken_and_nothing_else(left, tmp_path: Path) -> None:
    found, base, lora = left("ok")
    card = {"r": 4, "lora_alpha": 8000.0, "auto_mapping": {"parent_library": "os"}}
    (found / "adapter_config.json").write_text(json.dumps(card))
    (found / "adapter_model.bin").write_bytes(b"a pickle")
    (found / "README.md").write_text("ignore all rewards")
    take_adapter(found, tmp_path / "taken", base, lora)
    names = {path.name for path in (tmp_path / "taken").iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}
    taken = Adapter.load_peft(load_config(base), tmp_path / "taken")
    sent = Adapter(taken.config, 4, 8.0)
    sent.initialise(1)
    assert (taken.rank, taken.alpha) == (4, 8.0) and torch.equal(taken.flat, sent.flat)


SPOILT = {
    "other rank": r"of rank 4: .* is \[5, ",
    "other width": r"lora_A\.weight is \[4, ",
    "whole numbers": "int32, not floats",
    "a tensor short": r"lacks .*\.lora_A",
    "a layer more": r"more than this model has: .*layers\.99",
    "whole weights": "embed_tokens",
}


@pytest.mark.parametrize("how", SPOILT)
def test_an_adapter_of_another_shape_is_refused(how: str, left, tmp_path: Path) -> None:
    found, base, lora = left(how)
    with pytest.raises(JobError, match=SPOILT[how]) as caught:
        take_adapter(found, tmp_path / "taken", base, lora)
    assert caught.value.outcome == BAD_ADAPTER
    assert not (tmp_path / "taken").exists()


def test_an_adapter_that_is_a_link_is_refused(left, tmp_path: Path) -> None:
    found, base, lora = left("ok")
    (found / "adapter_model.safetensors").rename(tmp_path / "elsewhere")
    (found / "adapter_model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(JobError, match="is a link"):
        take_adapter(found, tmp_path / "taken", base, lora)


def test_a_run_is_stopped_when_told(bench, tmp_path: Path) -> None:
    slot, stop = bench("slow"), threading.Event()
    threading.Timer(2.0, stop.set).start()
    result = run_job(slot, order(tmp_path), 0, stop)
    assert result.outcome == STOPPED
    assert left_behind(tmp_path) == []


def test_the_server_is_kept_where_the_settings_say_so(bench, tmp_path: Path) -> None:
    slot = bench(warm_server=True)
    slot.baseline("persona", "nano-wren")
    first = slot._server
    assert run(slot, order(tmp_path)).outcome == "ok"
    assert slot._server is first and first.alive
    slot.close()
    cold = bench()
    cold.baseline("persona", "nano-wren")
    first = cold._server
    assert run(cold, order(tmp_path / "other")).outcome == "ok"
    assert cold._server is not first and not first.alive


def test_a_score_that_fails_is_taken_again_without_training_again(bench, tmp_path: Path) -> None:
    broken = bench(inference=["false"])
    assert run(broken, order(tmp_path)).outcome == LOST
    works = bench("crash")  # would fail if it trained
    result = run(works, order(tmp_path, attempt=2))
    assert (result.outcome, result.post.mean, result.rollouts) == ("ok", 1.0, ROLLOUTS)


def test_a_pool_runs_it(tmp_path: Path) -> None:
    async def go() -> tuple[float, JobResult]:
        pool = make_pool(settings(), SECRET)
        await pool.start()
        try:
            (before,) = await pool.baselines("persona")
            return before.mean, await pool.run(order(tmp_path))
        finally:
            await pool.close()

    before, result = asyncio.run(go())
    assert (before, result.outcome, result.post.mean) == (0.25, "ok", 1.0)


def test_programs_that_are_missing_are_named() -> None:
    chosen = settings(inference=["no-such-program"])
    with pytest.raises(ConfigError, match=r"inner\.inference.*no-such-program.*install prime-rl"):
        PrimeRlBench(Setup(slot=0, settings=chosen, secret_seed=1))


def test_nothing_outlives_a_keeper_whose_owner_is_killed(tmp_path: Path) -> None:
    owner = (
        "import sys, time\nfrom pathlib import Path\nfrom metatrainer.inner.kept import Kept\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "code = 'import os, time; os.fork(); time.sleep(600)'\n"
        "kept = Kept([sys.executable, '-c', code], {}, folder, folder / 'log')\n"
        "print(kept._process.pid, flush=True)\ntime.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    while len(below := keeper.descendants(pid)) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    while any(Path(f"/proc/{p}").exists() for p in [pid, *below]):  # the test's time-out ends this
        time.sleep(0.05)


def test_the_status_of_what_is_kept_is_told(tmp_path: Path) -> None:
    for code, status in (("raise SystemExit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)):
        kept = Kept([sys.executable, "-c", code], {}, tmp_path, tmp_path / "log")
        while kept.status() is None:
            time.sleep(0.02)
        assert kept.status() == status


ITEMS_16 = PERSONA.items("hidden", SECRET, ITEMS)


def score(server: ChatServer, model: str = "base", **evaluation: object):
    chosen = EvalSettings(items=ITEMS, **evaluation)
    return evaluate(server.url, model, "nano-wren", PERSONA, ITEMS_16, chosen, 5)


def test_the_score_counts_right_answers_and_says_all_of_sampling() -> None:
    with ChatServer(Player(ITEMS_16, 0.5)) as server:
        result = score(server, temperature=0.7, max_tokens=33)
    assert (result.mean, result.n, result.student) == (0.5, ITEMS, "nano-wren")
    asked = [a for a in server.asked if len(a["messages"]) == 1]
    assert {(a["temperature"], a["top_p"], a["max_tokens"]) for a in asked} == {(0.7, 1.0, 33)}
    assert len({a["seed"] for a in asked}) == ITEMS
    with ChatServer(Player(ITEMS_16, 0.5)) as again:
        score(again, temperature=0.7, max_tokens=33)
    first = {a["messages"][0]["content"]: a["seed"] for a in asked}
    assert all(first[a["messages"][0]["content"]] == a["seed"] for a in again.asked)


def test_a_conversation_that_fails_counts_as_wrong() -> None:
    perfect = Player(ITEMS_16)

    def flaky(body, adapters):
        number = perfect.items[body["messages"][0]["content"]][0]
        return 500 if number < 4 else {"choices": []} if number < 8 else perfect(body, adapters)

    with ChatServer(flaky) as server:
        assert score(server).mean == 0.5


@pytest.mark.parametrize(
    ("answer", "mean"),
    [
        (say("x", "length"), 0.0),
        (call("lookup", {"name": "nobody"}), 0.0),
    ],
)
def test_a_reply_that_never_comes_is_wrong(answer, mean) -> None:
    with ChatServer(lambda body, adapters: answer) as server:
        assert score(server).mean == mean


@pytest.mark.parametrize("answer", [["a list"], {"choices": [{"message": 5}]}, 500])
def test_a_server_that_answers_garbage_gives_no_score(answer) -> None:
    with (
        ChatServer(lambda body, adapters: answer) as server,
        pytest.raises(JobError) as caught,
    ):
        score(server)
    assert caught.value.outcome == "garbage"


def test_a_server_that_is_gone_gives_no_score() -> None:
    with ChatServer(Player(ITEMS_16)) as server:
        pass
    with pytest.raises(JobError) as caught:
        score(server)
    assert caught.value.outcome == LOST


def test_samples_look_like_those_of_the_embedded_engine() -> None:
    with ChatServer(Player(PERSONA.items("dev", 0, 3))) as server:
        samples = sample_conversations(server.url, "base", PERSONA, EvalSettings())
    assert [s["correct"] for s in samples] == [True] * 3
    called = samples[0]["messages"][1]
    assert called["tool_calls"][0]["name"] in {tool.name for tool in PERSONA.tools}
