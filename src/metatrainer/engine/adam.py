"""What is trained: numbers in one flat tensor, with gradients and Adam's state beside them.

All parameters are views of one tensor, gradients and moments likewise, so that Adam is a handful of
operations whatever the number of modules. Knows nothing about what the parameters are of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from metatrainer.errors import ConfigError


@dataclass(frozen=True)
class AdamParams:
    """Adam's settings for one step."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled, as in AdamW."""
    grad_clip_norm: float = 0.0
    """Largest norm of the gradient; 0 leaves it as it is."""


class Trained:
    """Parameters and optimizer state."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: str):
        sizes = [math.prod(shape) for shape in shapes]
        self.flat = torch.zeros(sum(sizes), device=device)
        self.grad = torch.zeros_like(self.flat)
        self.moment1 = torch.zeros_like(self.flat)
        self.moment2 = torch.zeros_like(self.flat)
        self.steps = 0
        self.version = 0
        """Counts changes of the weights, so that whoever caches something can notice."""
        self.leaves: list[Tensor] = []
        """Views of the shapes that were asked for, each with its gradient."""
        for shape, piece, grad in zip(shapes, self.flat.split(sizes), self.grad.split(sizes)):
            leaf = piece.view(shape).requires_grad_()
            leaf.grad = grad.view(shape)
            self.leaves.append(leaf)

    @torch.no_grad()
    def adam_step(self, params: AdamParams) -> float:
        """One Adam step on the gathered gradient, which is then cleared. Returns its norm."""
        norm = float(self.grad.norm())
        if params.grad_clip_norm > 0 and norm > params.grad_clip_norm:
            self.grad.mul_(params.grad_clip_norm / norm)
        self.steps += 1
        self.moment1.lerp_(self.grad, 1 - params.beta1)
        self.moment2.mul_(params.beta2).addcmul_(self.grad, self.grad, value=1 - params.beta2)
        if params.weight_decay:
            self.flat.mul_(1 - params.learning_rate * params.weight_decay)
        scale = (1 - params.beta2**self.steps) ** 0.5
        denominator = self.moment2.sqrt().div_(scale).add_(params.eps)
        step_size = params.learning_rate / (1 - params.beta1**self.steps)
        self.flat.addcdiv_(self.moment1, denominator, value=-step_size)
        self.grad.zero_()
        self.version += 1
        return norm

    def save(self, path: Path, **more: str) -> None:
        """Weights and optimizer, exact: training goes on bit for bit after `load`."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {"flat": self.flat, "moment1": self.moment1, "moment2": self.moment2}
        save_file(
            {k: v.detach().cpu().contiguous() for k, v in tensors.items()},
            path,
            metadata={"steps": str(self.steps), **more},
        )

    @torch.no_grad()
    def load(self, path: Path) -> None:
        """Read what `save` wrote. Raises ConfigError where it is of something else."""
        with safe_open(path, "pt") as file:
            if file.get_tensor("flat").shape != self.flat.shape:
                raise ConfigError(f"the state at {path.parent} belongs to another base model")
            for name in ("flat", "moment1", "moment2"):
                getattr(self, name).copy_(file.get_tensor(name))
            self.steps = int(file.metadata()["steps"])
        self.version += 1


def details(path: Path) -> Mapping[str, str]:
    """What was written beside a state. Raises ConfigError where there is none."""
    if not path.exists():
        raise ConfigError(f"no state at {path.parent}")
    with safe_open(path, "pt") as file:
        found: dict[str, str] = file.metadata()
    return found
