"""Text of others is shown, never obeyed."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest

from metatrainer.shown import LINE_CHARS, one_line, visible


@pytest.mark.parametrize(
    "planted",
    ["\x1b[31mred", "\x1b]0;title\x07", "\u202egnp.exe", "\u2066x\u2069", "a\rb", "\x00", "\x9b1m",
     "\u200b", "\ufeff", "\u2028", "\ud800"],
)  # fmt: skip
def test_nothing_is_left_that_acts(planted: str) -> None:
    for shown in (visible(planted, 100), one_line(planted, 100)):
        assert shown.replace("\n", "").isprintable()
        assert "\\x" in shown or "\\u" in shown  # it is there to be seen, not dropped


def test_ordinary_text_stays_as_it_is() -> None:
    text = "def f():\n\treturn 'Straße, 東京, é'  # ok"
    assert visible(text, 100) == text


def test_long_texts_and_lines_are_cut_and_say_so() -> None:
    shown = visible("x" * 10_000_000, 50_000)
    assert len(shown) < 2 * LINE_CHARS
    assert "more characters" in shown
    assert visible("a\n" * 100, 10).endswith("190 more characters")
    assert one_line("a\nb" * 50, 20).endswith("…")
    assert "\n" not in one_line("a\nb" * 50, 20)


PLANTED = "\x1b[2J\u202e[bold]" + "x" * 50_000
"""A text that clears a terminal, turns letters around, plays markup and has no end."""


def check_harmless(shown: str) -> None:
    assert "\\x1b[2J\\u202e" in shown
    assert "\x1b" not in shown and "\u202e" not in shown
    assert len(shown) < 9_000


def test_findings_show_what_a_job_wrote_harmlessly() -> None:
    from metatrainer.jobs.findings import Finding

    check_harmless(Finding("E-X", "a.py", 1, PLANTED, PLANTED, PLANTED).render())


def test_messages_of_an_episode_are_shown_harmlessly() -> None:
    from rich.console import Console

    from metatrainer.cli.app import _print_message

    planted = PLANTED[:60]
    call = {"name": planted, "arguments": {planted: planted}}
    for message in (
        {"role": "assistant", "content": PLANTED, "tool_calls": []},
        {"role": "tool", "name": planted, "content": "", "tool_calls": []},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ):
        out = io.StringIO()
        _print_message(Console(file=out, width=200), message)
        check_harmless(out.getvalue())
        assert "[bold]" in out.getvalue(), "markup of others is text"


def test_unknown_arguments_come_back_harmlessly() -> None:
    from metatrainer.agent.tools import problem_with

    problem = problem_with("read_file", {"path": "a.py", PLANTED: ""})
    assert problem is not None
    check_harmless(problem)


def test_a_job_that_fails_is_told_harmlessly(tmp_path: Path) -> None:
    from metatrainer.errors import EnvError, JobError
    from metatrainer.pool.base import JobOrder
    from metatrainer.pool.worker import run_job

    for number, error in enumerate(
        (EnvError("import", PLANTED), JobError("crashed", PLANTED), ValueError(PLANTED))
    ):

        class Body:
            def train(self, order: JobOrder, stop: threading.Event) -> None:
                raise error  # noqa: B023  (called within the turn of the loop)

        folder = tmp_path / str(number)
        folder.mkdir()
        order = JobOrder(
            job_id=f"j{number}", family="persona", job_dir=folder, student="nano-wren", seed=0
        )
        result = run_job(Body(), order, 0, threading.Event())  # type: ignore[arg-type]
        check_harmless(result.message)


def test_last_words_of_a_worker_are_told_harmlessly() -> None:
    from metatrainer.pool.process import WorkerProcess

    worker = WorkerProcess("", {})
    worker._tail += PLANTED[:500].encode()
    check_harmless(worker._fault("it ended", requests=1).message)
