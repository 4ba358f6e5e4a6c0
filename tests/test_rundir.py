"""Run folders: never two runs in one, and found again by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from metatrainer.config import RunSettings
from metatrainer.errors import ConfigError
from metatrainer.rundir import create, find

SETTINGS = RunSettings(seed=7)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_each_run_has_a_folder_of_its_own_that_holds_its_settings() -> None:
    first, second = create(SETTINGS), create(SETTINGS)
    assert first.path != second.path
    assert first.name.startswith("nano-") and first.name.endswith("-1")
    assert second.name.endswith("-2")
    assert first.settings == second.settings == SETTINGS


def test_a_run_is_found_by_folder_and_by_name(tmp_path: Path) -> None:
    run = create(SETTINGS)
    assert find(run.name).settings == find(str(tmp_path / run.path)).settings == SETTINGS
    assert find(str(run.path)).name == run.name


def test_a_run_that_is_not_there_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="holds none yet"):
        find("nano-1")
    run = create(SETTINGS)
    with pytest.raises(ConfigError, match=f"did you mean '{run.name}'"):
        find(f"runs/{run.name}x")


def test_a_folder_that_holds_something_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert create(SETTINGS, tmp_path / "mine").name == "mine"
    with pytest.raises(ConfigError, match="not empty"):
        create(SETTINGS, tmp_path / "mine")
