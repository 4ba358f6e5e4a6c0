"""One LoRA adapter: its parameters, its Adam state, the weights it makes, its files.

Knows the layout of the model's weights and PEFT's file format; knows nothing about sampling,
losses or who trains it. All seven projections of each layer are adapted.

Low-rank pairs are stacked along the layers: A [L, r, in], B [L, out, r]; the adapter makes weights
W + (alpha / r) B A. How a batch of several adapters is multiplied is engine.project's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from metatrainer.engine.adam import Trained, details
from metatrainer.engine.model import ModelConfig, Weights
from metatrainer.errors import ConfigError

_MODULES = {
    "q_proj": "self_attn",
    "k_proj": "self_attn",
    "v_proj": "self_attn",
    "o_proj": "self_attn",
    "gate_proj": "mlp",
    "up_proj": "mlp",
    "down_proj": "mlp",
}
FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The modules that lie side by side in each projection of the model."""
PEFT_PREFIX = "base_model.model."
"""What PEFT puts before a module's name in the model."""
_STATE_FILE = "adapter_state.safetensors"


def _shapes(config: ModelConfig, rank: int) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """(A, B) shapes of each module, stacked along the layers."""
    d, f, n = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    inner = config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    sizes = {
        "q_proj": (d, inner),
        "k_proj": (d, kv),
        "v_proj": (d, kv),
        "o_proj": (inner, d),
        "gate_proj": (d, f),
        "up_proj": (d, f),
        "down_proj": (f, d),
    }
    return {m: ((n, rank, i), (n, o, rank)) for m, (i, o) in sizes.items()}


class Adapter(Trained):
    """Parameters and optimizer state of one adapter."""

    def __init__(self, config: ModelConfig, rank: int, alpha: float, device: str = "cpu"):
        self.config, self.rank, self.alpha = config, rank, alpha
        shapes = _shapes(config, rank)
        super().__init__([shape for pair in shapes.values() for shape in pair], device)
        self.scale = torch.full((), alpha / rank, device=device)
        pairs = zip(self.leaves[::2], self.leaves[1::2])
        self.pairs: dict[str, tuple[Tensor, Tensor]] = dict(zip(shapes, pairs))

    def initialise(self, seed: int) -> None:
        """A uniform as in PEFT (Kaiming, slope sqrt(5)), B zero: the adapter changes nothing."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for a, b in self.pairs.values():
                bound = 1 / math.sqrt(a.shape[-1])
                a.copy_((torch.rand(a.shape, generator=generator) * 2 - 1) * bound)
                b.zero_()
        self.version += 1

    def weights(self, base: Weights) -> Weights:
        """The base's weights with the adapter in them; differentiable where grad is on."""
        scale = self.alpha / self.rank
        delta = {m: (torch.bmm(b, a) * scale).to(base.o.dtype) for m, (a, b) in self.pairs.items()}
        changed = {
            name: getattr(base, name) + torch.cat([delta[m] for m in modules], dim=1)
            for name, modules in FUSED.items()
        }
        return replace(base, **changed)

    def copy(self) -> Adapter:
        """The same weights with a fresh optimizer: a frozen copy for sampling."""
        twin = Adapter(self.config, self.rank, self.alpha, str(self.flat.device))
        with torch.no_grad():
            twin.flat.copy_(self.flat)
        return twin

    def save_state(self, folder: Path) -> None:
        """Weights and optimizer, exact: training goes on bit for bit after load_state."""
        self.save(folder / _STATE_FILE, rank=str(self.rank), alpha=str(self.alpha))

    @classmethod
    def load_state(cls, config: ModelConfig, folder: Path, device: str = "cpu") -> Adapter:
        """Read what save_state wrote. Raises ConfigError if it is not there or does not fit."""
        meta = details(folder / _STATE_FILE)
        adapter = cls(config, int(meta["rank"]), float(meta["alpha"]), device)
        adapter.load(folder / _STATE_FILE)
        return adapter

    def save_peft(self, folder: Path, base_name: str) -> None:
        """Write adapter_config.json and adapter_model.safetensors as PEFT reads them."""
        tensors = {n: part.detach().cpu().clone().contiguous() for n, part in self._files()}
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        card = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_name,
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "target_modules": sorted(_MODULES),
            "inference_mode": True,
        }
        (folder / "adapter_config.json").write_text(json.dumps(card, indent=2) + "\n")

    @classmethod
    def load_peft(cls, config: ModelConfig, folder: Path, device: str = "cpu") -> Adapter:
        """Read a PEFT folder. Raises ConfigError where it is not an adapter of this very model:
        another shape, a tensor too many or too few, a number that is not finite."""
        try:
            card = json.loads((folder / "adapter_config.json").read_text())
            tensors = load_file(folder / "adapter_model.safetensors")
            rank, alpha = int(card["r"]), float(card["lora_alpha"])
            if rank < 1 or not 0 < alpha < math.inf:
                raise ValueError(f"rank {rank} and alpha {alpha}")
            return cls.of_tensors(config, tensors, rank, alpha, device)
        except (OSError, KeyError, TypeError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"{folder} is not a LoRA adapter of this model: {error}") from None

    @classmethod
    def of_tensors(
        cls,
        config: ModelConfig,
        tensors: dict[str, Tensor],
        rank: int,
        alpha: float,
        device: str = "cpu",
    ) -> Adapter:
        """An adapter of the tensors of a PEFT file. Raises ValueError where they are not those of
        this very model and rank, by name, shape and type, all of them and no other."""
        adapter = cls(config, rank, alpha, device)
        left = dict(tensors)
        with torch.no_grad():
            for name, part in adapter._files():
                if name not in left:
                    raise ValueError(f"it lacks {name}")
                part.copy_(_checked(name, left.pop(name), part))
        if left:
            raise ValueError(f"it adapts more than this model has: {sorted(left)[:3]}")
        adapter.version += 1
        return adapter

    def _files(self) -> Iterator[tuple[str, Tensor]]:
        """Each tensor of a PEFT file by its name."""
        for module, (a, b) in self.pairs.items():
            for i in range(self.config.num_hidden_layers):
                stem = f"{PEFT_PREFIX}model.layers.{i}.{_MODULES[module]}.{module}"
                yield f"{stem}.lora_A.weight", a[i]
                yield f"{stem}.lora_B.weight", b[i]


def _checked(name: str, found: Tensor, place: Tensor) -> Tensor:
    """A tensor of a file, if it fits its place. Raises ValueError."""
    if found.shape != place.shape:
        raise ValueError(f"{name} is {list(found.shape)}, not {list(place.shape)}")
    if not found.is_floating_point():
        raise ValueError(f"{name} holds {found.dtype}, not floats")
    if not found.isfinite().all():
        raise ValueError(f"{name} holds numbers that are not finite")
    return found
