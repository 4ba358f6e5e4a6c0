"""The losses against their definitions written out for single tokens, in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from metatrainer.engine.losses import CONFIG, INPUTS, LOSSES

RNG = np.random.default_rng(0)
LOGPROBS = RNG.uniform(-4, -0.1, 40)
OLD = LOGPROBS + RNG.uniform(-0.6, 0.6, 40)  # ratios from 0.55 to 1.8: inside and outside the clip
ADVANTAGES = RNG.uniform(-1, 1, 40)


def _cross_entropy(p, old, a, low, high):
    return -a * p, -a


def _importance_sampling(p, old, a, low, high):
    return -np.exp(p - old) * a, -np.exp(p - old) * a


def _ppo(p, old, a, low, high):
    r = np.exp(p - old)
    clipped = min(max(r, low), high)
    if r * a <= clipped * a:  # the plain term is the smaller one: it has the gradient
        return -r * a, -r * a
    return -clipped * a, 0.0


def _cispo(p, old, a, low, high):
    weight = min(max(np.exp(p - old), low), high)
    return -weight * a * p, -weight * a


REFERENCES = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("clip", [(0.8, 1.2), (0.5, 1.05)])
def test_value_and_gradient(name: str, clip: tuple[float, float]) -> None:
    config = dict(zip(CONFIG[name], clip))
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    inputs = {"old_logprobs": torch.tensor(OLD), "advantages": torch.tensor(ADVANTAGES)}
    inputs["weights"] = inputs["advantages"]
    loss = LOSSES[name](logprobs, {k: inputs[k] for k in INPUTS[name]}, config)
    loss.backward()
    expected = [REFERENCES[name](*token, *clip) for token in zip(LOGPROBS, OLD, ADVANTAGES)]
    values, slopes = zip(*expected)
    assert float(loss.detach()) == pytest.approx(sum(values))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(slopes)


def test_clipping_makes_a_difference() -> None:
    """The numbers above do lie on both sides of the clip, for both signs of the advantage."""
    ratio = np.exp(LOGPROBS - OLD)
    for sign in (-1, 1):
        mine = ratio[np.sign(ADVANTAGES) == sign]
        assert (mine < 0.8).any() and (mine > 1.2).any() and ((mine > 0.8) & (mine < 1.2)).any()
