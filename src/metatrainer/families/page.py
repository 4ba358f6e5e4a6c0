"""The page of a family in the docs, made from the family itself so that it cannot grow old.

    python -m metatrainer.families.page docs/families

writes the pages of all families that ship.
"""

from __future__ import annotations

import sys
from pathlib import Path

from metatrainer import families
from metatrainer.families.base import Family, Item


def render(family: Family) -> str:
    """The page as Markdown: goal, tools, levels, and a transcript of each level."""
    parts = [
        f"# {family.name}: {family.title}",
        f"The student is to {family.goal}. It answers with {family.answer_format}.",
        "## Tools",
        "\n".join(_tool_line(tool.schema) for tool in family.tools),
        "A tool that does not know a key, or is called with wrong arguments, answers with a line "
        "that begins with `error:`.",
        "## Levels",
        f"Levels {', '.join(map(str, family.levels))}; the hidden evaluation is at level "
        f"{family.eval_level}. One example of each, solved by the calls of a perfect student:",
    ]
    for level in family.levels:
        (item,) = family.items("dev", seed=0, n=1, level=level)
        parts += [f"### Level {level}", f"```text\n{transcript(family, item)}\n```"]
    parts += [
        "## Try it",
        f"    metatrainer families play {family.name}\n"
        f"    metatrainer families check {family.name}\n"
        f"    metatrainer job new {family.name}",
    ]
    return "\n\n".join(parts) + "\n"


def transcript(family: Family, item: Item) -> str:
    """What is asked, called, heard and answered."""
    lines = [f"user       {item.prompt}"]
    for name, arguments in item.calls:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        lines += [f"assistant  {name}({given})"]
        lines += [_heard(family.call(item.world, name, arguments))]
    return "\n".join([*lines, f"assistant  {item.answer}"])


def _heard(result: str) -> str:
    return "tool       " + result.replace("\n", "\n           ")


def _tool_line(schema: dict) -> str:
    arguments = schema["parameters"]["properties"]
    signature = ", ".join(f"{name}: {spec['type']}" for name, spec in arguments.items())
    return f"- `{schema['name']}({signature})`: {schema['description']}"


def write(folder: Path) -> list[Path]:
    """Write the pages of the families that ship. Returns them."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {folder / f"{name}.md": families.get(name) for name in families.NAMES}
    for path, family in pages.items():
        path.write_text(render(family), encoding="utf-8")
    return list(pages)


if __name__ == "__main__":
    for page in write(Path(sys.argv[1])):
        print(f"wrote {page}")
