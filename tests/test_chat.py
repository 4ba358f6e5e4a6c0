"""The chat format: the same ids as the tokenizer's own template, and a parser nothing breaks."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from metatrainer.chat import Call, ChatFormat, parse_text
from metatrainer.errors import ConfigError
from metatrainer.families.names import names
from metatrainer.nano.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

TOOL = {"name": "lookup", "parameters": {"properties": {"name": {}, "relation": {}}}}
MESSAGES = [
    {"role": "system", "content": "You look things up."},
    {"role": "user", "content": "Who is the boss of BelMar?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "lookup", "arguments": {"name": "BelMar", "relation": "boss"}}],
    },
    {"role": "tool", "content": "KelRon"},
    {"role": "assistant", "content": "KelRon"},
    {"role": "user", "content": 'And é ß 漢字 \\ "quotes"\n\ttabs?'},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    text = '<|im_start|>assistant\n{"name": "lookup", "arguments": {"name": "BelMar"}}'
    save_tokenizer(train_tokenizer([text] * 20, 400), folder, 128)
    return load_tokenizer(folder)


def test_ids_are_those_of_the_template(tokenizer):
    chat = ChatFormat(tokenizer)
    for messages in (MESSAGES[1:2], MESSAGES[:4], MESSAGES):
        for tools in ([], [TOOL]):
            ours = chat.prompt(messages, tools)
            theirs = tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, return_dict=False
            )
            assert ours == theirs


def test_growing_by_ids_equals_rendering_anew(tokenizer):
    chat = ChatFormat(tokenizer)
    start = chat.prompt(MESSAGES[:2], [TOOL])
    sampled = chat.encode(chat._render(MESSAGES[2]).removeprefix("<|im_start|>assistant\n"))
    grown = start + sampled + chat.continuation([MESSAGES[3]])
    assert grown == chat.prompt(MESSAGES[:4], [TOOL])
    cut = start + sampled[:-1] + chat.continuation([MESSAGES[3]], ended=False)
    assert cut == grown


def test_every_name_is_two_tokens_wherever_it_stands(tokenizer):
    for split in ("train", "dev", "hidden"):
        for name in names(split)[:60]:
            ids = tokenizer.encode(name)
            assert len(ids) == 2
            for text in (f"of {name}?", json.dumps({"name": name}), f"\n{name}\n"):
                found = tokenizer.encode(text)
                assert any(found[i : i + 2] == ids for i in range(len(found)))


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in ("a  b\n\n    c", "é ß 漢字 🎲", 'x = "\\n\\"y\\""', "\x00\x07"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("text", "calls", "error"),
    [
        (
            '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>',
            [("a", {"x": 1})],
            None,
        ),
        ('<tool_call>{"name": "a"}</tool_call>', [("a", {})], None),
        ("hello", [], None),
        ("<tool_call>\n{'name': 'a'}\n</tool_call>", [], "not JSON"),
        ('<tool_call>\n{"name": "a", "arguments": {}\n</tool_call>', [], "not JSON"),
        ('<tool_call>\n["a"]\n</tool_call>', [], '"name"'),
        ('<tool_call>\n{"name": 3}\n</tool_call>', [], '"name"'),
        ('<tool_call>\n{"name": "a", "arguments": "x"}\n</tool_call>', [], "object"),
        ('<tool_call>\n{"name": "a"}', [], "not closed"),
        (
            '<tool_call>{"name": "a"}</tool_call><tool_call>nope</tool_call>',
            [("a", {})],
            "not JSON",
        ),
    ],
)
def test_whatever_is_sampled_can_be_parsed(text, calls, error):
    turn = parse_text(text)
    assert list(turn.calls) == [Call(*c) for c in calls]
    assert (error is None) == (not turn.errors)
    assert error is None or error in turn.errors[0]


def test_a_turn_without_its_end_token_is_not_clean(tokenizer):
    chat = ChatFormat(tokenizer)
    ids = chat.encode("KelRon")
    assert not chat.parse(ids).clean
    assert chat.parse([*ids, *chat.stop]).clean
    assert chat.parse([*ids, *chat.stop]).text == "KelRon"
    assert not chat.parse([]).clean


def test_a_model_with_gemmas_turns_gets_them():
    """The text is what Gemma's published template makes of the same messages."""
    marks = ["<bos>", "<start_of_turn>", "<end_of_turn>"]
    letters = Tokenizer(models.BPE({chr(i): i for i in range(128)}, []))
    letters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, extra_special_tokens=marks)
    chat = ChatFormat(tokenizer)
    for system in ([], MESSAGES[:1]):
        told = "You look things up.\n\n" if system else ""
        expected = (
            f"<bos><start_of_turn>user\n{told}Who is the boss of BelMar?<end_of_turn>\n"
            "<start_of_turn>model\n"
        )
        assert tokenizer.decode(chat.prompt([*system, MESSAGES[1]])) == expected
    sampled = tokenizer.encode("KelRon<end_of_turn>")
    assert chat.parse(sampled).text == "KelRon" and chat.parse(sampled).clean
    heard = tokenizer.decode(chat.continuation([MESSAGES[1]]))
    assert heard == (
        "\n<start_of_turn>user\nWho is the boss of BelMar?<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_tokenizer_without_turns_is_refused():
    plain = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE({"a": 0}, [])))
    with pytest.raises(ConfigError, match="made for chat"):
        ChatFormat(plain)
