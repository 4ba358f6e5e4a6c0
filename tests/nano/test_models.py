"""The shipped models: what the card says of them holds, and transformers reads them."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from metatrainer import families
from metatrainer.chat import PLAIN_TOKENS, SPECIAL_TOKENS
from metatrainer.engine import Engine
from metatrainer.engine.model import Plain, forward
from metatrainer.errors import ConfigError
from metatrainer.nano.build import AGENT, NAMES, STUDENTS, right_arguments
from metatrainer.students import catalogue


def test_all_fit_the_limits():
    size = sum(f.stat().st_size for f in catalogue.MODELS.rglob("*") if f.is_file())
    assert size < 40 * 1024 * 1024
    models = catalogue.models()
    assert tuple(m.name for m in models.values() if not (m.path or m.hub)) == NAMES
    assert all(100_000 <= models[r.name].parameters <= 3_000_000 for r in STUDENTS)
    assert models[AGENT].parameters <= 10_000_000


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_the_same_model(name):
    folder = catalogue.MODELS / name
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    engine = Engine(folder)
    assert model.num_parameters() == catalogue.models()[name].parameters
    ids = torch.tensor([tokenizer.encode("Who is the boss of the friend of BelMar?\n" * 4)])
    with torch.no_grad():
        hidden, _, _ = forward(engine.config, engine.base, Plain(engine.base), engine.rope, ids)
        ours, theirs = F.linear(hidden, engine.base.head), model(ids).logits
    assert (ours - theirs).abs().max() < 1e-3
    for token in (*SPECIAL_TOKENS, *PLAIN_TOKENS):
        assert len(tokenizer.encode(token)) == 1


@pytest.mark.parametrize("recipe", STUDENTS, ids=lambda r: r.name)
@pytest.mark.parametrize("name", families.NAMES)
def test_students_copy_names(recipe, name):
    """When an untrained student calls a tool, it is about the name in the question.

    What it was shown little of, two names in one question, it still mixes up now and then.
    """
    engine = Engine(catalogue.verified_folder(recipe.name))
    called, right = right_arguments(engine, families.get(name))
    assert called > 0.03
    assert right > (0.95 if recipe.skills[name].share > 0.1 else 0.5)


def test_other_weights_are_noticed(tmp_path, monkeypatch):
    for path in catalogue.MODELS.rglob("*"):
        target = tmp_path / path.relative_to(catalogue.MODELS)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    monkeypatch.setattr(catalogue, "MODELS", tmp_path)
    weights = bytearray((tmp_path / "nano-wren" / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (tmp_path / "nano-wren" / "model.safetensors").write_bytes(weights)
    with pytest.raises(ConfigError, match="not the catalogue's"):
        catalogue.verified_folder("nano-wren")
    assert catalogue.verified_folder("nano-finch") == tmp_path / "nano-finch"


def test_unknown_names_and_roles():
    with pytest.raises(ConfigError, match="did you mean 'nano-wren'"):
        catalogue.get("nano-wran")
    with pytest.raises(ConfigError, match="unknown student"):
        catalogue.get("nano-agent")
