"""A stand-in for prime-rl's `rl`: replays the recorded run, well or badly.

stand_in_rl.py HOW RECORDED @ rl.toml; writes what the real one writes, where the config says.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(1, str(Path(__file__).parents[2] / "src"))  # started with a path of the job's own

from metatrainer import families
from metatrainer.engine.files import load_config
from metatrainer.engine.lora import PEFT_PREFIX, Adapter


def main(how: str, recorded: str, at: str, config_path: str) -> int:
    assert at == "@"
    config = tomllib.loads(Path(config_path).read_text())
    run = Path(config["output_dir"]) / config["run"]["name"]
    run.mkdir(parents=True)
    env = config["orchestrator"]["train"]["source"][0]["env"]
    assert importlib.util.find_spec(env["taskset"]["id"]), "the job's package is not on the path"
    assert "SECRET_TOKEN" not in os.environ
    leave_behind(run, how)
    rows = [json.loads(line) for line in (Path(recorded) / "metrics.jsonl").open()]
    metrics = (run / "metrics.jsonl").open("a")

    def write(*rows: object) -> None:
        for row in rows:
            metrics.write(row if isinstance(row, str) else json.dumps(row) + "\n")
            metrics.flush()

    if how == "hang":
        time.sleep(600)
    if how == "crash":
        write(*rows[:4])
        print("ValueError: it went wrong")
        return 1
    if how == "crash early":
        print("ModuleNotFoundError: No module named 'verifiers'")
        return 1
    if how == "out of memory":
        write(*rows[:9])
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB")
        return 1
    if how == "killed":
        write(*rows[:9])
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stall":
        write(*rows[:13], '{"step": 3, "tim')
        time.sleep(600)
    if how == "same rewards":
        write(rows[0])
        for row in rows[1:3]:
            write({**row, **{f"train/agg/all/agent/reward/{w}": 0.5 for w in ("min", "max")}})
        time.sleep(600)
    if how == "garbage":
        write(*("lorem ipsum\n" for _ in range(20)))
        time.sleep(600)
    if how == "slow":
        for number in range(10_000):
            write({"step": 1, "time": 0.0, "progress/tokens": number})
            time.sleep(0.05)
    if how == "not a number":
        write(*rows[:6], {"step": 2, "loss/mean": float("nan"), "entropy/all/mean": 1.0})
        time.sleep(600)
    if how == "dropped":  # as the real one does with what is not finite
        row = {k: v for k, v in rows[5].items() if not k.startswith("loss/")}
        write(*rows[:5], row)
        time.sleep(600)
    write(*rows)
    traces = run / "rollouts" / "step_1" / "train" / "all" / "traces.jsonl"
    traces.parent.mkdir(parents=True)
    traces.write_text((Path(recorded) / "traces.jsonl").read_text() + task(how) + "{cut o")
    if how != "no adapter":
        save_adapter(run / "broadcasts" / f"step_{config['max_steps']}", how, config)
    return 0


def task(how: str) -> str:
    """One more conversation, as far as the task goes: on a hidden item, or on none."""
    (item,) = families.get("persona").items("hidden" if how == "leak" else "train", 77, 1)
    data = {"prompt": item.prompt, "world": item.world, "answer": item.answer}
    return json.dumps({"task": {"type": "Task", "data": data, "key": "k"}}) + "\n"


def leave_behind(run: Path, how: str) -> None:
    """Processes that leave their group and their parent."""
    kinds = {"meek": "pass"}
    if how in ("ok", "stall"):  # they are waited for
        kinds["stubborn"] = "signal.signal(15, signal.SIG_IGN)"
    for name, ignores in kinds.items():
        code = (
            "import os, signal, time\n"
            f"{ignores}\n"
            "if os.fork(): os._exit(0)\n"
            f"os.setsid(); open({str(run / name)!r}, 'w').write(str(os.getpid()))\n"
            "time.sleep(600)"
        )
        subprocess.run([sys.executable, "-c", code], check=True)
        while not (run / name).exists() or not (run / name).read_text():
            time.sleep(0.01)


def save_adapter(folder: Path, how: str, config: dict) -> None:
    """What the real one leaves of a step: PEFT's two files, tensors named as in the model."""
    lora, base = config["trainer"]["model"]["lora"], Path(config["model"]["name"])
    folder.mkdir(parents=True)
    if how == "half an adapter":
        (folder / "adapter_config.json").write_text("{}")
        return
    made = Adapter(load_config(base), lora["rank"], lora["alpha"])
    made.initialise(1)
    made.save_peft(folder, str(base))
    weights = folder / "adapter_model.safetensors"
    tensors = {name.removeprefix(PEFT_PREFIX): t for name, t in load_file(weights).items()}
    spoil(tensors, how)
    save_file(tensors, weights)
    if how == "broken adapter":
        weights.write_bytes(b"\xff" * 100)
    (folder / "STABLE").touch()


def spoil(tensors: dict[str, torch.Tensor], how: str) -> None:
    first = min(tensors)
    a = tensors[first]
    if how == "adapter not finite":
        a[0, 0] = float("inf")
    if how == "other rank":
        tensors[first] = torch.ones(len(a) + 1, a.shape[1])
    if how == "other width":
        tensors[first] = torch.ones(len(a), a.shape[1] + 1)
    if how == "whole numbers":
        tensors[first] = a.int()
    if how == "a tensor short":
        del tensors[first]
    if how == "a layer more":
        tensors[first.replace("layers.0", "layers.99")] = a.clone()
    if how == "whole weights":
        tensors["model.embed_tokens.weight"] = torch.ones(8, 8)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
