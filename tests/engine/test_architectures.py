"""Every supported architecture against transformers and peft: logits, caches, adapters, files.

The models are random and tiny, made by transformers itself. Gemma's window is shorter than the
sequences, so that local and full layers differ.
"""

import json

import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

from metatrainer.engine import Engine, SampleRequest, SamplingParams, TrainRow
from metatrainer.engine.files import load_model, save_model
from metatrainer.engine.model import Chunk, KVCache, Plain, extend, forward
from metatrainer.errors import ConfigError

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SIZES, rope_parameters=LLAMA3, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=False),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, head_dim=12, sliding_window=5, sliding_window_pattern=2, query_pre_attn_scalar=20
    ),
}
TOLERANCE = 1e-3  # fp32; logits reach 10 to 100 here


@pytest.fixture(scope="module", params=CONFIGS)
def reference(request, tmp_path_factory):
    """(folder in several shards, transformers model); no weight is at its initial value."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases
                parameter.add_(torch.randn_like(parameter) * 0.3)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder, model


@pytest.fixture(scope="module")
def engine(reference):
    return Engine(reference[0])


def tokens(rows, length, seed=0):
    return torch.randint(1, 61, (rows, length), generator=torch.Generator().manual_seed(seed))


def logits(engine, ids):
    hidden, _, _ = forward(engine.config, engine.base, Plain(engine.base), engine.rope, ids)
    return F.linear(hidden, engine.base.head)


def moved(engine, seed=1):
    adapter = engine.create_adapter(4, alpha=8, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in engine._get(adapter).pairs.values():
            b.copy_(torch.randn(b.shape, generator=generator) * 0.2)
    engine._get(adapter).version += 1
    return adapter


@torch.no_grad()
def test_logits_agree_with_transformers(reference, engine):
    assert len(list(reference[0].glob("*.safetensors"))) > 1
    ids = tokens(2, 60)
    theirs = reference[1](ids).logits
    assert theirs.std() > 1
    assert (logits(engine, ids) - theirs).abs().max() < TOLERANCE


def test_a_cache_filled_in_pieces_agrees_with_the_whole(engine):
    ids = tokens(3, 40)
    cache = KVCache(engine.config, 3, 4, "cpu", torch.float32)
    plain = Plain(engine.base)
    hidden, _, _ = forward(engine.config, engine.base, plain, engine.rope, ids)
    at = torch.zeros(3, dtype=torch.long)
    for counts in ([11, 3, 7], [1, 1, 1], [1, 0, 1], [9, 20, 2], [1, 1, 1], [1, 1, 1]):
        count = torch.tensor(counts)
        piece = torch.stack(
            [F.pad(row[a : a + c], (0, max(counts) - c)) for row, a, c in zip(ids, at, counts)]
        )
        chunk = Chunk(piece, None if min(counts) == max(counts) else count, cache)
        (last,) = extend(engine.config, engine.base, plain, engine.rope, [chunk])
        at = at + count
        for row in range(3):
            if counts[row]:
                assert (last[row] - hidden[row, at[row] - 1]).abs().max() < TOLERANCE


def test_sampled_and_trained_logprobs_are_the_models_own(reference, engine):
    adapter = moved(engine)
    prompts = [[*tokens(1, 70)[0].tolist(), i] for i in range(1, 5)]  # shared, so computed once
    params = SamplingParams(12)
    samples = engine.sample(
        [SampleRequest(p, params, adapter, seed=i) for i, p in enumerate(prompts)]
    )
    rows = []
    for prompt, sample in zip(prompts, samples):
        whole = prompt + sample.tokens
        scored = engine.logprobs([whole], adapter)[0][len(prompt) - 1 :]
        assert sample.logprobs == pytest.approx(scored, abs=TOLERANCE)
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(sample.tokens)
        rows.append(TrainRow(whole[:-1], whole[1:], weights=weights))
    trained = engine.forward_backward(rows, adapter, "cross_entropy", backward=False)
    for prompt, sample, logprobs in zip(prompts, samples, trained.logprobs):
        assert logprobs[len(prompt) - 1 :] == pytest.approx(sample.logprobs, abs=TOLERANCE)


@torch.no_grad()
def test_adapters_open_in_peft(reference, engine, tmp_path):
    adapter = moved(engine)
    engine.save_adapter(adapter, tmp_path)
    base = AutoModelForCausalLM.from_pretrained(reference[0])
    theirs = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    ids = tokens(1, 30)
    hidden, _, _ = forward(
        engine.config, engine.base, Plain(engine.weights(adapter)), engine.rope, ids
    )
    expected = theirs(ids).logits
    assert (expected - reference[1](ids).logits).abs().max() > 0.1
    assert (F.linear(hidden, engine.base.head) - expected).abs().max() < TOLERANCE


@torch.no_grad()
def test_saved_models_are_loaded_by_transformers_and_by_us(reference, engine, tmp_path):
    save_model(tmp_path, engine.config, engine.base)
    ids = tokens(1, 60)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again(ids).logits - reference[1](ids).logits).abs().max() < TOLERANCE
    assert load_model(tmp_path)[0] == engine.config


@pytest.fixture
def folder(tmp_path):
    """A model folder whose config a test may change."""
    AutoModelForCausalLM.from_config(CONFIGS["llama"]()).save_pretrained(tmp_path)

    def change(**settings):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return tmp_path

    return change


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Qwen3ForCausalLM"]),
        ({"architectures": []}, ["supported: LlamaForCausalLM"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"hidden_act": "relu"}, ["relu", "silu"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["yarn", "llama3"]),
        ({"hidden_size": 10**6, "intermediate_size": 10**6}, ["GiB free", "smaller model"]),
        ({"num_hidden_layers": 4}, ["lacks the tensor model.layers.3."]),
        ({"intermediate_size": 50}, ["gate_up", "[3, 100, 32]"]),
    ],
)
def test_what_cannot_be_loaded_says_why(folder, settings, words):
    with pytest.raises(ConfigError) as error:
        load_model(folder(**settings))
    for word in words:
        assert word in str(error.value)
