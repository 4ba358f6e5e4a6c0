"""Training all weights of a base, against plain PyTorch on transformers' own model."""

import copy

import pytest
import torch

from metatrainer.engine import AdamParams, Engine, SampleRequest, SamplingParams
from metatrainer.errors import ConfigError
from tests.engine.test_engine import moved, prompts, reference_loss, train_rows

ADAM = AdamParams(1e-3, weight_decay=0.1, grad_clip_norm=1.0)


def step(engine, adam=ADAM):
    output, found = engine.update(train_rows(), None, "importance_sampling", adam)
    return output.loss, found["grad_norm"]


def logits(engine, row):
    return torch.tensor(engine.logprobs([row], None)[0])


@pytest.fixture
def engine(reference):
    engine = Engine(reference[0])
    engine.train_all()
    return engine


def test_it_agrees_with_plain_pytorch(reference, engine):
    """Losses, gradient norms and the model that comes of three steps of AdamW."""
    model = copy.deepcopy(reference[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for _ in range(3):
        theirs = reference_loss(model, train_rows(), "importance_sampling")
        optimizer.zero_grad()
        theirs.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss, ours = step(engine)
        assert loss == pytest.approx(float(theirs.detach()), rel=1e-3)
        assert ours == pytest.approx(float(norm), rel=1e-3)
    row = prompts(1, seed=7, low=15)[0]
    with torch.no_grad():
        wanted = model(torch.tensor([row])).logits[0].log_softmax(-1)
    wanted = wanted[:-1].gather(1, torch.tensor(row)[1:, None])[:, 0]
    # Adam moves a weight whose gradient is near zero by up to lr whatever its size.
    assert (logits(engine, row) - wanted).abs().mean() < 5e-3
    before = torch.tensor(Engine(reference[0]).logprobs([row], None)[0])
    assert (before - wanted).abs().mean() > 0.05  # which the steps did change


def test_what_is_sampled_follows(engine):
    """Samples after a step are the new model's, known beginnings of the old one forgotten."""
    request = SampleRequest(prompts(1, low=18)[0], SamplingParams(8), None, seed=1)
    engine.sample([request])
    step(engine, AdamParams(0.02))
    (sample,) = engine.sample([request])
    scored = engine.logprobs([request.prompt + sample.tokens], None)[0]
    assert sample.logprobs == pytest.approx(scored[len(request.prompt) - 1 :], abs=1e-3)


def test_it_goes_on_bit_for_bit(reference, engine, tmp_path):
    step(engine)
    engine.save_state(None, tmp_path)
    again = Engine(reference[0])
    again.train_all(tmp_path)
    assert step(again) == step(engine)
    row = prompts(1, low=18)[0]
    assert torch.equal(logits(again, row), logits(engine, row))


def test_in_bfloat16_small_steps_add_up(reference):
    """The base is rounded, what is trained is not: steps below the rounding are not lost."""
    engine = Engine(reference[0], dtype=torch.bfloat16)
    engine.train_all()
    before = engine.base.o.clone()
    for _ in range(20):
        step(engine, AdamParams(1e-4))
    assert (engine.base.o != before).float().mean() > 0.2


def test_it_has_a_base_to_itself(reference, engine, tmp_path):
    with pytest.raises(ConfigError, match="trains its base"):
        engine.create_adapter(4)
    with pytest.raises(ConfigError, match="no state at"):
        engine.train_all(tmp_path)
    shared = Engine(reference[0])
    with pytest.raises(ConfigError, match="not trained here"):
        step(shared)
    moved(shared)
    with pytest.raises(ConfigError, match="1 adapters sit on this base"):
        shared.train_all()
