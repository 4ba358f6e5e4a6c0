"""The tokenizer inside a GGUF file, built again for the `tokenizers` library.

A GGUF names the vocabulary, but the rule that cuts text before any merge only by a word, and of a
SentencePiece vocabulary it has no merges, only scores. Both are restored here. Knows nothing about
chat formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from metatrainer.engine.gguf_file import open_gguf, value
from metatrainer.errors import ConfigError

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
"""Token types of the GGUF format."""
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen2 cut text; they differ in how many digits stay together."""
_ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def load_gguf_tokenizer(path: Path) -> Any:
    """A transformers fast tokenizer. Raises ConfigError for a kind that is not supported."""
    from transformers import PreTrainedTokenizerFast

    reader = open_gguf(path)
    tokens = value(reader, "tokenizer.ggml.tokens")
    if not tokens:
        raise ConfigError(f"{path} has no tokenizer")
    kind = value(reader, "tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(reader, tokens, path)
    elif kind == "llama":
        tokenizer = _sentencepiece(reader, tokens)
    else:
        raise ConfigError(f"{path}: tokenizer {kind!r} is not supported; supported: gpt2, llama")
    types = value(reader, "tokenizer.ggml.token_type", [])
    special = [AddedToken(t, special=True) for t, k in zip(tokens, types) if k == _CONTROL]
    plain = [AddedToken(t, normalized=False) for t, k in zip(tokens, types) if k == _USER_DEFINED]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    numbers = {role: value(reader, f"tokenizer.ggml.{n}_token_id") for role, n in _ROLES.items()}
    roles = {f"{role}_token": tokens[n] for role, n in numbers.items() if n is not None}
    if value(reader, "tokenizer.ggml.add_bos_token", False):
        bos = roles["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, numbers["bos"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        chat_template=value(reader, "tokenizer.chat_template"),
        **roles,
    )


def _byte_level(reader: Any, tokens: list[str], path: Path) -> Tokenizer:
    merges = [tuple(m.split(" ", 1)) for m in value(reader, "tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    cuts = {
        "gpt-2": words,
        "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words]),
        "llama-bpe": pre_tokenizers.Sequence([_split("{1,3}"), whole]),
        "qwen2": pre_tokenizers.Sequence([_split(""), whole]),
    }
    name = value(reader, "tokenizer.ggml.pre")
    if name not in cuts:
        raise ConfigError(
            f"{path}: pre-tokenizer {name!r} is not supported; supported: {', '.join(cuts)}"
        )
    tokenizer.pre_tokenizer = cuts[name]
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split(digits: str) -> Any:
    return pre_tokenizers.Split(Regex(_WORDS.format(digits=digits)), behavior="isolated")


def _sentencepiece(reader: Any, tokens: list[str]) -> Tokenizer:
    """BPE over characters, a space written as an underline, unknown characters as bytes."""
    numbers = {token: i for i, token in enumerate(tokens)}
    unknown = value(reader, "tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            numbers,
            _merges(numbers, value(reader, "tokenizer.ggml.scores")),
            unk_token=tokens[unknown],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    spaces = [normalizers.Replace(" ", "▁")]
    ends = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if value(reader, "tokenizer.ggml.add_space_prefix", True):
        spaces.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


def _merges(numbers: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All ways to make a token of two others; SentencePiece takes the best-scored one first."""
    ranked = []
    for token, i in numbers.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in numbers and right in numbers:
                ranked.append((-scores[i], numbers[left], numbers[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]
