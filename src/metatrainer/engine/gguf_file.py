"""GGUF files as what a Hugging Face folder holds: a config and tensors by their names there.

Quantised weights are read as fp32 numbers, by the `gguf` package. Knows the format's keys and what
its writers changed (Llama's queries and keys are permuted, Gemma's norms contain their 1); the
tokenizer inside is engine.gguf_tokenizer's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from metatrainer.errors import ConfigError

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_SIZES = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_GEMMA_LAYER = _IN_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def open_gguf(path: Path) -> Any:
    """The file as gguf.GGUFReader. Raises ConfigError if there is none or it is damaged."""
    try:
        import gguf
    except ImportError:
        raise ConfigError(
            f"reading {path.name} takes the gguf package; install it with: "
            "pip install 'metatrainer[gguf]'"
        ) from None
    try:
        return gguf.GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"{path} is not a GGUF file: {error}") from None


def value(reader: Any, key: str, default: Any = None) -> Any:
    """A value of the file's metadata."""
    field = reader.get_field(key)
    return default if field is None else field.contents()


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Callable[[], Tensor]]]:
    """config.json's content, and what reads each tensor, by their Hugging Face names.

    Raises ConfigError for an unsupported architecture and for a part of a split file.
    """
    reader = open_gguf(path)
    kind = value(reader, "general.architecture")
    if kind not in _ARCHITECTURES:
        raise ConfigError(
            f"{path}: architecture {kind!r} is not supported; "
            f"supported in GGUF: {', '.join(_ARCHITECTURES)}"
        )
    if value(reader, "split.count", 1) > 1:
        raise ConfigError(f"{path} is one part of several; merge them into one file first")
    found = {tensor.name: tensor for tensor in reader.tensors}
    if "rope_freqs.weight" in found:
        raise ConfigError(
            f"{path} scales its rotations by a table, which is not supported; "
            "take the model's Hugging Face folder instead"
        )
    config = _config(reader, kind, found, path)
    names = {_hf_name(name, kind): tensor for name, tensor in found.items()}
    return config, {name: _reader(name, tensor, config, path) for name, tensor in names.items()}


def _config(reader: Any, kind: str, found: dict[str, Any], path: Path) -> dict[str, Any]:
    if "token_embd.weight" not in found:
        raise ConfigError(f"{path} has no weights (token_embd.weight)")
    given = {ours: value(reader, f"{kind}.{key}") for ours, key in _SIZES.items()}
    raw = {name: number for name, number in given.items() if number is not None}
    raw |= {
        "architectures": [_ARCHITECTURES[kind]],
        "vocab_size": int(found["token_embd.weight"].shape[1]),
        "num_key_value_heads": value(
            reader, f"{kind}.attention.head_count_kv", raw.get("num_attention_heads")
        ),
        "head_dim": value(reader, f"{kind}.attention.key_length"),
        "rope_theta": value(reader, f"{kind}.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in found,
    }
    if scaling := value(reader, f"{kind}.rope.scaling.type"):
        raw["rope_scaling"] = {"rope_type": "default" if scaling == "none" else scaling}
    if kind == "gemma3":
        raw["sliding_window"] = value(reader, "gemma3.attention.sliding_window")
        raw["query_pre_attn_scalar"] = raw["head_dim"]
    return raw


def _hf_name(name: str, kind: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("blk."):
        return f"{_WHOLE.get(stem, stem)}.{suffix}"
    _, layer, part = stem.split(".", 2)
    parts = _IN_GEMMA_LAYER if kind == "gemma3" else _IN_LAYER
    return f"model.layers.{layer}.{parts.get(part, part)}.{suffix}"


def _reader(name: str, tensor: Any, config: dict[str, Any], path: Path) -> Callable[[], Tensor]:
    import gguf

    architecture = config["architectures"][0]
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    module = name.split(".")[-2]

    def read() -> Tensor:
        try:
            numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError:
            kind = tensor.tensor_type.name
            raise ConfigError(f"{path}: weights of the type {kind} are not supported") from None
        weight = torch.from_numpy(numbers.copy())
        if architecture == "LlamaForCausalLM" and module in heads:
            return _half_split(weight, heads[module])
        if architecture == "Gemma3ForCausalLM" and "norm" in name:
            return weight - 1
        return weight

    return read


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """From pairs of neighbouring rotated dimensions to Hugging Face's halves of each head."""
    pairs = weight.view(heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
