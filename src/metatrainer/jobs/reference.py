"""The page on job.toml in the docs, made from its declaration so that it cannot grow old.

    python -m metatrainer.jobs.reference docs/reference/job-toml.md

Knows how job.toml is declared; knows nothing about how a job is checked or run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

from pydantic.fields import FieldInfo

from metatrainer import toml
from metatrainer.jobs.spec import TABLES, VERSIONS, JobSpec, allowed

_BEGIN = """\
# job.toml

The settings of a job: which student, how it is trained, on which environment. The file lies in the
job's folder beside the environment's package, and means the same to the embedded engine and to
prime-rl. It is strict: a key that is not here, a value of another type or out of its bounds is a
finding with its line, and the job is refused. `metatrainer job new FAMILY` writes a job that works,
`metatrainer job validate FOLDER --family FAMILY` checks one."""
_END = """\
## Between settings

- `batch_size` is a multiple of `group_size`.
- `max_tokens` is at most `seq_len`.
- `max_steps` x `batch_size`, the rollouts of the job, is within the limit of its task.
- `model` is one of the students that its task allows."""
_EXAMPLE = {"model": "nano-wren", "learning_rate": 1e-3}
"""Values of the keys that have no default."""


def render() -> str:
    """The page as Markdown: the keys of each table, all of them as a file, and what holds between
    them."""
    version = {"version": JobSpec.model_fields["version"]}
    parts = [_BEGIN, "## Before the tables", _rows(version)]
    for name, table in TABLES.items():
        about = (table.__doc__ or "").partition(": ")[2]
        parts += [f"## [{name}]", about[:1].upper() + about[1:], _rows(table.model_fields)]
    return "\n\n".join([*parts, "## All of it", _example(), _END]) + "\n"


def _rows(fields: Mapping[str, FieldInfo]) -> str:
    rows = ["| key | allowed | if left out | what it is |", "|---|---|---|---|"]
    for name, field in fields.items():
        may_be = ", ".join(map(str, VERSIONS)) if name == "version" else allowed(field)
        default = "refused" if field.is_required() else f"`{json.dumps(field.default)}`"
        about = " ".join((field.description or "").split())
        rows.append(f"| `{name}` | {may_be} | {default} | {about} |")
    return "\n".join(rows)


def _example() -> str:
    tables = {
        name: {key: _EXAMPLE.get(key, field.default) for key, field in table.model_fields.items()}
        for name, table in TABLES.items()
    }
    return f"```toml\n{toml.dumps({'version': VERSIONS[-1], **tables})}```"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    page.write_text(render(), encoding="utf-8")
    print(f"wrote {page}")
