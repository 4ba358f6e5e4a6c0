"""tinker-cookbook's own training loops, unedited, against the server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from served import KEY

SUPERVISED = """
    import asyncio, sys
    import chz, tinker
    from tinker_cookbook.supervised import train
    from tinker_cookbook.supervised.types import SupervisedDataset, SupervisedDatasetBuilder

    DATUM = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([5, 6, 7]),
        loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]},
    )

    class Data(SupervisedDataset):
        def get_batch(self, index):
            return [DATUM] * 4
        def __len__(self):
            return 4

    @chz.chz
    class Builder(SupervisedDatasetBuilder):
        def __call__(self):
            return Data(), None

    asyncio.run(train.main(train.Config(
        log_path=sys.argv[1], model_name=sys.argv[2], recipe_name="test", dataset_builder=Builder(),
        learning_rate=1e-2, lora_rank=4, save_every=2, eval_every=0,
    )))
"""
REINFORCED = """
    import asyncio, sys
    import chz, tinker
    from tinker_cookbook.rl import train
    from tinker_cookbook.rl.types import (
        Env, EnvGroupBuilder, RLDataset, RLDatasetBuilder, StepResult,
    )

    class Likes(Env):
        \"\"\"Rewards small token ids.\"\"\"
        async def initial_observation(self):
            return tinker.ModelInput.from_ints([5, 6]), []
        async def step(self, action, *, extra=None):
            reward = sum(t < 128 for t in action) / max(1, len(action))
            empty = tinker.ModelInput.empty()
            return StepResult(
                reward=reward, episode_done=True, next_observation=empty, next_stop_condition=[]
            )

    class Group(EnvGroupBuilder):
        async def make_envs(self):
            return [Likes() for _ in range(16)]

    class Data(RLDataset):
        def get_batch(self, index):
            return [Group() for _ in range(4)]
        def __len__(self):
            return 12

    @chz.chz
    class Builder(RLDatasetBuilder):
        async def __call__(self):
            return Data(), None

    asyncio.run(train.main(train.Config(
        log_path=sys.argv[1], model_name=sys.argv[2], recipe_name="test", dataset_builder=Builder(),
        learning_rate=0.1, lora_rank=4, max_tokens=8, save_every=4, eval_every=0,
        num_groups_to_log=0, rollout_json_export=False,
    )))
"""


def run(script: str, url: str, log: Path, model: Path) -> list[dict[str, float]]:
    """The metrics of a loop's steps."""
    environment = {**os.environ, "TINKER_BASE_URL": url, "TINKER_API_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(log), str(model)],
        capture_output=True,
        text=True,
        timeout=200,
        env=environment,
        cwd=log.parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (log / "metrics.jsonl").read_text().splitlines()
    checkpoints = (log / "checkpoints.jsonl").read_text().splitlines()
    assert json.loads(checkpoints[-1])["state_path"].startswith("tinker://run-")
    return [json.loads(line) for line in lines]


def test_the_supervised_loop_learns(url, folder, tmp_path):
    rows = run(SUPERVISED, url, tmp_path / "log", folder / "first")
    losses = [row["train_mean_nll"] for row in rows if "train_mean_nll" in row]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_the_rl_loop_learns(url, folder, tmp_path):
    rows = run(REINFORCED, url, tmp_path / "log", folder / "second")
    rewards = [row["env/all/reward/total"] for row in rows if "env/all/reward/total" in row]
    assert len(rewards) == 12
    # Half of a random model's tokens are small at first; nine in ten after twelve strong updates.
    assert rewards[-1] > rewards[0] + 0.1
