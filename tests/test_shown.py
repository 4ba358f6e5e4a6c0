"""Text of others is shown, never obeyed."""

from __future__ import annotations

import pytest

from metatrainer.shown import LINE_CHARS, one_line, visible


@pytest.mark.parametrize(
    "planted",
    ["\x1b[31mred", "\x1b]0;title\x07", "\u202egnp.exe", "\u2066x\u2069", "a\rb", "\x00", "\x9b1m",
     "\u200b", "\ufeff", "\u2028", "\ud800"],
)  # fmt: skip
def test_nothing_is_left_that_acts(planted: str) -> None:
    for shown in (visible(planted, 100), one_line(planted, 100)):
        assert shown.replace("\n", "").isprintable()
        assert "\\x" in shown or "\\u" in shown  # it is there to be seen, not dropped


def test_ordinary_text_stays_as_it_is() -> None:
    text = "def f():\n\treturn 'Straße, 東京, é'  # ok"
    assert visible(text, 100) == text


def test_long_texts_and_lines_are_cut_and_say_so() -> None:
    shown = visible("x" * 10_000_000, 50_000)
    assert len(shown) < 2 * LINE_CHARS
    assert "more characters" in shown
    assert visible("a\n" * 100, 10).endswith("190 more characters")
    assert one_line("a\nb" * 50, 20).endswith("…")
    assert "\n" not in one_line("a\nb" * 50, 20)
