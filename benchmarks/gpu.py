"""The engine on one GPU: correctness, decoding rate, packed jobs, how cost grows, memory.

    python benchmarks/gpu.py [--parts check,decode,jobs,growth,memory] [--out FILE]

Models have the shapes of SmolLM2-135M and Qwen3-0.6B (as a Llama) and seeded random weights: speed
does not depend on what the weights are, and no row stops early. Prints JSON.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from metatrainer.engine import (
    AdamParams,
    Engine,
    Packer,
    SampleRequest,
    SamplingParams,
    TrainRow,
    Update,
)
from metatrainer.engine.files import save_model
from metatrainer.engine.model import ModelConfig, Weights

SMOL = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, 8192)
QWEN = ModelConfig(151936, 1024, 3072, 28, 16, 8, 128, 8192)
TINY = ModelConfig(211, 64, 96, 3, 4, 2, 32, 512)
ODD = ModelConfig(211, 80, 96, 3, 4, 2, 40, 512)
"""A head as wide as the nano students', which is no power of two."""
RANK = 16


def make_model(config: ModelConfig, folder: Path, seed: int = 0) -> Path:
    """Write a model of seeded random weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.05

    c, layers = config, config.num_hidden_layers
    heads = (c.num_attention_heads + 2 * c.num_key_value_heads) * c.head_dim
    embed = normal(c.vocab_size, c.hidden_size)
    weights = Weights(
        embed=embed,
        head=embed,
        norm=torch.ones(c.hidden_size),
        attn_norm=torch.ones(layers, c.hidden_size),
        qkv=normal(layers, heads, c.hidden_size),
        o=normal(layers, c.hidden_size, c.num_attention_heads * c.head_dim),
        mlp_norm=torch.ones(layers, c.hidden_size),
        gate_up=normal(layers, 2 * c.intermediate_size, c.hidden_size),
        down=normal(layers, c.hidden_size, c.intermediate_size),
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder, config, weights)
    return folder


def moved(engine: Engine, seed: int) -> int:
    """An adapter that changes the model."""
    adapter = engine.create_adapter(RANK, seed=seed)
    with torch.no_grad():
        for _, b in engine._get(adapter).pairs.values():
            b.normal_(0, 0.02)
    engine._get(adapter).version += 1
    return adapter


def prompts(n: int, tokens: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (n, tokens), generator=generator).tolist()


def check(folder: Path, config: ModelConfig) -> dict[str, Any]:
    """The GPU against the CPU: the same tokens in fp32; log-probabilities of bf16 within noise."""
    make_model(config, folder)
    adapters: dict[str, list[int | None]] = {}
    engines = {
        "cpu": Engine(folder),
        "fp32": Engine(folder, "cuda"),
        "bf16": Engine(folder, "cuda", torch.bfloat16),
    }
    for name, engine in engines.items():
        adapters[name] = [None]
        for rank in (4, 8, 16):
            adapter = engine.create_adapter(rank, alpha=2 * rank, seed=rank)
            with torch.no_grad():
                for _, b in engine._get(adapter).pairs.values():
                    noise = torch.randn(b.shape, generator=torch.Generator().manual_seed(rank))
                    b.copy_(noise * 0.1)
            engine._get(adapter).version += 1
            adapters[name].append(adapter)
    shapes = (
        SamplingParams(40, stop=(7, 9)),
        SamplingParams(23, temperature=0.7, top_k=20, top_p=0.9),
        SamplingParams(9, temperature=0.0),
    )
    found: dict[str, list[Any]] = {}
    for name, engine in engines.items():
        requests = [
            SampleRequest(p[: 5 + i % 30], shapes[i % 3], adapters[name][i % 4], seed=i)
            for i, p in enumerate(prompts(96, 40, TINY.vocab_size))
        ]
        found[name] = list(zip(requests, engine.sample(requests)))
    same = sum(a[1].tokens == b[1].tokens for a, b in zip(found["cpu"], found["fp32"])) / 96
    gap = [0.0]
    for a, b in zip(found["cpu"], found["fp32"]):
        if a[1].tokens == b[1].tokens:
            gap += [abs(x - y) for x, y in zip(a[1].logprobs, b[1].logprobs)]
    result: dict[str, Any] = {"rows_equal_fp32": same, "logprob_gap_fp32": max(gap)}
    for name in ("fp32", "bf16"):
        engine = engines[name]
        gaps = []
        for request, sample in found[name]:
            whole = request.prompt + sample.tokens
            scored = engine.logprobs([whole], request.adapter)[0][len(request.prompt) - 1 :]
            gaps += [abs(x - y) for x, y in zip(sample.logprobs, scored)]
        result[f"sampler_trainer_gap_{name}"] = {"mean": statistics.mean(gaps), "max": max(gaps)}
    # Turns: feed, sample, feed again, with rows dropped, against one pass over all tokens.
    engine, adapter = engines["fp32"], adapters["fp32"][2]
    rows = prompts(8, 12, TINY.vocab_size, seed=4)
    rows[1] = list(rows[0])
    decoder = engine.decoder(adapter, list(range(8)))
    engine.feed(decoder, rows)
    worst = 0.0
    for turn in range(4):
        for row, sample in zip(rows, engine.sample_turn(decoder, SamplingParams(17, stop=(5, 8)))):
            begin = len(row)
            row += sample.tokens
            scored = engine.logprobs([row], adapter)[0][begin - 1 :]
            worst = max([worst, *(abs(x - y) for x, y in zip(sample.logprobs, scored))])
        if turn == 1:
            decoder.keep([6, 1, 3])
            rows = [rows[6], rows[1], rows[3]]
        extra = prompts(len(rows), 5, TINY.vocab_size, seed=30 + turn)
        extra[0] = []
        engine.feed(decoder, extra)
        rows = [row + more for row, more in zip(rows, extra)]
    result["turns_logprob_gap_fp32"] = worst
    # Gradients of several adapters in one pass.
    relative = []
    rows_ = [_row(p, 1.0) for p in prompts(12, 30, TINY.vocab_size, seed=9)]
    for name in ("cpu", "fp32"):
        engine = engines[name]
        mine = [a for a in adapters[name] if a is not None]
        engine.forward_backward_many(
            [Update(rows_[4 * i : 4 * i + 4], a, "importance_sampling") for i, a in enumerate(mine)]
        )
        relative.append([engine._get(a).grad.cpu().clone() for a in mine])
    result["gradient_gap_fp32"] = max(float((a - b).norm() / a.norm()) for a, b in zip(*relative))
    assert same > 0.97, result
    assert result["logprob_gap_fp32"] < 1e-3, result
    assert worst < 1e-3, result
    assert result["gradient_gap_fp32"] < 1e-3, result
    assert result["sampler_trainer_gap_bf16"]["mean"] < 0.05, result
    return result


def check_layouts(folder: Path) -> dict[str, Any]:
    """Tiny random models of the other architectures: the GPU samples what the CPU does, in fp32."""
    import transformers as hf

    size = {
        "vocab_size": 211,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
    }
    kinds = {
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {}),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {"head_dim": 32}),
        "gemma3": (
            hf.Gemma3TextConfig,
            hf.Gemma3ForCausalLM,
            {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
        ),
    }
    found = {}
    for name, (config, model, more) in kinds.items():
        torch.manual_seed(0)
        built = model(config(**size, **more))
        with torch.no_grad():
            for parameter in built.parameters():
                if parameter.dim() == 1:  # biases and norms, which begin as zeros and ones
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        built.save_pretrained(folder / name)
        sampled = []
        for engine in (Engine(folder / name), Engine(folder / name, "cuda")):
            adapter = engine.create_adapter(8, seed=1)
            with torch.no_grad():
                for _, b in engine._get(adapter).pairs.values():
                    noise = torch.randn(b.shape, generator=torch.Generator().manual_seed(1))
                    b.copy_(noise * 0.1)
            engine._get(adapter).version += 1
            requests = [
                SampleRequest(p[: 5 + i], SamplingParams(40), (None, adapter)[i % 2], seed=i)
                for i, p in enumerate(prompts(32, 40, 211))
            ]
            sampled.append(engine.sample(requests))
        same = sum(a.tokens == b.tokens for a, b in zip(*sampled)) / 32
        gaps = [
            abs(x - y)
            for a, b in zip(*sampled)
            if a.tokens == b.tokens
            for x, y in zip(a.logprobs, b.logprobs)
        ]
        found[name] = {"rows_equal": same, "logprob_gap": max(gaps, default=None)}
        assert same > 0.9 and max(gaps) < 1e-3, found
    return found


def _row(tokens: list[int], advantage: float, sampled: int = 0) -> TrainRow:
    """The last `sampled` tokens (0: all but the first) carry an advantage."""
    n = len(tokens) - 1
    on = sampled or n
    return TrainRow(
        tokens[:-1],
        tokens[1:],
        old_logprobs=[0.0] * (n - on) + [-5.0] * on,
        advantages=[0.0] * (n - on) + [advantage / on] * on,
    )


def timed(work: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def bandwidth() -> float:
    """Bytes a second of a large copy, read and written."""
    a = torch.empty(1 << 30, device="cuda", dtype=torch.float32)
    b = torch.empty_like(a)
    b.copy_(a)
    seconds = statistics.median(timed(lambda: b.copy_(a)) for _ in range(10))
    return 2 * a.numel() * 4 / seconds


def decode(
    engine: Engine,
    copy_rate: float,
    rows: int,
    adapters: int,
    context: int = 32,
    new: int = 128,
    repeats: int = 3,
) -> dict[str, Any]:
    """Sampled tokens a second of `rows` rows over `adapters` adapters.

    copy_rate: bytes a second; the floor of a step is what it must move at least, at this rate.
    """
    mine = [moved(engine, seed) for seed in range(adapters)]
    each = rows // adapters
    params = SamplingParams(new)

    def run() -> float:
        decoders = [engine.decoder(a, list(range(i, i + each))) for i, a in enumerate(mine)]
        works = [
            engine.feeding(d, prompts(each, context, engine.config.vocab_size, seed=i))
            for i, d in enumerate(decoders)
        ]
        engine.advance(works)
        turns = [engine.turn(d, params) for d in decoders]

        def loop() -> None:
            while going := [turn for turn in turns if not turn.done]:
                engine.advance(going)

        return timed(loop)

    run()
    seconds = statistics.median(run() for _ in range(repeats))
    lora = sum(engine._get(adapter).flat.numel() for adapter in mine)
    for adapter in mine:
        engine.delete_adapter(adapter)
    c = engine.config
    weights = sum(getattr(engine.base, n).numel() for n in ("qkv", "o", "gate_up", "down", "head"))
    cached = (
        rows * (context + new / 2) * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 2
    )
    logits = rows * c.vocab_size * 3  # written in bf16, read and written in fp32 at least once
    moved_bytes = 2 * (weights + lora + cached + logits)
    return {
        "rows": rows,
        "adapters": adapters,
        "context": context,
        "new": new,
        "tokens_per_second": round(rows * new / seconds),
        "step_ms": round(1000 * seconds / new, 3),
        "bytes_per_step": round(moved_bytes),
        "floor_ms": round(1000 * moved_bytes / copy_rate, 3),
        "step_over_floor": round(seconds / new / (moved_bytes / copy_rate), 1),
    }


def job(engine: Any, seed: int, steps: int, vocabulary: int) -> None:
    """GRPO in shape: each step 64 rollouts of 64 new tokens from 8 prompts of 64, and an update."""
    adapter = engine.create_adapter(RANK, seed=seed)
    for step in range(steps):
        asked = [p for p in prompts(8, 64, vocabulary, seed=100 * seed + step) for _ in range(8)]
        decoder = engine.decoder(adapter, [10_000 * seed + 100 * step + i for i in range(64)])
        engine.feed(decoder, asked)
        samples = engine.sample_turn(decoder, SamplingParams(64))
        rows = [
            _row(p + s.tokens, 1.0 if i % 2 else -1.0, 64)
            for i, (p, s) in enumerate(zip(asked, samples))
        ]
        engine.update(rows, adapter, "importance_sampling", AdamParams(1e-4, grad_clip_norm=1.0))
    engine.delete_adapter(adapter)


def jobs(engine: Engine, count: int, steps: int, alone: int) -> dict[str, Any]:
    """`count` jobs packed; `alone` of them one after another, the rest extrapolated."""
    vocabulary = engine.config.vocab_size

    def together(n: int) -> None:
        packer = Packer(engine)
        try:
            with ThreadPoolExecutor(n) as threads:
                work = [
                    threads.submit(job, packer.lane(), i, n_steps, vocabulary) for i in range(n)
                ]
                for future in work:
                    future.result()
        finally:
            packer.close()

    n_steps = 1
    together(count)
    job(engine, 0, 1, vocabulary)
    n_steps = steps
    torch.cuda.reset_peak_memory_stats()
    packed = timed(lambda: together(count))
    memory = torch.cuda.max_memory_allocated()
    single = [timed(partial(job, engine, seed, steps, vocabulary)) for seed in range(alone)]
    one = statistics.median(single)
    return {
        "jobs": count,
        "steps": steps,
        "packed_seconds": round(packed, 2),
        "alone_seconds_per_job": round(one, 2),
        "packed_jobs_per_second": round(count / packed, 3),
        "alone_jobs_per_second": round(1 / one, 3),
        "ratio": round(one * count / packed, 2),
        "peak_memory_gib": round(memory / 2**30, 1),
    }


def memory(folder: Path) -> dict[str, Any]:
    """What a 0.6B base with 40 adapters of rank 16 takes, and with a step of one job on top."""
    engine = Engine(make_model(QWEN, folder), "cuda", torch.bfloat16)
    for seed in range(40):
        engine.create_adapter(RANK, seed=seed)
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    job(engine, 99, 1, QWEN.vocab_size)
    return {
        "base_and_40_adapters_gib": round(held / 2**30, 2),
        "peak_with_a_step_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="check,decode,jobs,growth,memory")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--alone", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    parts, rate = options.parts.split(","), bandwidth()
    result: dict[str, Any] = {
        "benchmark": "gpu",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "date": datetime.date.today().isoformat(),
        "copy_bytes_per_second": round(rate),
    }

    def note(name: str, work: Callable[[], Any]) -> None:
        began = time.perf_counter()
        try:
            result[name] = work()
        except Exception as error:
            result[name] = f"{type(error).__name__}: {error}"
            import traceback

            traceback.print_exc()
        print(name, f"{time.perf_counter() - began:.1f} s", json.dumps(result[name]), flush=True)
        gc.collect()
        if options.out:
            options.out.write_text(json.dumps(result, indent=2) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        if "check" in parts:
            note("check", lambda: check(root / "tiny", TINY))
            note("check_odd_heads", lambda: check(root / "odd", ODD))
            note("check_layouts", lambda: check_layouts(root))
        if {"decode", "jobs", "growth"} & set(parts):
            smol = Engine(make_model(SMOL, root / "smol"), "cuda", torch.bfloat16)
        if "decode" in parts:
            note("decode_512_over_16", lambda: decode(smol, rate, 512, 16))
        if "jobs" in parts:
            note("jobs_40", lambda: jobs(smol, 40, options.steps, options.alone))
        if "growth" in parts:
            for rows in (64, 128, 256, 1024, 2048):
                note(f"rows_{rows}", lambda rows=rows: decode(smol, rate, rows, 16))
            for count in (1, 4, 16, 160):
                note(f"jobs_{count}", lambda n=count: jobs(smol, n, 5, 1))
            for context in (256, 1024, 4096):
                note(f"context_{context}", lambda c=context: decode(smol, rate, 512, 16, c, 64, 2))
        if "memory" in parts:
            smol = None  # type: ignore[assignment]
            gc.collect()
            torch.cuda.empty_cache()
            note("memory", lambda: memory(root / "qwen"))
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
