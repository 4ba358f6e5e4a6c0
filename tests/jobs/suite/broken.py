"""Jobs that are broken in one way each."""

from __future__ import annotations

from suite.case import (
    JOB,
    PACKAGE,
    PERSONA,
    REWARD,
    SETTINGS,
    TOML,
    Case,
    Files,
    first,
    reward,
    settings,
    swap,
    without,
)

MODEL, RATE = 'model = "nano-wren"', "learning_rate = 0.01"
CORRECT = "    async def correct(self, trace: vf.Trace) -> float:"
MARK = "    @vf.reward(weight=1.0)\n"
LOAD, RNG, DRAWN = "    def load(self):", "        rng = random.Random(0)", "            drawn = "
EXPORT = '__all__ = ["Tasks"]'
DEV = PERSONA.items("dev", 0, 1)[0]
"""The first example that whoever writes a job is shown."""


def told(prompt: str, answer: str = DEV.answer) -> Files:
    """The job with a task in the dev example's world."""
    task = f"Task(Data(prompt={prompt!r}, world={dict(DEV.world)!r}, answer={answer!r}))"
    return swap(RNG, f"        yield {task}\n{RNG}")


PERSON = min(DEV.world)
OTHER_WORDS = " ".join(reversed(DEV.prompt.upper().rstrip("?").split())) + " ...!"

SETTINGS_CASES = [
    Case("no-settings", without(TOML), "E-FILE", TOML),
    Case("not-toml", settings("[prime_rl]", "[prime_rl"), "E-TOML", TOML, "[prime_rl"),
    Case("twice", settings(RATE, f"{RATE}\nmax_steps = 3"), "E-TOML", TOML, "max_steps = 20"),
    Case("other-version", settings("version = 1", "version = 2"), "E-VERSION", TOML, "version"),
    Case("no-table", {**JOB, TOML: "version = 1\n"}, "E-MISSING", TOML),
    Case("no-model", settings(MODEL, ""), "E-MISSING", TOML),
    Case("misspelt", settings("max_steps", "max_step"), "E-KEY", TOML, "max_step"),
    Case("old-name", settings("group_size", "rollouts_per_example"), "E-KEY", TOML, "rollouts_per"),
    Case("unknown-table", {**JOB, TOML: SETTINGS + "[trainer]\n"}, "E-KEY", TOML, "[trainer]"),
    Case("table-as-text", {**JOB, TOML: "prime_rl = 'x'\n"}, "E-TYPE", TOML, "prime_rl"),
    Case("model-unknown", settings("nano-wren", "nano-wrem"), "E-MODEL", TOML, "model"),
    Case("model-by-path", settings("nano-wren", "/models/nano-wren"), "E-MODEL", TOML, "model"),
    Case("model-of-the-hub", settings("nano-wren", "gpt2"), "E-MODEL", TOML, "model"),
    Case("model-number", settings('"nano-wren"', "1"), "E-MODEL", TOML, "model"),
    Case("rate-as-text", settings("0.01", '"0.01"'), "E-LR", TOML, "learning_rate"),
    Case("rate-of-one", settings("0.01", "1.0"), "E-LR", TOML, "learning_rate"),
    Case("rate-below-zero", settings("0.01", "-0.01"), "E-LR", TOML, "learning_rate"),
    Case("rate-not-a-number", settings("0.01", "nan"), "E-LR", TOML, "learning_rate"),
    Case("groups-do-not-fill", settings("= 64\ngroup", "= 60\ngroup"), "E-BATCH", TOML, "batch_s"),
    Case("half-a-rollout", settings("= 64\ngroup", "= 64.5\ngroup"), "E-BATCH", TOML, "batch_s"),
    Case("group-of-one", settings("group_size = 8", "group_size = 1"), "E-GROUP", TOML, "group_s"),
    Case("no-steps", settings("max_steps = 20", "max_steps = 0"), "E-STEPS", TOML, "max_steps"),
    Case("steps-true", settings("max_steps = 20", "max_steps = true"), "E-STEPS", TOML, "max_s"),
    Case("no-tokens", settings("max_tokens = 64", "max_tokens = 0"), "E-TOKENS", TOML, "max_t"),
    Case("message-too-long", settings("seq_len = 512", "seq_len = 32"), "E-TOKENS", TOML, "max_t"),
    Case("conversation-too-long", settings("512", "99999"), "E-SEQ", TOML, "seq_len"),
    Case("rank", settings("lora_rank = 16", "lora_rank = 512"), "E-RANK", TOML, "lora_rank"),
    Case("cold", settings("temperature = 1.0", "temperature = 0"), "E-TEMP", TOML, "temperature"),
    Case("hot", settings("temperature = 1.0", "temperature = 2.5"), "E-TEMP", TOML, "temperature"),
    Case("module-is-a-path", settings('"environment"', '"../x"'), "E-MODULE", TOML, "module"),
    Case("arguments-no-table", {**JOB, TOML: SETTINGS + "args = 3\n"}, "E-ARGS", TOML, "args"),
    Case("too-many-rollouts", settings("= 20", "= 21"), "E-BUDGET", TOML, "max_steps"),
]

TEXT_CASES = [
    Case("no-package", settings('"environment"', '"mine"'), "E-FILE", "mine/__init__.py"),
    Case("syntax", swap("class Data(", "class Data(("), "E-SYNTAX", PACKAGE, "class Data(("),
    Case("null-byte", {**JOB, PACKAGE: "\0"}, "E-SYNTAX", PACKAGE),
    Case(
        "syntax-elsewhere",
        swap("import random\n", "import random as\n", "environment/worlds.py"),
        "E-SYNTAX",
        "environment/worlds.py",
        "import random as",
    ),
    Case("not-async", swap("    async def", "    def"), "E-ASYNC", PACKAGE, "def correct"),
    Case(
        "old-arguments",
        swap("self, trace: vf.Trace", "self, completion, answer"),
        "E-ARGS",
        PACKAGE,
        "completion",
    ),
    Case(
        "needs-a-runtime", swap("self, trace:", "self, runtime, trace:"), "E-ARGS", PACKAGE, "run"
    ),
    Case("old-api", first("R = vf.Rubric"), "E-V0", PACKAGE, "vf.Rubric"),
    Case("old-entry", first("def load_environment(): ..."), "E-V0", PACKAGE, "load_environment"),
    Case("no-reward", swap(MARK, ""), "E-REWARD"),
]

IMPORT_CASES = [
    Case("no-such-module", first("import randon"), "E-IMPORT", PACKAGE, "import randon"),
    Case(
        "file-not-sent", swap("from .names", "from .name"), "E-IMPORT", PACKAGE, "from .name import"
    ),
    Case("own-package", first("import metatrainer"), "E-IMPORT", PACKAGE, "import metatrainer"),
    Case("host-file", first("open('/etc/passwd')"), "E-IMPORT", PACKAGE, "/etc/passwd"),
    Case(
        "network",
        first("import socket; socket.create_connection(('1.1.1.1', 53))"),
        "E-IMPORT",
        PACKAGE,
        "1.1.1.1",
    ),
    Case("no-export", swap(EXPORT, ""), "E-IMPORT", PACKAGE),
    Case(
        "two-tasksets",
        swap(EXPORT, 'class More(Tasks): ...\n__all__ = ["Tasks", "More"]'),
        "E-IMPORT",
        PACKAGE,
    ),
    Case("no-taskset", swap('["Tasks"]', '["Task"]'), "E-IMPORT", PACKAGE),
    Case("export-of-nothing", swap('["Tasks"]', '["Taks"]'), "E-IMPORT", PACKAGE),
    Case(
        "name-of-a-library",
        {**settings('"environment"', '"xml"'), "xml/__init__.py": JOB[PACKAGE]},
        "E-IMPORT",
        "xml/__init__.py",
    ),
    Case("prints-too-much", first("print('x' * (1 << 20))"), "E-OUTPUT", PACKAGE),
    Case("exits", first("import os; os._exit(0)"), "E-CRASH", PACKAGE),
    Case("eats-memory", first("x = bytearray(3 << 30)"), "E-MEMORY", PACKAGE, "3 << 30"),
]

LOAD_CASES = [
    Case("load-fails", swap(RNG, "        rng = {}[0]"), "E-LOAD", PACKAGE, "{}[0]"),
    Case("load-never-ends", swap(RNG, "        while True: pass"), "E-TIMEOUT", PACKAGE, "while"),
    Case(
        "load-gives-none",
        swap(LOAD, f"{LOAD}\n        return\n\n    def l(self):"),
        "E-LOAD",
        PACKAGE,
    ),
    Case("load-is-async", swap(LOAD, f"    async{LOAD[3:]}"), "E-LOAD", PACKAGE),
    Case("no-tasks-but-data", swap("yield Task(Data(", "yield (Data("), "E-LOAD", PACKAGE),
    Case("field-not-given", swap(', answer=drawn["answer"]', ""), "E-LOAD", PACKAGE, "yield"),
    Case(
        "unknown-argument",
        {**JOB, TOML: SETTINGS + "args = {levels = [1]}\n"},
        "E-LOAD",
        PACKAGE,
    ),
    Case("name-of-a-method", swap("def correct", "def score"), "E-LOAD", PACKAGE),
    Case("field-not-declared", swap("    world: dict\n", ""), "E-DATA", PACKAGE),
    Case("no-prompt", swap('prompt=drawn["prompt"]', 'prompt=" "'), "E-DATA", PACKAGE),
    Case("no-answer", swap('answer=drawn["answer"]', 'answer=""'), "E-DATA", PACKAGE),
    Case(
        "answer-a-number",
        swap("answer: str", "answer: int", files=swap('=drawn["answer"]', "=3")),
        "E-DATA",
        PACKAGE,
    ),
    Case("no-world", swap('world=drawn["world"]', "world={}"), "E-WORLD", PACKAGE),
    Case("world-of-another-shape", swap('drawn["world"]', "{'BelMar': 3}"), "E-WORLD", PACKAGE),
    Case("too-few-tasks", swap("TASKS = 64", "TASKS = 5"), "E-TASKS", PACKAGE),
    Case("no-tasks", swap("TASKS = 64", "TASKS = 0"), "E-TASKS", PACKAGE),
    Case(
        "the-same-task",
        swap(DRAWN, f"            rng = random.Random(1)\n{DRAWN}"),
        "E-TASKS",
        PACKAGE,
    ),
    Case(
        "the-same-key",
        swap(MARK, f"    @property\n    def key(self): return 'k'\n\n{MARK}"),
        "E-KEYS",
        PACKAGE,
    ),
    Case(
        "longer-than-the-context",
        swap('prompt=drawn["prompt"]', 'prompt=drawn["prompt"] + " so" * 600'),
        "E-CONTEXT",
        PACKAGE,
    ),
]

LEAK_CASES = [
    Case("dev-example", told(DEV.prompt), "E-LEAK"),
    Case("dev-example-in-other-words", told(OTHER_WORDS), "E-LEAK"),
    Case("dev-example-and-a-word", told(DEV.prompt.replace("Who is", "Who then is")), "E-LEAK"),
    Case("world-of-the-dev-example", told(f"Who is {PERSON}?", PERSON), "E-LEAK"),
    Case(
        "dev-example-as-system-prompt",
        swap("prompt=drawn", f"system_prompt={'Example: ' + DEV.prompt!r}, prompt=drawn"),
        "E-LEAK",
    ),
]

REWARD_CASES = [
    Case("gives-none", reward("        pass\n"), "E-REWARD", PACKAGE),
    Case("gives-text", reward("        return reply\n"), "E-REWARD", PACKAGE),
    Case("not-a-number", reward("        return float('nan')\n"), "E-REWARD", PACKAGE),
    Case(
        "fails-on-an-empty-reply",
        reward("        return float(reply.split()[0] == self.data.answer)\n"),
        "E-REWARD",
        PACKAGE,
        "reply.split()",
    ),
    Case(
        "not-decorated",
        swap(MARK, "    @vf.metric\n", files=first("reward = 1")),
        "E-REWARD",
        PACKAGE,
    ),
    Case("huge", swap("return 1.0 if", "return 1e9 if"), "E-RANGE", PACKAGE),
    Case("weight", swap("weight=1.0", "weight=100.0"), "E-RANGE", PACKAGE),
    Case("weight-zero", swap("weight=1.0", "weight=0.0"), "E-SPREAD", PACKAGE),
    Case("constant", reward("        return 1.0\n"), "E-SPREAD", PACKAGE),
    Case("wrong-way-round", swap("return 1.0 if", "return -1.0 if"), "E-SPREAD", PACKAGE),
    Case("length-only", reward("        return min(len(reply), 50) / 50\n"), "E-SPREAD", PACKAGE),
    Case(
        "calls-only",
        reward("        return float(bool(trace.tool_messages))\n"),
        "E-SPREAD",
        PACKAGE,
    ),
    Case("slow", reward(f"        import time; time.sleep(0.03)\n{REWARD}"), "E-SLOW", PACKAGE),
    Case(
        "writes-into-the-pipe",
        reward(f"        import os; os.write(4, b'garbage\\n')\n{REWARD}"),
        "E-PROTOCOL",
        PACKAGE,
    ),
]

BROKEN = [
    *SETTINGS_CASES,
    *TEXT_CASES,
    *IMPORT_CASES,
    *LOAD_CASES,
    *LEAK_CASES,
    *REWARD_CASES,
]
