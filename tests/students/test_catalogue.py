"""Students of one's own: added, checked whenever they are opened, primed to call tools."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny import make_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from metatrainer import families
from metatrainer.cli.app import app
from metatrainer.config import EvalSettings, RunSettings, check_names
from metatrainer.engine import Engine
from metatrainer.errors import ConfigError
from metatrainer.nano.build import right_arguments
from metatrainer.students import catalogue
from metatrainer.students.evaluate import evaluate
from metatrainer.students.prime import Priming, prime


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(catalogue.HOME, str(tmp_path / "home"))
    catalogue.models.cache_clear()
    yield tmp_path / "home"
    catalogue.models.cache_clear()


@pytest.fixture
def tiny(tmp_path) -> Path:
    return make_model(tmp_path / "a-folder")


def test_an_added_student_may_be_named_by_a_run(tiny):
    model = catalogue.add("mine", tiny)
    assert "mine" in catalogue.students() and "mine" not in catalogue.shipped()
    assert catalogue.verified_folder("mine") == tiny
    assert model.parameters == sum(p.numel() for p in _transformers(tiny).parameters())
    check_names(RunSettings(students=("nano-wren", "mine")))
    engine = Engine.open(tiny, "mine")
    items = families.get("persona").items("dev", 0, 8)
    score = evaluate(engine, None, families.get("persona"), items, EvalSettings(), 0)
    assert score.student == "mine"  # and not what its folder is called


def _transformers(folder: Path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_weights_that_changed_or_went_are_noticed(tiny):
    catalogue.add("mine", tiny)
    weights = bytearray((tiny / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tiny / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError, match=r"not the catalogue's.*students remove mine"):
        catalogue.verified_folder("mine")
    tiny.rename(tiny.with_name("elsewhere"))
    with pytest.raises(ConfigError, match=r"mine is gone.*students remove mine"):
        catalogue.verified_folder("mine")
    catalogue.remove("mine")
    assert "mine" not in catalogue.students()


@pytest.mark.parametrize(
    ("name", "words"),
    [("nano-wren", "already"), ("../up", "no name"), ("Big", "no name"), ("", "no name")],
)
def test_names_that_cannot_be(tiny, home, name, words):
    with pytest.raises(ConfigError, match=words):
        catalogue.add(name, tiny)
    assert not home.exists()


def test_what_cannot_hold_a_conversation_is_refused(tiny, home):
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0, "b": 1}, [])))
    plain.save_pretrained(tiny)
    with pytest.raises(ConfigError, match="made for chat"):
        catalogue.add("mine", tiny)
    (tiny / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="architecture"):
        catalogue.add("mine", tiny)
    assert not home.exists()


def test_a_broken_list_says_where_it_is(home):
    (home / "models").mkdir(parents=True)
    (home / "models" / "manifest.json").write_text('[{"name": "x"}]')
    with pytest.raises(ConfigError, match=r"manifest\.json does not list models"):
        catalogue.models()


def test_priming_teaches_how_a_call_is_written(tmp_path):
    """The agent's model writes the same calls, but never in answer to a student's question."""
    agent, persona = catalogue.verified_folder("nano-agent", "agent"), families.get("persona")
    how = Priming(steps=40, batch=16, learning_rate=5e-3)
    losses = [loss for _, loss in prime(Engine(agent), tmp_path / "primed", how)]
    assert losses[-1] < losses[0] / 2
    before, _ = right_arguments(Engine(agent), persona)
    after, _ = right_arguments(Engine(tmp_path / "primed"), persona)
    # Of what it is shown, two in three begin with a call.
    assert before == 0 and after > 0.2


def test_commands(home, tmp_path):
    tiny = tmp_path / "a-folder"
    shutil.copytree(catalogue.verified_folder("nano-wren"), tiny)

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["students", *arguments], catch_exceptions=False)
        assert result.exit_code == 0
        return result.output

    assert "mine" in run("add", "mine", str(tiny))
    run("prime", "mine", "mine-tools", "--steps", "1")
    run("prime", "mine", "mine-all", "--steps", "1", "--full")
    listed = {model["name"]: model for model in json.loads(run("--json"))}
    assert listed["mine"]["path"] == str(tiny)
    assert listed["mine-tools"]["path"] == str(home / "models" / "mine-tools")
    assert listed["mine-tools"]["sha256"] != listed["mine"]["sha256"]
    run("remove", "mine")
    assert "mine-tools" in run() and str(tiny) not in run()
    with pytest.raises(ConfigError, match="no file or folder"):
        run("add", "other", "no such thing")
