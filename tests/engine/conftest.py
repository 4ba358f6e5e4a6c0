"""A tiny random Llama, made by transformers itself, so that it is an independent reference."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    """(folder, transformers model) of a random model with grouped heads."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=96,
        rope_theta=500.0,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("tiny-llama")
    model.save_pretrained(folder)
    return folder, model
