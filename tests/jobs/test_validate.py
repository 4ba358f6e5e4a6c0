"""Validation of whole submissions, with the real families in the real sandbox."""

import json
import re
from dataclasses import replace

import pytest
from suite.good import REFERENCE

from metatrainer import families
from metatrainer.engine.files import load_tokenizer
from metatrainer.jobs.findings import Finding, render
from metatrainer.jobs.validate import TaskRules, validate
from metatrainer.sandbox.host import Channel
from metatrainer.students import catalogue

FAMILY = families.get("persona")
RULES = TaskRules(
    family=FAMILY,
    students=("nano-wren", "nano-finch"),
    max_rollouts=1280,
    max_seconds=30.0,
    hidden=FAMILY.items("hidden", 5, 64),
    dev=FAMILY.items("dev", 5, 4),
)
PACKAGE = "environment/__init__.py"
TOML = "[prime_rl]\nmodel = 'nano-wren'\nlearning_rate = 0.01\n"
GOOD = {**FAMILY.starter_files(), "job.toml": TOML}


def changed(old, new, file=PACKAGE):
    assert old in GOOD[file], old
    return {**GOOD, file: GOOD[file].replace(old, new)}


def with_items(items):
    """The starter with given items instead of its generator, as data in a JSON file."""
    load = """
        import json
        from pathlib import Path
        for prompt, world, answer in json.loads(Path(__file__).with_name("data.json").read_text()):
            yield Task(Data(prompt=prompt, world=world, answer=answer))


__all__"""
    text = GOOD[PACKAGE]
    cut, _, tail = text.partition("    def load(self):\n")
    text = cut + "    def load(self):" + load + tail.partition("__all__")[2]
    data = json.dumps([[i.prompt, dict(i.world), i.answer] for i in items])
    return {**GOOD, PACKAGE: text, "environment/data.json": data}


@pytest.mark.parametrize("case", REFERENCE, ids=lambda case: case.family)
def test_the_reference_job_of_each_family_is_valid(guest, case):
    family = families.get(case.family)
    hidden, dev = family.items("hidden", 5, 64), family.items("dev", 5, 4)
    verdict = validate(case.files, replace(RULES, family=family, hidden=hidden, dev=dev), guest)
    assert (verdict.ok, render(verdict.findings)) == (True, "")
    assert verdict.spec.prime_rl.model == "nano-wren"


REWARD = "        return 1.0 if self.data.answer in reply else 0.0\n"

WARNED = {
    "a bonus for all": (
        changed(REWARD, "        return 0.5 + (reply == self.data.answer)\n"),
        f"W-BONUS {PACKAGE} every reply, an empty one too, is rewarded with 0.5 at least",
    ),
    "messages are cut off": (
        {**GOOD, "job.toml": TOML + "max_tokens = 8\n"},
        "W-CUT job.toml max_tokens = 8 cuts messages off",
    ),
    "conversations left out": (
        {**GOOD, "job.toml": TOML + "max_tokens = 60\nseq_len = 64\n"},
        "W-SEQ job.toml seq_len = 64 leaves conversations out of training",
    ),
}


@pytest.mark.parametrize("files,said", WARNED.values(), ids=WARNED)
def test_warnings_refuse_nothing(guest, files, said):
    verdict = validate(files, RULES, guest)
    assert verdict.ok and not verdict.errors
    (warning,) = verdict.warnings
    assert warning.render().startswith(said)
    assert Finding.from_dict(json.loads(json.dumps(warning.as_dict()))) == warning


def test_an_estimate_counts_the_students_own_tokens(guest):
    """Of one task of a known length, written out with the tokenizer that transformers loads."""
    item = FAMILY.items("train", 3, 1)[0]
    files = with_items([replace(item, prompt=item.prompt + " ok" * i) for i in range(8)])
    estimate = validate(files, RULES, guest).estimate
    tokenizer = load_tokenizer(catalogue.verified_folder("nano-wren"))
    tools = [FAMILY.tools[0].schema]
    prompts = [
        len(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": item.prompt + " ok" * i}],
                tools=tools,
                add_generation_prompt=True,
                return_dict=False,
            )
        )
        for i in range(8)
    ]
    assert estimate.rollouts == 20 * 64
    assert estimate.prompt_tokens == 20 * 64 * sum(prompts) / 8
    # Two calls, their results and an answer, each of them short here.
    assert 2 * estimate.prompt_tokens < estimate.tokens < estimate.most_tokens == 1280 * 512


NO_FOLDERS = {
    "path": ({**GOOD, "../x.py": ""}, "E-FILE '../x.py' is not a path"),
    "too large": ({**GOOD, "data.json": "x" * (2 << 20)}, "E-FILE 5 files"),
    "no text": ({**GOOD, "data.json": "\ud800"}, "E-FILE a file holds characters"),
}


@pytest.mark.parametrize("files,said", NO_FOLDERS.values(), ids=NO_FOLDERS)
def test_what_no_folder_can_hold_is_refused(guest, files, said):
    """All else that is refused is in the suite."""
    verdict = validate(files, RULES, guest)
    assert (verdict.ok, verdict.cheating) == (False, False)
    assert render(verdict.findings).startswith(said)


@pytest.mark.parametrize("text,parseable", [(TOML, True), ("[prime_rl]", True), ("[x", False)])
def test_what_counts_as_parseable(guest, text, parseable):
    assert validate({"job.toml": text}, RULES, guest).parseable is parseable


def other_words(item):
    """The same question with other case, order, punctuation and white space."""
    words = item.prompt.upper().rstrip("?").split()
    return type(item)(**{**vars(item), "prompt": "  ".join(reversed(words)) + " ...!"})


HIDDEN, DEV = RULES.hidden[7], RULES.dev[2]
TRAIN = FAMILY.items("train", 3, 32)

LEAKS = {
    "hidden item": with_items([*TRAIN, HIDDEN]),
    "dev item": with_items([*TRAIN, DEV]),
    "dev item in other words": with_items([*TRAIN, other_words(DEV)]),
    "hidden question in the source": changed(
        "LEVELS =", f"KNOWN = {{{HIDDEN.prompt!r}: {HIDDEN.answer!r}}}\nLEVELS ="
    ),
    "dev question as a system prompt": changed(
        "prompt=drawn", f"system_prompt={'Example: ' + DEV.prompt!r}, prompt=drawn"
    ),
}


@pytest.mark.parametrize("files", LEAKS.values(), ids=LEAKS)
def test_leaks_are_cheating(guest, files):
    verdict = validate(files, RULES, guest)
    assert [finding.code for finding in verdict.findings] == ["E-LEAK"]
    assert verdict.cheating
    shown = render(verdict.findings)
    assert HIDDEN.prompt not in shown
    assert HIDDEN.answer not in shown


def test_hidden_items_do_not_enter_the_sandbox(guest, monkeypatch):
    sent = []
    send = Channel.send
    monkeypatch.setattr(Channel, "send", lambda c, line, by: sent.append(line) or send(c, line, by))
    assert validate(GOOD, RULES, guest).ok
    words = set(re.findall(r"\w+", b"".join(sent).decode()))
    assert RULES.family.items("train", 0, 1)[0].answer in words
    assert not [name for item in RULES.hidden for name in item.world if name in words]
