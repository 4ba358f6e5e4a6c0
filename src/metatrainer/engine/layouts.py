"""Which Hugging Face configs and tensor names are which ModelConfig and Weights, and back.

Knows the supported architectures as data; knows nothing about files or the computation.
"""

from __future__ import annotations

from typing import Any

from metatrainer.engine.model import ModelConfig, RopeScaling
from metatrainer.errors import ConfigError

_FEATURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {"qkv_bias": True},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "Gemma3ForCausalLM": {"qk_norm": True, "post_norms": True, "activation": "gelu_tanh"},
}
_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3_text",
}
SUPPORTED = tuple(_FEATURES)
_ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}
_SAME = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_UNUSUAL = {
    "mlp_bias": False,
    "use_sliding_window": False,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
"""Settings that change the computation, with the only value that is supported."""


def config_from_hf(raw: dict[str, Any], where: str) -> ModelConfig:
    """The ModelConfig that a config.json describes. Raises ConfigError for what is unsupported."""
    names = raw.get("architectures") or [None]
    if names[0] not in _FEATURES:
        raise ConfigError(
            f"{where}: architecture {names[0]} is not supported; supported: {', '.join(SUPPORTED)}"
        )
    features = _FEATURES[names[0]]
    gemma = names[0] == "Gemma3ForCausalLM"
    _refuse_unusual(raw, where, features)
    if missing := [name for name in _SAME if name not in raw]:
        raise ConfigError(f"{where}: config.json lacks {', '.join(missing)}")
    same = {name: raw[name] for name in _SAME}
    theta, scaling, local_theta = _rope(raw, where)
    if gemma:
        features = {
            **features,
            "embed_scale": raw["hidden_size"] ** 0.5,
            "query_scale": raw.get("query_pre_attn_scalar", 256) ** -0.5,
            "window": raw.get("sliding_window"),
            "local_layers": _local_layers(raw),
            "local_rope_theta": local_theta,
        }
    return ModelConfig(
        **same,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        rope_theta=theta,
        rope_scaling=scaling,
        tie_word_embeddings=raw.get("tie_word_embeddings", gemma),
        architecture=names[0],
        **features,
    )


def _refuse_unusual(raw: dict[str, Any], where: str, features: dict[str, Any]) -> None:
    expected = {
        **_UNUSUAL,
        "attention_bias": features.get("qkv_bias", False),
        "hidden_act": (activation := _ACTIVATIONS[features.get("activation", "silu")]),
        "hidden_activation": activation,
    }
    for name, only in expected.items():
        found = raw.get(name, only)
        if found != only and not (found is None and name.startswith("hidden_act")):
            raise ConfigError(f"{where}: {name} = {found!r} is not supported; supported: {only!r}")


def _rope(raw: dict[str, Any], where: str) -> tuple[float, RopeScaling | None, float]:
    """Base and scaling of full layers, base of local ones: as transformers 4 and 5 write them."""
    given = raw.get("rope_parameters") or {}
    full = given.get("full_attention", given)
    local = given.get("sliding_attention", {})
    default = 1_000_000.0 if raw["architectures"][0] == "Gemma3ForCausalLM" else 10_000.0
    theta = raw.get("rope_theta") or full.get("rope_theta") or default
    local_theta = raw.get("rope_local_base_freq") or local.get("rope_theta") or 10_000.0
    scaling = raw.get("rope_scaling") or full
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return theta, None, local_theta
    if kind != "llama3":
        raise ConfigError(
            f"{where}: rope type {kind!r} is not supported; supported: default, llama3"
        )
    return (
        theta,
        RopeScaling(
            scaling["factor"],
            scaling["low_freq_factor"],
            scaling["high_freq_factor"],
            scaling["original_max_position_embeddings"],
        ),
        local_theta,
    )


def _local_layers(raw: dict[str, Any]) -> tuple[bool, ...]:
    if kinds := raw.get("layer_types"):
        return tuple(kind == "sliding_attention" for kind in kinds)
    every = raw.get("sliding_window_pattern", 6)
    return tuple((i + 1) % every != 0 for i in range(raw["num_hidden_layers"]))


def hf_from_config(config: ModelConfig) -> dict[str, Any]:
    """The config.json that transformers reads back as the same model."""
    activation = _ACTIVATIONS[config.activation]
    raw = {
        "architectures": [config.architecture],
        "model_type": _MODEL_TYPES[config.architecture],
        "hidden_act": activation,
        "attention_bias": config.qkv_bias,
        "mlp_bias": False,
        "dtype": "float32",
        **{name: getattr(config, name) for name in _SAME},
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
    if scaling := config.rope_scaling:
        raw["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_context,
        }
    if config.architecture == "Gemma3ForCausalLM":
        kinds = ("full_attention", "sliding_attention")
        scale = config.query_scale or config.head_dim**-0.5
        raw |= {
            "hidden_activation": activation,
            "query_pre_attn_scalar": round(scale**-2),
            "sliding_window": config.window,
            "layer_types": [kinds[local] for local in config.local_layers],
            "rope_local_base_freq": config.local_rope_theta,
        }
    return raw


def norm_offset(config: ModelConfig) -> float:
    """What is added to the norms' weights in a file: Gemma stores what they differ from 1 by."""
    return 1.0 if config.architecture == "Gemma3ForCausalLM" else 0.0


def layer_tensors(config: ModelConfig) -> dict[str, list[str]]:
    """For each stacked tensor, the suffixes of the Hugging Face tensors it is made of."""
    before, after = "input_layernorm.weight", "post_attention_layernorm.weight"
    names = {
        "attn_norm": [before],
        "qkv": [f"self_attn.{p}_proj.weight" for p in "qkv"],
        "o": ["self_attn.o_proj.weight"],
        "mlp_norm": [after],
        "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "down": ["mlp.down_proj.weight"],
    }
    if config.qkv_bias:
        names["qkv_bias"] = [f"self_attn.{p}_proj.bias" for p in "qkv"]
    if config.qk_norm:
        names |= {f"{p}_norm": [f"self_attn.{p}_norm.weight"] for p in "qk"}
    if config.post_norms:
        names |= {
            "attn_post": [after],
            "mlp_norm": ["pre_feedforward_layernorm.weight"],
            "mlp_post": ["post_feedforward_layernorm.weight"],
        }
    return names
