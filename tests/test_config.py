"""Settings: what a wrong one is answered, and that a run's config is read back as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from metatrainer.config import (
    RunSettings,
    check_names,
    load_config,
    nearest,
    parse_config,
    to_toml,
)
from metatrainer.errors import ConfigError
from metatrainer.students import catalogue

NANO = Path(__file__).parents[1] / "configs" / "nano.toml"


def message(data: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(data)
    return str(caught.value)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"famillies": ["persona"]}, ["'famillies'", "'families'"]),
        ({"outer": {"step": 4}}, ["'outer.step'", "'steps'"]),
        ({"reward": {"qality": 1}}, ["'reward.qality'", "'quality'"]),
        ({"preset": "nanno"}, ["preset", "'nanno'", "'nano'"]),
        ({"agent": {"backend": "tinkr"}}, ["agent.backend", "'tinkr'", "'tinker'"]),
        ({"outer": {"steps": 0}}, ["outer.steps", "greater than or equal to 1", "found 0"]),
        ({"outer": {"steps": "many"}}, ["outer.steps", "integer", "'many'"]),
        ({"outer": 3}, ["outer", "found 3"]),
        ({"families": []}, ["families", "at least 1"]),
        ({"families": ["persona"], "heldout": ["persona"]}, ["persona", "also in families"]),
        ({"sed": 1, "outer": {"stepz": 1}}, ["'sed'", "'outer.stepz'"]),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_valid(
    data: dict[str, Any], words: list[str]
) -> None:
    text = message(data)
    for word in words:
        assert word in text


def test_nano_toml_lists_every_setting() -> None:
    lines = [line.removeprefix("# ") for line in NANO.read_text().splitlines()]
    for name, field in RunSettings.model_fields.items():
        keys = getattr(field.annotation, "model_fields", None)
        assert keys is None or f"[{name}]" in NANO.read_text()
        for key in keys or (name,):
            assert any(line.startswith(f"{key} = ") for line in lines), key


def test_nano_toml_is_valid_and_runs_the_nano_preset() -> None:
    assert load_config(NANO).preset == "nano"


def test_overrides_replace_what_the_file_says() -> None:
    settings = load_config(
        NANO,
        ["outer.steps=3", "agent.model=other", 'families=["inventory"]', "reward.quality_floor=0"],
    )
    assert (settings.outer.steps, settings.agent.model) == (3, "other")
    assert (settings.families, settings.reward.quality_floor) == (("inventory",), 0.0)
    assert settings.outer.groups == load_config(NANO).outer.groups


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("outer.steps", "table.key=value"),
        ("=3", "table.key=value"),
        ("outer.stepz=3", "'steps'"),
        ("seed.x=3", "'seed' is a setting"),
    ],
)
def test_a_wrong_override_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(NANO, [text])


def test_settings_survive_the_trip_through_toml(tmp_path: Path) -> None:
    settings = load_config(NANO, ["pool.workers=3", "outer.learning_rate=2e-7", "seed=41"])
    path = tmp_path / "config.toml"
    path.write_text(to_toml(settings))
    assert load_config(path) == settings
    assert settings.reward.quality_floor is None and "quality_floor" not in path.read_text()


def test_a_missing_file_names_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "nano.toml").write_text("")
    with pytest.raises(ConfigError, match=r"did you mean .*nano\.toml"):
        load_config(tmp_path / "nan.toml")
    (tmp_path / "bad.toml").write_text("seed = = 1")
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(tmp_path / "bad.toml")


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A catalogue whose content does not depend on the weights that are there."""
    models = {
        name: catalogue.Model(name, role, 1, "")
        for name, role in (("nano-wren", "student"), ("nano-finch", "student"), ("a", "agent"))
    }
    monkeypatch.setattr(catalogue, "models", lambda: models)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"families": ["persona", "inventry"]}, "families: .*'inventry'.*'inventory'"),
        ({"heldout": ["triag"]}, "heldout: .*'triag'.*'triage'"),
        ({"students": ["nano-wran"]}, "students: .*'nano-wran'.*'nano-wren'"),
        ({"agent": {"model": "nano-wren"}}, "agent.model: .*'nano-wren'"),
    ],
)
def test_a_name_that_nothing_has_is_refused(
    shipped: None, data: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_names(parse_config({"agent": {"model": "a"}, **data}))


def test_names_that_exist_pass(shipped: None, tmp_path: Path) -> None:
    check_names(parse_config({"agent": {"model": "a"}}))
    (tmp_path / "config.json").write_text("{}")
    check_names(parse_config({"agent": {"model": str(tmp_path)}}))
    check_names(parse_config({"agent": {"model": "Qwen/Qwen3", "backend": "tinker"}}))


def test_a_hint_is_the_nearest_name_or_all_of_them() -> None:
    assert nearest("triag", ["persona", "triage"]) == "did you mean 'triage'?"
    assert nearest("xyz", ["persona", "triage"]) == "valid: persona, triage"
