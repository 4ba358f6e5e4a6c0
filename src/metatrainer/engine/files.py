"""Models on disk: Hugging Face folders, whole or in shards, and GGUF files.

Knows files and memory; which names mean what is engine.layouts', the computation engine.model's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from metatrainer.engine import memory
from metatrainer.engine.gguf_file import read_gguf
from metatrainer.engine.layouts import (
    config_from_hf,
    hf_from_config,
    layer_tensors,
    norm_offset,
)
from metatrainer.engine.model import ModelConfig, Weights
from metatrainer.errors import ConfigError

Tensors = Mapping[str, Callable[[], Tensor]]
"""What reads each tensor of a model, by its Hugging Face name."""

_EMBED, _NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


def load_model(
    path: Path, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[ModelConfig, Weights]:
    """Read a model's folder or GGUF file.

    Raises ConfigError if it is not a model, of an unknown architecture, incomplete, or larger than
    the memory that is free.
    """
    raw, tensors = read_gguf(path) if is_gguf(path) else _read_folder(path)
    config = config_from_hf(raw, str(path))
    _check_memory(path, config, device, dtype)
    try:
        return config, _stack(path, config, tensors, device, dtype)
    except memory.EXCEPTIONS as error:
        if not memory.is_out_of_memory(error):
            raise
        raise ConfigError(f"{path} does not fit into the memory of {device}") from None


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model's folder or GGUF file, as transformers has it."""
    if is_gguf(path):
        from metatrainer.engine.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def is_gguf(path: Path) -> bool:
    """Whether a model is one GGUF file rather than a folder."""
    return path.suffix == ".gguf" and path.is_file()


def load_config(folder: Path) -> ModelConfig:
    """What a model's folder says of its shape. Raises ConfigError as load_model does."""
    return config_from_hf(_read_config(folder), str(folder))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        raise ConfigError(f"{folder} is not a model folder: it has no config.json")
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


def _read_folder(folder: Path) -> tuple[dict[str, Any], Tensors]:
    raw = _read_config(folder)
    shards = sorted(folder.glob("model*.safetensors"))
    if not shards:
        raise ConfigError(f"{folder} has no model.safetensors")
    tensors: dict[str, Callable[[], Tensor]] = {}
    for shard in shards:
        try:
            file = safe_open(shard, "pt")
        except SafetensorError as error:
            raise ConfigError(f"{shard} is damaged: {error}") from None
        tensors |= {name: _reader(file, name) for name in file.keys()}  # noqa: SIM118
    return raw, tensors


def _reader(file: Any, name: str) -> Callable[[], Tensor]:
    return lambda: file.get_tensor(name)


def _check_memory(path: Path, config: ModelConfig, device: str, dtype: torch.dtype) -> None:
    needed = config.parameters() * dtype.itemsize
    free = _free_bytes(device)
    if needed > free:
        raise ConfigError(
            f"{path}: its {config.parameters() / 1e6:,.0f} M parameters need "
            f"{needed / 2**30:.1f} GiB as {str(dtype).removeprefix('torch.')}, and {device} has "
            f"{free / 2**30:.1f} GiB free; take a smaller model or free memory"
        )


def _free_bytes(device: str) -> int:
    if device != "cpu":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is free")


def _stack(
    path: Path, config: ModelConfig, tensors: Tensors, device: str, dtype: torch.dtype
) -> Weights:
    """The table of weights, one stacked tensor after another, so that little is held twice."""
    offset = norm_offset(config)

    def read(name: str) -> Tensor:
        if name not in tensors:
            raise ConfigError(f"{path} lacks the tensor {name}")
        tensor = tensors[name]().float()
        return tensor + offset if offset and "norm" in name else tensor

    def place(name: str, tensor: Tensor) -> Tensor:
        if tensor.shape != config.shapes()[name]:
            raise ConfigError(
                f"{path}: {name} has the shape {list(tensor.shape)}, and by its config it should "
                f"have {list(config.shapes()[name])}"
            )
        return tensor.to(device, dtype)

    embed = place("embed", read(_EMBED))
    made = {
        "embed": embed,
        "head": embed if config.tie_word_embeddings else place("head", read(_HEAD)),
        "norm": place("norm", read(_NORM)),
    }
    for name, parts in layer_tensors(config).items():
        layers = [
            torch.cat([read(f"model.layers.{i}.{part}") for part in parts]).to(dtype)
            for i in range(config.num_hidden_layers)
        ]
        made[name] = place(name, torch.stack(layers))
    return Weights(**made)


def save_model(folder: Path, config: ModelConfig, weights: Weights) -> None:
    """Write config.json and model.safetensors so that transformers loads the same model."""
    h, g, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    heads = (h * dim, g * dim, g * dim)
    sizes = {"qkv": heads, "qkv_bias": heads, "gate_up": (config.intermediate_size,) * 2}
    tensors = {_EMBED: weights.embed, _NORM: weights.norm}
    if not config.tie_word_embeddings:
        tensors[_HEAD] = weights.head
    for name, parts in layer_tensors(config).items():
        stacked = getattr(weights, name)
        for i in range(config.num_hidden_layers):
            pieces = stacked[i].split(sizes[name]) if name in sizes else (stacked[i],)
            for part, piece in zip(parts, pieces):
                tensors[f"model.layers.{i}.{part}"] = piece
    offset = norm_offset(config)
    written = {
        name: (tensor.detach().cpu() - (offset if "norm" in name else 0.0)).contiguous().clone()
        for name, tensor in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf_from_config(config), indent=2) + "\n")
