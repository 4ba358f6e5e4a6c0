"""The last layer in training: log-probabilities of given tokens, without a table of all of them.

Of a frozen head one function of autograd, so that a vocabulary's worth of numbers for each token is
written once and turned into its own gradient in place, where the library's parts would make four.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def target_logprobs(states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Log-probability of each target [M] after its state [M, d]; head [V, d]."""
    if head.requires_grad:  # all weights are trained
        logits = F.linear(states, head).float()
        return logits.log_softmax(dim=-1).gather(1, targets[:, None])[:, 0]
    kind = _OnGpu if states.is_cuda else _OnCpu
    picked: Tensor = kind.apply(states, head, targets)
    return picked


class _OnCpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        logits = F.linear(states, head).float()
        top = logits.amax(dim=-1, keepdim=True)
        chosen = logits.gather(1, targets[:, None])
        weight = logits.sub_(top).exp_()
        total = weight.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(weight, total, head, targets)
        return (chosen - top - total.log())[:, 0]

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        weight, total, head, targets = ctx.saved_tensors
        slope = given[0][:, None].to(weight.dtype)
        gradient = weight.mul_(-slope / total)  # softmax, times what comes from above; used once
        gradient.scatter_add_(1, targets[:, None], slope)
        return gradient.to(head.dtype) @ head, None, None


class _OnGpu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        from metatrainer.engine import kernels  # needs Triton

        logits = F.linear(states, head)
        picked, spread = kernels.pick(logits, targets)
        ctx.save_for_backward(logits, spread, head, targets)
        return picked

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor, None, None]:
        from metatrainer.engine import kernels

        logits, spread, head, targets = ctx.saved_tensors
        kernels.pick_back(logits, targets, given[0].contiguous(), spread)  # used once
        return logits @ head, None, None
