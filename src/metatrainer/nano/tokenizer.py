"""The nano models' tokenizer: a byte-level BPE with Qwen3's chat and tool tokens.

Made so that little models can copy: each syllable of a name is one token wherever it stands, and
the scaffold of a tool call is cut the same way each time. Knows nothing about models.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from metatrainer.chat import PLAIN_TOKENS, SPECIAL_TOKENS
from metatrainer.families.names import FIRST, SECOND

_PIECES = Regex(
    r"""\{"name": "|", "arguments": \{"|": "|", "|"\}\}"""  # the scaffold of a tool call
    r"""|\\n(?:    )*| ?\\"|\\\\"""  # escapes in the JSON strings that hold files
    r"""|[A-Z]{2,}|[A-Z][a-z]*| ?[a-z_]+|\d| ?[^\sA-Za-z\d\\"_]+|"|\n(?:    )*|\s"""
)

CHAT_TEMPLATE = """\
{%- set system = messages[0]['content'] if messages and messages[0]['role'] == 'system' else '' -%}
{%- set ns = namespace(parts=[], lines=[system] if system else []) -%}
{%- for tool in tools or [] -%}
{%- set schema = tool['function'] if tool['function'] is defined else tool -%}
{%- set ns.lines = ns.lines + [schema['name'] + '(' + (schema['parameters']['properties'] or {}) \
| join(', ') + ')'] -%}
{%- endfor -%}
{%- if ns.lines -%}
{%- set ns.parts = ['<|im_start|>system\\n' + ns.lines | join('\\n') + '<|im_end|>'] -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'tool' -%}
{%- set ns.parts = ns.parts + ['<|im_start|>user\\n<tool_response>\\n' + message['content'] \
+ '\\n</tool_response><|im_end|>'] -%}
{%- elif message['role'] != 'system' -%}
{%- set body = namespace(lines=[message['content']] if message['content'] else []) -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] if call['function'] is defined else call -%}
{%- set body.lines = body.lines + ['<tool_call>\\n{"name": "' + function['name'] \
+ '", "arguments": ' + function['arguments'] | tojson + '}\\n</tool_call>'] -%}
{%- endfor -%}
{%- set ns.parts = ns.parts + ['<|im_start|>' + message['role'] + '\\n' + body.lines | join('\\n') \
+ '<|im_end|>'] -%}
{%- endif -%}
{%- endfor -%}
{{- ns.parts | join('\\n') -}}
{%- if add_generation_prompt -%}{{- '\\n<|im_start|>assistant\\n' -}}{%- endif -%}"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn the merges from texts. The same texts give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS]
    added += [AddedToken(t, special=False, normalized=False) for t in PLAIN_TOKENS]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(added),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    syllables = [" ".join(FIRST + SECOND)] * 1000  # frequent enough to become tokens of their own
    tokenizer.train_from_iterator([*syllables, *texts], trainer)
    tokenizer.add_tokens([t for t in added if not t.special])
    tokenizer.add_special_tokens([t for t in added if t.special])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context: int) -> None:
    """Write tokenizer files that transformers loads, chat template included."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder, as transformers loads it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)
