"""The losses of `forward_backward`, in Tinker's terms: sums over tokens, not means.

Each takes the log-probabilities of the target tokens and a table of tensors of the same shape
[tokens], and returns the summed loss. Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def cross_entropy(logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """-sum(weight * logprob)."""
    return -(inputs["weights"] * logprobs).sum()


def importance_sampling(logprobs: Tensor, inputs: dict[str, Tensor]) -> Tensor:
    """-sum(exp(logprob - old logprob) * advantage): the policy gradient, unbiased off-policy."""
    ratio = (logprobs - inputs["old_logprobs"]).exp()
    return -(ratio * inputs["advantages"]).sum()


LOSSES: dict[str, Callable[[Tensor, dict[str, Tensor]], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
}

INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": ("old_logprobs", "advantages"),
}
"""Fields of a training row that each loss reads; the last one says where there is a gradient."""
