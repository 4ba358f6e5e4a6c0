"""The losses of `forward_backward`, in Tinker's terms: sums over tokens, not means.

Each takes the log-probabilities of the target tokens, a table of tensors of the same shape
[tokens] and its settings, and returns the summed loss. Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

Inputs = Mapping[str, Tensor]
LossConfig = Mapping[str, float]


def cross_entropy(logprobs: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    """-sum(weight * logprob)."""
    return -(inputs["weights"] * logprobs).sum()


def importance_sampling(logprobs: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    """-sum(ratio * advantage), ratio = exp(logprob - old): the policy gradient, off-policy too."""
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def ppo(logprobs: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    """-sum(min(ratio * advantage, clip(ratio) * advantage)) (Schulman et al. 2017)."""
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -(ratio * advantages).minimum(_clip(ratio, config) * advantages).sum()


def cispo(logprobs: Tensor, inputs: Inputs, config: LossConfig) -> Tensor:
    """-sum(clip(ratio) * advantage * logprob), the weight held fixed (MiniMax-M1, 2025)."""
    weight = _clip(_ratio(logprobs, inputs), config).detach()
    return -(weight * inputs["advantages"] * logprobs).sum()


LOSSES: dict[str, Callable[[Tensor, Inputs, LossConfig], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
}

INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("old_logprobs", "advantages"),
    "ppo": ("old_logprobs", "advantages"),
    "cispo": ("old_logprobs", "advantages"),
}
"""Fields of a training row that each loss reads; the last one says where there is a gradient."""

_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
CONFIG: dict[str, LossConfig] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": _CLIP,
    "cispo": _CLIP,
}
"""Settings of each loss, with their defaults: what the ratio is clipped to."""


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return (logprobs - inputs["old_logprobs"]).exp()


def _clip(ratio: Tensor, config: LossConfig) -> Tensor:
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
