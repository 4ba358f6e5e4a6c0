"""A tiny random Llama with a byte-level chat tokenizer, for tests that need any model at all."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from metatrainer.chat import PLAIN_TOKENS, SPECIAL_TOKENS

CONTEXT = 512


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and the chat format's own tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    base = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    base.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL_TOKENS])
    base.add_tokens([AddedToken(t, normalized=False) for t in PLAIN_TOKENS])
    return PreTrainedTokenizerFast(tokenizer_object=base, eos_token=SPECIAL_TOKENS[0])


def make_model(folder: Path, seed: int = 0) -> Path:
    """Write the model and its tokenizer."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
