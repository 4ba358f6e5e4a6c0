"""GGUF files against transformers: weights of each architecture and type, tokenizers, errors.

Small files are written here with the gguf package from models that transformers made; two real ones
are downloaded, in slow tests.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from metatrainer.engine.files import load_model, load_tokenizer
from metatrainer.engine.model import Plain, Rope, forward
from metatrainer.errors import ConfigError
from tests import published

TOLERANCE = 1e-3  # fp32, as for Hugging Face folders
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=16),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=16, sliding_window=5, query_pre_attn_scalar=16
    ),
}
KINDS = [
    gguf.GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
]


def gguf_name(name, kind):
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], 2)
    return names.get_name(name, try_suffixes=(".weight", ".bias"))


def permuted(weight, heads):
    """As llama.cpp's converter does for Llama: halves of a head to neighbouring pairs."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write(path, kind, model, quantised, extra=()):
    """The model as a GGUF file; the model itself gets the weights that the file holds."""
    config = model.config
    writer = gguf.GGUFWriter(path, kind)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    if kind == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    for key, value in extra:
        writer.add_key_value(key, value, gguf.GGUFValueType.STRING)
    tied = config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if tied and name == "lm_head.weight":
            continue
        weight = parameter.detach().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        module = name.split(".")[-2]
        as_is = kind == "llama" and module in heads
        stored = permuted(weight, heads[module]) if as_is else weight
        stored = stored + 1 if kind == "gemma3" and "norm" in name else stored
        how = quantised if weight.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = gguf.quantize(np.ascontiguousarray(stored, dtype=np.float32), how)
        writer.add_tensor(gguf_name(name, kind), data, raw_dtype=how)
        if weight.ndim == 2:
            kept = gguf.dequantize(data, how)
            if as_is:  # the other way round
                kept = kept.reshape(heads[module], -1, 2, weight.shape[1]).swapaxes(1, 2)
            parameter.data = torch.from_numpy(kept.reshape(weight.shape).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def random_model(kind):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


@torch.no_grad()
def difference(path, model, ids):
    config, weights = load_model(path)
    rope = Rope(config, "cpu", torch.float32)
    hidden, _, _ = forward(config, weights, Plain(weights), rope, ids)
    return (F.linear(hidden, weights.head) - model(ids).logits).abs().max()


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("quantised", KINDS, ids=lambda q: q.name)
def test_logits_agree_with_transformers(tmp_path, kind, quantised):
    path = tmp_path / "model.gguf"
    model = random_model(kind)
    write(path, kind, model, quantised)
    ids = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    assert difference(path, model, ids) < TOLERANCE


TEXTS = [
    "In 1984 there were 366  days.",
    "def f(x):\n\treturn x ** 2\n\n",
    "naïve 日本語 🤖 it's",
    "<|im_start|>user\nhi<|im_end|>",
]


def vocabulary(path, kind, pre, tokens, types, **more):
    """A GGUF that holds a tokenizer alone."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


SMOLLM = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
)


def test_a_byte_level_tokenizer_cuts_as_the_one_it_came_from(tmp_path):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = SMOLLM
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        TEXTS * 20,
        trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    model = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    path = tmp_path / "tokenizer.gguf"
    vocabulary(
        path,
        "gpt2",
        "smollm",
        tokens,
        [3, 3, 3] + [1] * (len(tokens) - 3),
        token_merges=[" ".join(pair) for pair in model["merges"]],
        bos_token_id=1,
        eos_token_id=2,
        chat_template="{{ messages }}",
    )
    ours = load_tokenizer(path)
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == tokenizer.encode(text).ids
        assert ours.decode(ids) == text
    assert (ours.eos_token, ours.chat_template) == ("<|im_end|>", "{{ messages }}")


def test_a_sentencepiece_tokenizer_merges_by_score(tmp_path):
    pieces = {"▁": 0, "a": 0, "b": 0, "c": 0, "bc": -1, "ab": -2, "abc": -3, "▁a": -4, "▁ab": -5}
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "\n\n", *bytes_, *pieces]
    path = tmp_path / "tokenizer.gguf"
    vocabulary(
        path,
        "llama",
        "default",
        tokens,
        [3, 3, 3, 3, 4] + [6] * 256 + [1] * len(pieces),
        token_scores=[0.0] * (5 + 256) + [float(score) for score in pieces.values()],
        bos_token_id=2,
        eos_token_id=1,
        unk_token_id=3,
        add_bos_token=True,
        add_space_prefix=False,
    )
    ours = load_tokenizer(path)

    def said(text):
        return ours.convert_ids_to_tokens(ours.encode(text, add_special_tokens=False))

    assert said("abc") == ["abc"]  # a + bc, as bc comes first
    assert said("ab ab") == ["ab", "▁ab"]
    assert said("cab\n\né") == ["c", "ab", "\n\n", "<0xC3>", "<0xA9>"]
    assert ours.encode("ab")[0] == tokens.index("<bos>")
    for text in ("ab  abc\n\n日本", " a"):
        assert ours.decode(ours.encode(text, add_special_tokens=False)) == text


def test_what_cannot_be_read_says_why(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not one")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        load_model(path)
    vocabulary(path, "gpt2", "joyai", ["a"], [1])
    with pytest.raises(ConfigError, match="'joyai' is not supported; supported: gpt-2, smollm"):
        load_tokenizer(path)
    with pytest.raises(ConfigError, match="no weights"):
        load_model(path)
    write(path, "llama", random_model("llama"), KINDS[0], [("llama.rope.scaling.type", "yarn")])
    with pytest.raises(ConfigError, match="yarn"):
        load_model(path)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match="'mamba' is not supported; supported in GGUF: llama"):
        load_model(path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", published.MODELS)
@torch.no_grad()
def test_published_models_agree_with_transformers(name):
    path = published.fetch(name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    tokenizer = load_tokenizer(path)
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    ids = torch.tensor([tokenizer.encode(text)[:600]])  # past Gemma's window of 512
    at = torch.arange(3, 599, 4)
    config, weights = load_model(path)
    rope = Rope(config, "cpu", torch.float32)
    hidden, _, _ = forward(config, weights, Plain(weights), rope, ids)
    ours = F.linear(hidden[0, at], weights.head)
    theirs = model(ids, logits_to_keep=at).logits[0]
    assert (ours - theirs).abs().max() < TOLERANCE
    known = ours.log_softmax(-1).gather(1, ids[0, at + 1, None])
    assert known.mean() > -3  # -10.8 and -12.5 by chance: the tokens are the model's own
