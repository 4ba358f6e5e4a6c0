"""Conversations as tokens: the same as ChatFormat's, and nothing sampled is tokenised again."""

from __future__ import annotations

import pytest
import tiny
from tinker_cookbook.renderers import get_renderer

from metatrainer import chat
from metatrainer.chat import ChatFormat
from metatrainer.outer import renderer
from metatrainer.outer.conversation import Conversation

TOOLS = [
    {
        "name": "write_file",
        "description": "Create or replace one file",
        "parameters": {"type": "object", "properties": {"path": {}, "content": {}}},
    },
    {"name": "submit_job", "description": "Submit", "parameters": {"type": "object"}},
]
START = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go: ä\n\n x."}]
CALL = chat.call_text("write_file", {"path": "job.toml", "content": "ö = 1\n"})
RESULTS = [{"role": "tool", "tool_call_id": "0", "name": "write_file", "content": "written"}]


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.make_tokenizer()


@pytest.fixture(scope="module")
def format_(tokenizer):
    return ChatFormat(tokenizer)


@pytest.fixture
def talk(tokenizer):
    return Conversation(renderer.get("nano", tokenizer), START, TOOLS)


def test_the_first_prompt_is_the_chat_formats(talk, format_):
    assert talk.prompt.to_ints() == format_.prompt(START, TOOLS)


def test_tools_alone_make_a_system_message(tokenizer, format_):
    talk = Conversation(renderer.get("nano", tokenizer), START[1:], TOOLS)
    assert talk.prompt.to_ints() == format_.prompt(START[1:], TOOLS)


def test_calls_and_results_render_as_the_chat_format_does(tokenizer, format_):
    nano = renderer.get("nano", tokenizer)
    sampled = format_.encode(f"Now.\n{CALL}<|im_end|>")
    message, _ = nano.parse_response(sampled)
    prefix = nano.create_conversation_prefix_with_tools(TOOLS, "Be brief.")
    rendered = nano.build_generation_prompt([*prefix, START[1], message, *RESULTS]).to_ints()
    turn = format_.parse(sampled)
    calls = [{"name": c.name, "arguments": c.arguments} for c in turn.calls]
    said = {"role": "assistant", "content": turn.text, "tool_calls": calls}
    assert rendered == format_.prompt([*START, said, *RESULTS], TOOLS)


def test_a_prompt_grows_by_the_sampled_tokens_and_the_chat_formats_tool_turn(talk, format_):
    # Not what encoding the same text would give: "Now" and its space as bytes of their own.
    sampled = [*format_.encode("No"), *format_.encode("w. "), *format_.encode(f"{CALL}<|im_end|>")]
    before = talk.prompt.to_ints()
    message = talk.hear(sampled)
    assert message == {
        "role": "assistant",
        "content": "Now.",
        "tool_calls": [
            {
                "id": "call-0",
                "name": "write_file",
                "arguments": {"path": "job.toml", "content": "ö = 1\n"},
            }
        ],
        "errors": [],
    }
    talk.answer(RESULTS)
    assert talk.prompt.to_ints() == [
        *before,
        *sampled,
        *format_.continuation([{"role": "tool", "content": "written"}]),
    ]


def test_a_hint_follows_the_results_as_a_message_of_the_user(talk, tokenizer):
    talk.hear(tokenizer.encode("hm<|im_end|>"))
    talk.answer([*RESULTS, {"role": "user", "content": "Call a tool."}])
    text = tokenizer.decode(talk.prompt.to_ints())
    assert text.endswith(
        "hm<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nwritten\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nCall a tool.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_message_that_was_cut_off_is_closed_and_explained(talk, tokenizer):
    cut = tokenizer.encode('<tool_call>\n{"name": "wri')
    message = talk.hear(cut)
    assert message["tool_calls"] == []
    assert message["errors"][0] == f"the message was cut off after {len(cut)} tokens, the limit"
    before = talk.prompt.to_ints()
    talk.answer([{"role": "user", "content": "Shorter."}])
    tail = "<|im_end|>\n<|im_start|>user\nShorter.<|im_end|>\n<|im_start|>assistant\n"
    assert talk.prompt.to_ints() == [*before, *cut, *tokenizer.encode(tail)]


def test_a_cut_off_message_does_not_act(talk, format_):
    """A call may be whole before the cut; what was meant to follow is not known."""
    assert talk.hear(format_.encode(CALL))["tool_calls"] == []


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('<tool_call>\n{"name": "submit_job", }\n</tool_call>', "not JSON"),
        ('<tool_call>\n{"name": "submit_job", "arguments": [1]}\n</tool_call>', "must be an"),
        ('<tool_call>\n{"arguments": {}}\n</tool_call>', '"name"'),
        ('<tool_call>\n{"name": "submit_job"', "not closed"),
    ],
)
def test_a_malformed_call_is_an_error_in_the_message(talk, format_, text, error):
    message = talk.hear(format_.encode(f"{text}<|im_end|>"))
    assert message["tool_calls"] == []
    assert error in message["errors"][0]


def test_any_tokens_can_be_heard(talk, tokenizer):
    """Tokens of random weights: broken UTF-8, markup in the wrong order."""
    markup = tokenizer.convert_tokens_to_ids(["</tool_call>", "<tool_call>", "<|im_start|>"])
    for tokens in ([], [200, 201, 202], markup, list(range(256))):
        assert talk.hear(tokens)["role"] == "assistant"


def test_other_renderers_of_the_cookbook_work_too(tokenizer):
    """Their prompts are rendered anew; a call, its result and a hint are in them."""
    for name in ("qwen3_instruct", "qwen3"):
        talk = Conversation(get_renderer(name, tokenizer), START, TOOLS)
        message = talk.hear(tokenizer.encode(f"Now.\n{CALL}<|im_end|>"))
        assert message["tool_calls"][0]["arguments"]["path"] == "job.toml"
        talk.answer([*RESULTS, {"role": "user", "content": "Go on."}])
        text = tokenizer.decode(talk.prompt.to_ints())
        for part in ("Create or replace one file", "job.toml", "written", "Go on."):
            assert part in text, name


def test_arguments_that_are_no_object_are_an_error_with_other_renderers(tokenizer):
    talk = Conversation(get_renderer("qwen3_instruct", tokenizer), START, TOOLS)
    text = '<tool_call>\n{"name": "submit_job", "arguments": [1]}\n</tool_call><|im_end|>'
    message = talk.hear(tokenizer.encode(text))
    assert message["tool_calls"] == []
    assert len(message["errors"]) == 1
