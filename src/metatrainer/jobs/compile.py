"""A job as a complete config of prime-rl: what job.toml says, and all that it leaves unsaid.

Every default of prime-rl that would waste a run is set: without a number of steps it never ends,
with groups of one nothing is learned, without an [inference] table it waits for a server that
nobody starts. What the embedded engine does is asked for likewise, so that a job means the same.
Pure: runs nothing and reads nothing. Knows nothing about sandboxes or slots' processes.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from metatrainer import toml
from metatrainer.config import EvalSettings, Settings
from metatrainer.errors import ConfigError
from metatrainer.families import Family
from metatrainer.jobs.prime_rl_rules import ENV_PORTS, broken_rules
from metatrainer.jobs.spec import JobSpec

PRIME_RL_COMMIT = "559b44772e471d1538537b8805cc77f3824a5e64"
"""The prime-rl whose config this is. Its schema changes often: run this one."""

HARNESS = "metatrainer_harness"
"""The package of jobs/harness.py as verifiers imports it: it runs the family's tools."""
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The layers that the embedded engine adapts."""
FIRST_PORT = 20_000
PORTS = 100
"""Ports of one slot; the last slot's end below those that Linux hands out by itself."""
SHARED_MEMORY = 0.4
"""Share of a GPU for the inference server where the trainer needs the rest."""
OWN_MEMORY = 0.9
MAX_LORA_RANK = 64
"""Highest rank that a job may ask for: a server of our own serves any job."""
NEEDED = (
    "prime-rl's Python needs metatrainer too, for the students' tools: "
    "pip install --no-deps metatrainer"
)
THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


class Target(Settings):
    """Where and how a job is to run on prime-rl."""

    model: str = Field(min_length=1)
    """The student as prime-rl loads it: a Hugging Face name, or a folder."""
    job_dir: str = "."
    """Folder that holds the job's package, as the machine that runs it sees it."""
    config_path: str = "rl.toml"
    """File that the config is written to."""
    output_dir: str = "outputs"
    """Folder of runs."""
    run_name: str = "job"
    """Folder of this run in it; prime-rl refuses one that was used before."""
    gpus: Literal[1, 2] = 2
    """2: one trains and one samples; 1: both on the same."""
    slot: int = Field(0, ge=0, le=99)
    """Which place on the machine: GPUs and ports of different slots are different."""
    full: bool = False
    """Train all weights instead of an adapter. What comes back is then a model of its own, which no
    pool accepts: for a job by hand."""
    serve: bool = True
    """Let rl start its inference server; else one runs already, on the slot's port."""
    evaluation: EvalSettings = EvalSettings()
    """Turns of a conversation, and sampling of the check on practice tasks."""


@dataclass(frozen=True)
class Compiled:
    """A job for prime-rl."""

    config: dict[str, Any]
    """The whole rl.toml."""
    environment: dict[str, str]
    """Variables that its processes need."""
    commands: list[str]
    """What starts it, for a shell."""
    notes: list[str]
    """What whoever runs it must know."""

    @property
    def text(self) -> str:
        """The config as a file, with the commit it is for."""
        return f"# A config of prime-rl at commit {PRIME_RL_COMMIT}\n{toml.dumps(self.config)}"


def compile_job(spec: JobSpec, family: Family, target: Target) -> Compiled:
    """Compile a validated job. Raises ConfigError for what prime-rl cannot run."""
    if "id" in spec.environment.args:
        raise ConfigError(
            "[environment] args has the key 'id', which names the taskset; rename the argument"
        )
    server = _inference(target, spec.prime_rl.lora_rank)
    server["vllm"]["max_model_len"] = spec.prime_rl.seq_len
    config = {
        **_run(spec, target),
        **({"inference": server} if target.serve else {}),
        "trainer": _trainer(spec, target),
        "orchestrator": _orchestrator(spec, family, target),
    }
    if broken := broken_rules(config):
        raise ConfigError("prime-rl cannot run this job:\n" + "\n".join(broken))
    environment = _environment(target)
    said = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
    return Compiled(
        config, environment, [f"{said} rl @ {shlex.quote(target.config_path)}"], [NEEDED]
    )


def port(target: Target) -> int:
    """Port of the slot's inference server."""
    return _port(target, 0)


def server_config(target: Target) -> dict[str, Any]:
    """The whole inference.toml of a server of our own for the student, for any job's adapter."""
    table = _inference(target, MAX_LORA_RANK)
    return {**table, "vllm": {"model": target.model, **table["vllm"]}}


def server_device(target: Target) -> int:
    """The GPU that a server of our own runs on."""
    return _devices(target)[1]


def _run(spec: JobSpec, target: Target) -> dict[str, Any]:
    s = spec.prime_rl
    deployment = {
        "type": "single_node",
        "gpus_per_node": 2 if target.serve else 1,
        "num_train_gpus": 1,
        "num_infer_gpus": 1 if target.serve else 0,
    }
    return {
        "max_steps": s.max_steps,
        "seq_len": s.seq_len,
        "output_dir": target.output_dir,
        "clean": False,
        "run": {"name": target.run_name},
        "model": {"name": target.model},
        # With a server two devices in either form: for one GPU, the command names it twice.
        "deployment": deployment,
        # Adapters are broadcast through files: NCCL carries none, and refuses a GPU named twice.
        "weight_broadcast": {"type": "filesystem"},
        "rollout_transport": {"type": "zmq", "host": "localhost", "port": _port(target, 3)},
        "ckpt": {"interval": s.max_steps, "keep_last": 1},
        "monitors": {"file": {"path": "metrics.jsonl"}},
    }


def _inference(target: Target, rank: int) -> dict[str, Any]:
    """The [inference] table. rank: of the largest adapter that is served."""
    lora = {} if target.full else {"enable_lora": True, "max_lora_rank": rank}
    # By its name a model's format of calls is known; what a folder holds is in Qwen3's.
    parser = {"tool_call_parser": "hermes"} if _is_path(target.model) else {}
    return {
        # One engine needs no router in front of it, and not every machine has its binary.
        "router": "None",
        "server": {"host": "127.0.0.1", "port": _port(target, 0)},
        "backend_port": _port(target, 1),
        "vllm": {
            "data_parallel_rpc_port": _port(target, 2),
            **lora,
            **parser,
            "gpu_memory_utilization": SHARED_MEMORY if target.gpus == 1 else OWN_MEMORY,
        },
    }


def _trainer(spec: JobSpec, target: Target) -> dict[str, Any]:
    rank = spec.prime_rl.lora_rank
    lora = {
        "rank": rank,
        "alpha": float(2 * rank),
        "dropout": 0.0,
        "target_modules": list(LORA_TARGETS),
    }
    return {
        "model": {
            # Made for large models; a small one only waits for them.
            "compile": "None",
            "ac": "None",
            "ac_offloading": "None",
            "optim_cpu_offload": False,
            **({} if target.full else {"lora": lora}),
        },
        "optim": {
            "type": "adamw",
            "lr": spec.prime_rl.learning_rate,
            "betas1": 0.9,
            "betas2": 0.95,
            "weight_decay": 0.0,
            "max_norm": 1.0,
        },
        "scheduler": {"type": "constant"},
    }


def _orchestrator(spec: JobSpec, family: Family, target: Target) -> dict[str, Any]:
    s = spec.prime_rl
    server = f"http://127.0.0.1:{port(target)}"
    # A folder has no name by which a renderer of its own could be found.
    by_path = {"name": "default", "tool_parser": "qwen3"}
    return {
        "batch_size": s.batch_size,
        "group_size": s.group_size,
        "max_steps": s.max_steps,
        "max_off_policy_steps": 8,
        "env_server_base_port": _port(target, 10),
        "concurrency": {"max_inflight": s.batch_size},
        "algo": {"type": "grpo"},
        "renderer": by_path if _is_path(target.model) else {"name": "auto"},
        # Its default is port 8000 whatever the server's is.
        "model": {"client": {"base_url": f"{server}/v1", "admin_base_url": [server]}},
        "train": {
            "sampling": {
                "temperature": s.temperature,
                "max_completion_tokens": s.max_tokens,
                "extra_body": THINKING,
            },
            "source": [_source("train", spec, family, target)],
        },
        "eval": _practice(spec, family, target),
    }


def _practice(spec: JobSpec, family: Family, target: Target) -> dict[str, Any]:
    """A check on the job's own tasks, before the first step and after the last.

    It shows whether the run works. The score is another matter: it is taken outside the run, from
    the adapter, on items that the job never sees.
    """
    evaluation = target.evaluation
    return {
        "interval": spec.prime_rl.max_steps + 1,
        "group_size": 1,
        "num_examples": min(64, evaluation.items),
        "sampling": {
            "temperature": evaluation.temperature,
            "max_completion_tokens": evaluation.max_tokens,
            "extra_body": THINKING,
        },
        "source": [_source("practice", spec, family, target)],
    }


def _source(part: str, spec: JobSpec, family: Family, target: Target) -> dict[str, Any]:
    agent = {
        "max_turns": target.evaluation.max_turns,
        "harness": {"id": HARNESS, "family": family.name},
        # prime-rl's own default is a sandbox that is rented by the rollout.
        "runtime": {"type": "subprocess"},
    }
    taskset = {"id": spec.environment.module, **spec.environment.args}
    return {"name": f"{family.name}-{part}", "env": {"taskset": taskset, "agent": agent}}


def _environment(target: Target) -> dict[str, str]:
    train, serve = _devices(target)
    visible = f"{train},{serve}" if target.serve else f"{train}"
    return {"CUDA_VISIBLE_DEVICES": visible, "PYTHONPATH": target.job_dir}


def _devices(target: Target) -> tuple[int, int]:
    """The slot's GPUs: which one trains and which one samples."""
    first = target.slot * target.gpus
    return first, first + target.gpus - 1


def _port(target: Target, offset: int) -> int:
    assert offset + ENV_PORTS < PORTS
    return FIRST_PORT + PORTS * target.slot + offset


def _is_path(model: str) -> bool:
    return model.startswith(("/", "./", "../", "~"))
