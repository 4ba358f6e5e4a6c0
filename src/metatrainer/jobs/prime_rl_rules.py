"""What must hold between the settings of a prime-rl config, beyond names, types and bounds.

prime-rl refuses some of it when it starts; the rest it accepts, and the run is wasted or hangs.
Reads a config as plain data; knows nothing about jobs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

Config = Mapping[str, Any]

MAX_LORA_RANK = 512
"""What vLLM can serve."""
ENV_PORTS = 8
"""Ports from env_server_base_port on that are taken: one for each source, with room."""


def broken_rules(config: Config) -> list[str]:
    """What is wrong with a config, one sentence each with what to do; empty if it may run."""
    return [problem for rule in _RULES for problem in rule(config)]


def _batch(config: Config) -> Iterator[str]:
    steps = config.get("max_steps")
    if not isinstance(steps, int) or steps < 1:
        yield "max_steps is not set, so the run never ends; set it to 1 or more"
    batch, group = _at(config, "orchestrator.batch_size"), _at(config, "orchestrator.group_size", 1)
    if group < 2:
        yield f"group_size is {group}: every advantage is 0; set it to 2 or more"
    if not batch or batch % group:
        yield f"batch_size {batch} is not a multiple of group_size {group}; make it one"
    inflight = _at(config, "orchestrator.concurrency.max_inflight", 1024)
    if inflight < group:
        yield f"max_inflight {inflight} is below group_size {group}; raise it"


def _lengths(config: Config) -> Iterator[str]:
    seq_len = config.get("seq_len") or 2048
    for part in ("train", "eval"):
        tokens = _at(config, f"orchestrator.{part}.sampling.max_completion_tokens")
        if tokens and tokens >= seq_len:
            yield (
                f"{part}: max_completion_tokens {tokens} leaves no room for a prompt in seq_len "
                f"{seq_len}; lower it, or raise seq_len"
            )
    longest = _at(config, "inference.vllm.max_model_len")
    if longest and longest < seq_len:
        yield f"max_model_len {longest} is below seq_len {seq_len}; set them alike"


def _lora(config: Config) -> Iterator[str]:
    lora = _at(config, "trainer.model.lora")
    if lora is None:
        return
    if _at(config, "weight_broadcast.type", "filesystem") != "filesystem":
        yield 'adapters go by files only; set weight_broadcast.type to "filesystem"'
    if lora.get("rank", 16) > MAX_LORA_RANK:
        yield f"lora rank {lora['rank']} cannot be served; use at most {MAX_LORA_RANK}"


def _schedule(config: Config) -> Iterator[str]:
    scheduler = _at(config, "trainer.scheduler", {})
    needed = scheduler.get("warmup_steps", 0) + scheduler.get("decay_steps", 0)
    if needed > (config.get("max_steps") or needed):
        yield f"warm-up and decay need {needed} steps, more than max_steps; shorten them"


def _devices(config: Config) -> Iterator[str]:
    there = _at(config, "deployment.gpus_per_node", 8)
    train = _at(config, "deployment.num_train_gpus", 1)
    infer = _at(config, "deployment.num_infer_gpus", 1)
    if train + infer > there:
        yield f"{train} + {infer} GPUs are more than gpus_per_node {there}; ask for fewer"
    if infer and not _at(config, "inference"):
        yield "there is no [inference] table, so no server is started; add it"


def _ports(config: Config) -> Iterator[str]:
    server = _at(config, "inference.server.port", 8000)
    asked = urlsplit(
        _at(config, "orchestrator.model.client.base_url", "http://localhost:8000/v1")
    ).port
    if _at(config, "inference") and asked != server:
        yield f"base_url has port {asked}, the server has {server}; set them alike"
    first = _at(config, "orchestrator.env_server_base_port", 5000)
    ports = Counter(
        [
            server,
            _at(config, "inference.backend_port", 8100),
            _at(config, "inference.vllm.data_parallel_rpc_port", 13345),
            _at(config, "rollout_transport.port", 5555),
            *range(first, first + ENV_PORTS),
        ]
    )
    for port, count in ports.items():
        if count > 1:
            yield f"port {port} is used {count} times; give each part its own"


def _sources(config: Config) -> Iterator[str]:
    parts = {part: _at(config, f"orchestrator.{part}", {}) for part in ("train", "eval")}
    sources = [source for part in parts.values() for source in part.get("source", ())]
    if not parts["train"].get("source"):
        yield "there is no [[orchestrator.train.source]]; add the job's taskset"
    for name, count in Counter(source.get("name") for source in sources).items():
        if count > 1:
            yield f"{count} sources have the name {name!r}; give each its own"
    for source in sources:
        runtime = _at(source, "env.agent.runtime.type", "prime")
        if runtime != "subprocess":
            yield f'runtime {runtime!r} is a remote one; set runtime.type to "subprocess"'
    if parts["eval"] and _thinking(parts["train"]) != _thinking(parts["eval"]):
        yield "enable_thinking differs between train and eval; set it alike in both extra_body"


def _thinking(part: Config) -> Any:
    return _at(part, "sampling.extra_body.chat_template_kwargs.enable_thinking")


def _at(config: Config, path: str, default: Any = None) -> Any:
    """The value at a dotted path; the default where a table of it is missing or "None"."""
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return default if value in (None, "None") else value


_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _batch,
    _lengths,
    _lora,
    _schedule,
    _devices,
    _ports,
    _sources,
)
