"""Compiled configs against prime-rl's own schema, and the rules that the schema cannot hold."""

import copy
import itertools
import json
import shlex
import tomllib
from pathlib import Path

import jsonschema
import pytest

from metatrainer import families, toml
from metatrainer.errors import ConfigError
from metatrainer.jobs.compile import (
    PRIME_RL_COMMIT,
    Target,
    compile_job,
    port,
    server_config,
    server_device,
)
from metatrainer.jobs.prime_rl_rules import broken_rules
from metatrainer.jobs.spec import JobSpec, parse_job_toml

FIXTURES = Path(__file__).parent / "fixtures"
SCHEMA = jsonschema.Draft202012Validator(
    json.loads((FIXTURES / "prime-rl-schema.json").read_text())
)
RECORDED = tomllib.loads((FIXTURES / "prime-rl-recorded.toml").read_text())
PERSONA = families.get("persona")
BASE = {"model": "nano-wren", "learning_rate": 1e-5}
SPECS = {
    "defaults": ({}, {}),
    "one step": ({"max_steps": 1, "batch_size": 2, "group_size": 2}, {}),
    "long": ({"max_steps": 1000, "seq_len": 32768, "max_tokens": 4096, "learning_rate": 0.1}, {}),
    "odd rank": ({"lora_rank": 5, "temperature": 2.0, "batch_size": 24, "group_size": 3}, {}),
    "arguments": ({}, {"split": 'a "b"', "levels": [1, 2], "mix": {"easy": 0.5, "on": True}}),
}


def spec(settings=(), args=()):
    return JobSpec.model_validate(
        {"prime_rl": {**BASE, **dict(settings)}, "environment": {"args": dict(args)}}
    )


def compiled(settings=(), args=(), family=PERSONA, **target):
    return compile_job(
        spec(settings, args), family, Target(**{"model": "Qwen/Qwen3-0.6B", **target})
    )


def at(config, path):
    for key in path.split("."):
        config = config[int(key) if key.isdigit() else key]
    return config


def changed(config, path, value):
    """A copy of a config in which the value at a path is another; None takes it out."""
    config = copy.deepcopy(config)
    table, _, key = path.rpartition(".")
    table = at(config, table) if table else config
    if value is None:
        del table[key]
    else:
        table[key] = value
    return config


@pytest.mark.parametrize(
    ("name", "gpus", "family", "model"),
    itertools.product(SPECS, (1, 2), families.NAMES, ("Qwen/Qwen3-0.6B", "/models/student")),
)
def test_every_config_passes_the_schema_as_text(name, gpus, family, model):
    done = compiled(*SPECS[name], family=families.get(family), gpus=gpus, model=model)
    assert tomllib.loads(done.text) == done.config
    assert [e.message for e in SCHEMA.iter_errors(tomllib.loads(done.text))] == []
    assert broken_rules(done.config) == []


def test_the_recorded_run_passes_and_a_mutated_one_does_not():
    assert SCHEMA.is_valid(RECORDED) and broken_rules(RECORDED) == []
    assert not SCHEMA.is_valid(changed(RECORDED, "orchestrator.group_size", "8"))


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("orchestrator.rollouts_per_example", 8),
        ("orchestrator.train.sampling.max_tokens", 64),
        ("trainer.model.lora.r", 8),
        ("mdoel", {"name": "x"}),
        ("max_steps", "20"),
        ("orchestrator.batch_size", 64.5),
        ("weight_broadcast.type", "carrier pigeon"),
        ("orchestrator.train.source", {"name": "x"}),
        ("orchestrator.train.sampling.temperature", 2.5),
        ("trainer.optim.lr", -1e-5),
        ("trainer.model.lora.rank", 0),
        ("orchestrator.group_size", 0),
        ("orchestrator.env_server_base_port", 70_000),
        ("orchestrator.train.source.0.env", {}),
    ],
)
def test_the_schema_refuses_what_is_not_in_it(gpus, path, value):
    assert not SCHEMA.is_valid(changed(compiled(gpus=gpus).config, path, value))


def test_what_job_toml_says_is_what_prime_rl_is_told():
    settings = {
        "learning_rate": 3e-5,
        "batch_size": 24,
        "group_size": 6,
        "max_steps": 7,
        "max_tokens": 33,
        "seq_len": 300,
        "lora_rank": 12,
        "temperature": 0.7,
    }
    args = {"levels": [1, 2]}
    config = compiled(settings, args, run_name="try-3").config
    expected = {
        "max_steps": 7,
        "seq_len": 300,
        "run.name": "try-3",
        "trainer.optim.lr": 3e-5,
        "trainer.optim.max_norm": 1.0,
        "trainer.model.lora.rank": 12,
        "trainer.model.lora.alpha": 24.0,
        "inference.vllm.max_lora_rank": 12,
        "inference.vllm.max_model_len": 300,
        "orchestrator.batch_size": 24,
        "orchestrator.group_size": 6,
        "orchestrator.train.sampling.temperature": 0.7,
        "orchestrator.train.sampling.max_completion_tokens": 33,
        "orchestrator.train.source.0.name": "persona-train",
        "orchestrator.train.source.0.env.taskset": {"id": "environment", "levels": [1, 2]},
        "orchestrator.eval.interval": 8,
    }
    assert {path: at(config, path) for path in expected} == expected


# Each of these, left unsaid, wastes or hangs a run.
@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("orchestrator.train.source.0.env.agent.runtime.type", "subprocess"),
        ("orchestrator.eval.source.0.env.agent.runtime.type", "subprocess"),
        (
            "orchestrator.train.sampling.extra_body.chat_template_kwargs.enable_thinking",
            False,
        ),
        ("orchestrator.eval.sampling.extra_body.chat_template_kwargs.enable_thinking", False),
        ("weight_broadcast.type", "filesystem"),
        ("ckpt.interval", 20),
        ("orchestrator.algo.type", "grpo"),
    ],
)
def test_dangerous_defaults_are_never_left(path, value):
    for gpus in (1, 2):
        assert at(compiled(gpus=gpus).config, path) == value


def test_one_gpu_is_shared_and_two_are_not():
    one, two = (compiled(gpus=gpus, slot=3) for gpus in (1, 2))
    assert one.commands == ["CUDA_VISIBLE_DEVICES=3,3 PYTHONPATH=. rl @ rl.toml"]
    assert two.commands == ["CUDA_VISIBLE_DEVICES=6,7 PYTHONPATH=. rl @ rl.toml"]
    share = "inference.vllm.gpu_memory_utilization"
    assert at(one.config, share) < 0.5 < at(two.config, share)


def test_a_command_survives_the_shell():
    done = compiled(job_dir="/a b/files", config_path="it's.toml")
    words = shlex.split(done.commands[0])
    assert words[1:] == ["PYTHONPATH=/a b/files", "rl", "@", "it's.toml"]


def test_slots_share_no_port():
    def ports(slot):
        config = compiled(slot=slot).config
        first = at(config, "orchestrator.env_server_base_port")
        named = ("inference.server.port", "inference.backend_port", "rollout_transport.port")
        return [at(config, name) for name in named] + [first, first + 1]

    taken = [port for slot in range(100) for port in ports(slot)]
    assert len(set(taken)) == len(taken)
    assert max(taken) < 32_768
    client = at(compiled(slot=5).config, "orchestrator.model.client.base_url")
    assert client.endswith(f":{ports(5)[0]}/v1")


def test_the_text_names_the_commit_and_an_unknown_model_gets_the_default_renderer():
    assert PRIME_RL_COMMIT in compiled().text.splitlines()[0]
    renderer = "orchestrator.renderer.name"
    assert at(compiled(model="/models/x").config, renderer) == "default"
    assert at(compiled().config, renderer) == "auto"


def test_students_get_their_tools_from_our_harness():
    for part in ("train", "eval"):
        harness = at(compiled().config, f"orchestrator.{part}.source.0.env.agent.harness")
        assert harness == {"id": "metatrainer_harness", "family": "persona"}
    assert "metatrainer" in compiled().notes[0]


@pytest.mark.parametrize("gpus", [1, 2])
def test_all_weights_can_be_trained(gpus):
    config = compiled(gpus=gpus, full=True).config
    assert SCHEMA.is_valid(config) and broken_rules(config) == []
    assert "lora" not in config["trainer"]["model"]
    assert "enable_lora" not in config["inference"]["vllm"]


def test_a_server_that_runs_already_is_used():
    done = compiled(serve=False, slot=2)
    assert SCHEMA.is_valid(done.config) and broken_rules(done.config) == []
    assert "inference" not in done.config and at(done.config, "deployment.num_infer_gpus") == 0
    assert done.environment["CUDA_VISIBLE_DEVICES"] == "4"
    target = Target(model="/models/student", serve=False, slot=2)
    assert server_device(target) == 5
    config = server_config(target)
    assert at(config, "server.port") == port(target)
    assert at(done.config, "orchestrator.model.client.admin_base_url") == [
        f"http://127.0.0.1:{port(target)}"
    ]
    alone = {"$defs": SCHEMA.schema["$defs"], "$ref": "#/$defs/InferenceConfig"}
    assert SCHEMA.evolve(schema=alone).is_valid(config)


BROKEN = {
    "no end": ("max_steps", None, "max_steps"),
    "no signal": ("orchestrator.group_size", 1, "advantage"),
    "ragged batch": ("orchestrator.batch_size", 60, "multiple"),
    "too few in flight": ("orchestrator.concurrency.max_inflight", 4, "max_inflight"),
    "no room in training": (
        "orchestrator.train.sampling.max_completion_tokens",
        512,
        "train: max_completion_tokens",
    ),
    "no room in eval": (
        "orchestrator.eval.sampling.max_completion_tokens",
        600,
        "eval: max_completion_tokens",
    ),
    "short server": ("inference.vllm.max_model_len", 256, "max_model_len"),
    "adapter by NCCL": ("weight_broadcast.type", "nccl", "filesystem"),
    "rank": ("trainer.model.lora.rank", 513, "513"),
    "schedule": (
        "trainer.scheduler",
        {"type": "linear", "warmup_steps": 15, "decay_steps": 10},
        "25 steps",
    ),
    "GPUs": ("deployment.num_infer_gpus", 2, "gpus_per_node"),
    "nobody serves": ("inference", None, "[inference]"),
    "client elsewhere": ("inference.server.port", 9000, "base_url"),
    "a port twice": ("rollout_transport.port", 20_011, "20011"),
    "no tasks": ("orchestrator.train.source", [], "train.source"),
    "a name twice": ("orchestrator.eval.source.0.name", "persona-train", "persona-train"),
    "remote runtime": (
        "orchestrator.train.source.0.env.agent.runtime.type",
        "prime",
        "subprocess",
    ),
    "thinks in one": ("orchestrator.eval.sampling.extra_body", {}, "enable_thinking"),
}


@pytest.mark.parametrize(("path", "value", "word"), BROKEN.values(), ids=BROKEN)
def test_a_rule_that_the_schema_cannot_hold_is_checked(path, value, word):
    config = changed(compiled().config, path, value)
    assert SCHEMA.is_valid(config), "the schema finds this by itself"
    problems = broken_rules(config)
    assert len(problems) == 1 and word in problems[0]


def test_a_job_that_prime_rl_cannot_run_is_refused_with_what_to_do():
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        compiled({"max_tokens": 512, "seq_len": 512})
    with pytest.raises(ConfigError, match="rename the argument"):
        compiled(args={"id": "other"})


def test_toml_reads_back_as_it_was_written():
    text = """
    "odd key" = "tab\\t quote \\" \\u007f é 😀"
    when = 1979-05-27T07:32:00Z
    day = 1979-05-27
    list = [1, 2.5, true, "x", [1], {a = 1}]
    floats = [1e-6, inf, 1e22]
    empty = {}
    [[array]]
    a = 1
    b.c.d = 2
    [[array.inner]]
    x = "y"
    [[array]]
    [deep.er]
    x = []
    """
    data = tomllib.loads(text)
    assert tomllib.loads(toml.dumps(data)) == data
    with pytest.raises(TypeError, match="no form"):
        toml.dumps({"a": None})


def test_arguments_from_job_toml_reach_the_taskset():
    text = (
        "[prime_rl]\nmodel = 'nano-wren'\nlearning_rate = 1e-5\n"
        "[environment]\nmodule = 'mine'\n[environment.args]\nsince = 2020-01-01\n"
    )
    job = parse_job_toml(text)
    done = compile_job(job, PERSONA, Target(model="x/y"))
    taskset = at(tomllib.loads(done.text), "orchestrator.train.source.0.env.taskset")
    assert taskset == {"id": "mine", **job.environment.args}
