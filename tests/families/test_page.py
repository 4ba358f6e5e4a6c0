"""The pages of the docs are those that the families make."""

from pathlib import Path

from metatrainer import families
from metatrainer.families import page

PAGES = Path(__file__).parents[2] / "docs" / "families"


def test_the_pages_of_the_docs_are_as_the_families_make_them(tmp_path):
    """If this fails: python -m metatrainer.families.page docs/families"""
    made = {path.name: path.read_text() for path in page.write(tmp_path)}
    assert made == {path.name: path.read_text() for path in PAGES.iterdir()}
    assert set(made) == {f"{name}.md" for name in families.NAMES}


def test_a_page_shows_each_level_solved():
    family = families.get("persona")
    text = page.render(family)
    for level in family.levels:
        (item,) = family.items("dev", 0, 1, level)
        assert f"### Level {level}\n\n```text\nuser       {item.prompt}" in text
        assert f"assistant  {item.answer}\n```" in text
