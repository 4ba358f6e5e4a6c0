"""All weights of a base model in training, in single precision, with Adam's state.

The base itself follows after each step, in its own place and type, so whatever samples from it goes
on. Sixteen bytes a parameter beside the base. Knows nothing about adapters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from metatrainer.engine.adam import AdamParams, Trained
from metatrainer.engine.model import ModelConfig, Weights

STATE_FILE = "full_state.safetensors"


class FullWeights(Trained):
    """A base's weights, trained."""

    def __init__(self, config: ModelConfig, base: Weights):
        self._names = list(config.shapes())
        super().__init__(list(config.shapes().values()), str(base.embed.device))
        self._base = base
        with torch.no_grad():
            for name, leaf in zip(self._names, self.leaves):
                leaf.copy_(getattr(base, name))

    def weights(self) -> Weights:
        """In the base's type; differentiable where grad is on."""
        made = {n: leaf.to(self._base.embed.dtype) for n, leaf in zip(self._names, self.leaves)}
        made.setdefault("head", made["embed"])
        return replace(self._base, **made)

    def adam_step(self, params: AdamParams) -> float:
        """See Trained; the base follows."""
        norm = super().adam_step(params)
        self._follow()
        return norm

    def load(self, path: Path) -> None:
        """See Trained; the base follows."""
        super().load(path)
        self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        for name, leaf in zip(self._names, self.leaves):
            getattr(self._base, name).copy_(leaf)
