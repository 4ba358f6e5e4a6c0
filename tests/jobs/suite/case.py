"""A case of the suite, and the changes that cases are made of."""

from __future__ import annotations

from dataclasses import dataclass

from metatrainer import families

Files = dict[str, str]

TOML = "job.toml"
PACKAGE = "environment/__init__.py"
PERSONA = families.get("persona")
SETTINGS = """\
version = 1

[prime_rl]
model = "nano-wren"
learning_rate = 0.01
batch_size = 64
group_size = 8
max_steps = 20
max_tokens = 64
seq_len = 512
lora_rank = 16
temperature = 1.0

[environment]
module = "environment"
"""
JOB: Files = {**PERSONA.starter_files(), TOML: SETTINGS}
"""The good job that all others are made from."""
REWARD = "        return 1.0 if self.data.answer in reply else 0.0\n"
"""Its reward's last line."""


@dataclass(frozen=True)
class Case:
    """One job, and the first finding that it must get."""

    name: str
    """Of its folder."""
    files: Files
    code: str = ""
    """Of the finding; none for a good job."""
    at: str | None = None
    """File of the finding; None where it is of no file."""
    line: str | None = None
    """Text that is on the line of the finding, and on no other; None where it has no line."""
    family: str = "persona"

    @property
    def number(self) -> int | None:
        """Line of the finding, from 1."""
        if self.line is None:
            return None
        text = self.files[self.at or ""]
        numbers = [n for n, line in enumerate(text.splitlines(), 1) if self.line in line]
        assert len(numbers) == 1, f"{self.name}: {self.line!r} is on {len(numbers)} lines"
        return numbers[0]


def swap(old: str, new: str, file: str = PACKAGE, files: Files = JOB) -> Files:
    """The job with one text in place of another, which must be there once."""
    assert files[file].count(old) == 1, (file, old)
    return {**files, file: files[file].replace(old, new)}


def settings(old: str, new: str) -> Files:
    """The job with another line in job.toml."""
    return swap(old, new, TOML)


def reward(code: str) -> Files:
    """The job with other lines at the end of its reward."""
    return swap(REWARD, code)


def first(code: str) -> Files:
    """The job with a line more before its first constant."""
    return swap("LEVELS = ", f"{code}\nLEVELS = ")


def without(file: str) -> Files:
    """The job with a file less."""
    return {name: text for name, text in JOB.items() if name != file}
