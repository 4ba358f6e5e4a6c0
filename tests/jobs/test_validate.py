"""Validation of whole submissions, with the real families in the real sandbox."""

import json
import re
from dataclasses import replace

import pytest

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


def at(text):
    """Where the starter has a text, as findings give a place."""
    before, found, _ = GOOD[PACKAGE].partition(text)
    assert found, text
    return f"{PACKAGE}:{before.count(chr(10)) + 1}"


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


@pytest.mark.parametrize("name", families.NAMES)
def test_the_starter_of_each_family_is_valid(guest, name):
    family = families.get(name)
    rules = TaskRules(
        family,
        RULES.students,
        1280,
        30.0,
        family.items("hidden", 5, 64),
        family.items("dev", 5, 4),
    )
    verdict = validate({**family.starter_files(), "job.toml": TOML}, rules, guest)
    assert render(verdict.findings) == ""
    assert verdict.ok
    assert verdict.spec.prime_rl.model == "nano-wren"


REWARD = "        return 1.0 if self.data.answer in reply else 0.0\n"

FINE = {
    "shaped by tool calls": changed(
        REWARD, "        return (reply == self.data.answer) + 0.1 * len(trace.tool_messages[:2])\n"
    ),
    "only with tools": changed(
        REWARD,
        "        return float(reply == self.data.answer and bool(trace.tool_messages))\n",
    ),
    "punishes": changed(REWARD, "        return 1.0 if reply == self.data.answer else -1.0\n"),
    "two levels": changed("LEVELS = [1]", "LEVELS = [1, 2]"),
    "prints": changed("rng = random.Random(0)", "rng = random.Random(0); print('hello')"),
    "own train items": with_items(FAMILY.items("train", 3, 32)),
    "notes beside": {**GOOD, "README.md": "notes"},
}


@pytest.mark.parametrize("files", FINE.values(), ids=FINE)
def test_valid(guest, files):
    verdict = validate(files, RULES, guest)
    assert (verdict.ok, render(verdict.findings)) == (True, "")


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


def without(name):
    return {file: text for file, text in GOOD.items() if file != name}


def toml(extra, model="nano-wren"):
    return {**GOOD, "job.toml": TOML.replace("nano-wren", model) + extra}


MANY = "for i in range(TASKS):"
HEAD = "    @vf.reward(weight=1.0)\n    async def correct(self, trace: vf.Trace) -> float:"

BROKEN = {
    "no settings": (without("job.toml"), "E-FILE job.toml is missing"),
    "bad settings": (toml("batch_size = 3\n"), "E-BATCH job.toml:4"),
    "other model": (toml("", "nano-wrem"), "E-MODEL job.toml:2 model = nano-wrem; allowed: nano-"),
    "model by path": (toml("", "/models/nano-wren"), "E-MODEL job.toml:2"),
    "budget": (
        toml("max_steps = 21\n"),
        "E-BUDGET job.toml:4 max_steps * batch_size = 21 * 64 = 1344; allowed: at most 1280",
    ),
    "no package": (without(PACKAGE), f"E-FILE {PACKAGE} is missing"),
    "path": ({**GOOD, "../x.py": ""}, "E-FILE '../x.py' is not a path"),
    "too large": ({**GOOD, "data.json": "x" * (2 << 20)}, "E-FILE 5 files"),
    "no text": ({**GOOD, "data.json": "\ud800"}, "E-FILE a file holds characters"),
    "null byte": ({**GOOD, PACKAGE: "\0"}, f"E-SYNTAX {PACKAGE}"),
    "syntax": (changed("class Data(", "class Data(("), "E-SYNTAX " + at("class Data")),
    "not async": (
        changed("    async def correct", "    def correct"),
        "E-ASYNC " + at("async"),
    ),
    "old arguments": (
        changed("correct(self, trace: vf.Trace)", "correct(self, completion, answer)"),
        f"E-ARGS {at('async def')} reward correct takes completion, answer; allowed: self, task",
    ),
    "old api": (
        changed("__all__", "def load_environment(): return vf.Rubric()\n\n__all__"),
        f"E-V0 {at('__all__')} load_environment is of verifiers v0",
    ),
    "no reward": (changed("    @vf.reward(weight=1.0)\n", ""), "E-REWARD no @vf.reward method"),
    "reward elsewhere": (
        changed(HEAD, "    @vf.metric\n    async def reward(self, trace):"),
        f"E-REWARD {PACKAGE} reward fails on a reply that is right",
    ),
    "import": (
        changed("import random\n", "import randon\n"),
        f"E-IMPORT {at('import r')} Module",
    ),
    "no export": (changed("__all__", "names"), f"E-IMPORT {PACKAGE} TypeError: the package has no"),
    "two tasksets": (
        changed("__all__ = [", "class More(Tasks): pass\n__all__ = ['More', "),
        "E-IMPORT",
    ),
    "load fails": (
        changed("rng = random.Random(0)", "rng = {}[0]"),
        f"E-LOAD {at('rng =')} Key",
    ),
    "field not declared": (changed("    world: dict\n", ""), "E-DATA"),
    "field not given": (changed(', answer=drawn["answer"]', ""), "E-LOAD"),
    "no prompt": (changed('prompt=drawn["prompt"]', 'prompt=" "'), "E-DATA"),
    "a prompt longer than the context": (
        changed('prompt=drawn["prompt"]', 'prompt=drawn["prompt"] + " so" * 600'),
        f"E-CONTEXT {PACKAGE} a prompt has",
    ),
    "no answer": (changed('answer=drawn["answer"]', 'answer=""'), "E-DATA"),
    "broken world": (changed('world=drawn["world"]', 'world={"BelMar": 3}'), "E-WORLD"),
    "too few tasks": (changed("TASKS = 64", "TASKS = 5"), "E-TASKS"),
    "no tasks": (changed("TASKS = 64", "TASKS = 0"), "E-TASKS"),
    "the same task": (changed(MANY, MANY + "\n            rng = random.Random(1)"), "E-TASKS"),
    "the same key": (
        changed(HEAD, "    @property\n    def key(self): return 'k'\n\n" + HEAD),
        "E-KEYS",
    ),
    "none": (changed(REWARD, "        pass\n"), f"E-REWARD {PACKAGE}"),
    "raises on empty": (
        changed(REWARD, "        return float(reply.split()[0] == self.data.answer)\n"),
        f"E-REWARD {at('return 1.0')} reward fails on a reply that is empty: IndexError",
    ),
    "nan": (changed(REWARD, "        return float('nan')\n"), f"E-REWARD {PACKAGE}"),
    "huge": (changed("return 1.0 if", "return 1e9 if"), "E-RANGE"),
    "constant": (changed(REWARD, "        return 1.0\n"), "E-SPREAD"),
    "wrong way round": (changed("return 1.0 if", "return -1.0 if"), "E-SPREAD"),
    "length only": (changed(REWARD, "        return min(len(reply), 50) / 50\n"), "E-SPREAD"),
    "tools only": (changed(REWARD, "        return float(len(trace.tool_messages) > 0)\n"), "E-S"),
    "slow": (
        changed(REWARD, "        import time; time.sleep(0.03)\n" + REWARD),
        "E-SLOW",
    ),
    "prints too much": (changed("LEVELS =", "print('x' * (1 << 20))\nLEVELS ="), "E-OUTPUT"),
    "exits": (changed("LEVELS =", "import os; os._exit(0)\nLEVELS ="), "E-CRASH"),
    "eats memory": (changed("LEVELS =", "x = bytearray(3 << 30)\nLEVELS ="), "E-MEMORY"),
}


@pytest.mark.parametrize("files,said", BROKEN.values(), ids=BROKEN)
def test_broken(guest, files, said):
    verdict = validate(files, RULES, guest)
    assert not verdict.ok
    assert render(verdict.findings).startswith(said)
    assert not verdict.cheating
    for finding in verdict.findings:
        assert len(finding.render().split()) <= 40
        assert json.loads(json.dumps(finding.as_dict()))["code"] == finding.code


def test_an_endless_loop_ends(guest, monkeypatch):
    monkeypatch.setattr("metatrainer.jobs.validate.CALL_SECONDS", 0.5)
    verdict = validate(changed("rng = random.Random(0)", "while True: pass"), RULES, guest)
    assert render(verdict.findings).startswith("E-TIMEOUT " + at("rng ="))


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
