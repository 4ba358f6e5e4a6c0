"""What a person sees while a run goes on, drawn on a terminal and off one."""

from __future__ import annotations

import io

from rich.console import Console

from metatrainer.console import Bars, Lines, shown
from metatrainer.progress import MeanTerms, Progress
from metatrainer.reward import Terms

GOOD = Terms(1.0, 0.25, 0.5, 0.525, "ok", 0.6, 0.4)
CRASHED = Terms(1.0, 0.0, 0.0, 0.35, "crashed")


def emit(progress: Progress) -> None:
    """A run of one step with two episodes."""
    progress.run_started(1, 4)
    progress.phase("baselines")
    progress.phase("training", 2)
    progress.episode_finished("train-000-00-00", GOOD)
    progress.episode_finished("train-000-00-01", CRASHED)
    progress.step_finished(0, 0.4375, MeanTerms.of([GOOD, CRASHED]), 12.0)
    progress.message("[1] of 2 workers was replaced")


def output(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    with shown(console) as progress:
        assert isinstance(progress, Bars if terminal else Lines)
        emit(progress)
    return out.getvalue()


def test_off_a_terminal_each_step_is_one_plain_line() -> None:
    text = output(terminal=False)
    assert "\x1b" not in text and "\r" not in text
    (line,) = [line for line in text.splitlines() if line.startswith("step")]
    for word in ("0.438", "validation 1.000", "quality  0.125", "speed 0.250", "12 s", "left 0 s"):
        assert word in line
    assert "training: 2 episodes" in text and "baselines\n" in text
    assert "[1] of 2 workers was replaced" in text


def test_on_a_terminal_there_are_bars_with_counts() -> None:
    text = output(terminal=True)
    for word in ("steps", "1/1", "episodes", "2/4", "training", "1 jobs ok", "left"):
        assert word in text
    assert "reward  0.438" in text and "[1] of 2 workers was replaced" in text


def test_means_are_over_all_episodes_also_those_without_a_job() -> None:
    assert MeanTerms.of([GOOD, CRASHED]) == MeanTerms(1.0, 0.125, 0.25)
    assert MeanTerms.of([]) == MeanTerms(0.0, 0.0, 0.0)
