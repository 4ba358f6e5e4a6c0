"""Between the SDK's types and the engine's. Pure functions.

Knows the loss functions that the engine has and what each of them needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import tinker
from tinker import types

from metatrainer.engine import (
    AdamParams,
    Engine,
    Sample,
    SampleRequest,
    SamplingParams,
    TrainOutput,
    TrainRow,
)
from metatrainer.engine.losses import CONFIG
from metatrainer.tinker.checkpoints import refusal

_POLICY_INPUTS = {"logprobs": "old_logprobs", "advantages": "advantages"}
LOSSES: dict[str, dict[str, str]] = {
    "cross_entropy": {"weights": "weights"},
    "importance_sampling": _POLICY_INPUTS,
    "ppo": _POLICY_INPUTS,
    "cispo": _POLICY_INPUTS,
}
"""Loss function -> its inputs besides target_tokens, as the SDK calls them and as a row does."""


def bad_request(message: str) -> tinker.APIStatusError:
    """The SDK's exception for a request that cannot be served."""
    return refusal(tinker.BadRequestError, message)


def check_loss(loss_fn: str, config: Mapping[str, float | str] | None) -> dict[str, float]:
    """The settings of a loss. Raises BadRequestError for what the engine does not have."""
    if loss_fn not in LOSSES:
        raise bad_request(
            f"loss_fn {loss_fn!r} is not supported in process; supported: {', '.join(LOSSES)}"
        )
    settings = {}
    for key, value in (config or {}).items():
        if key not in CONFIG[loss_fn]:
            known = ", ".join(CONFIG[loss_fn]) or "none"
            raise bad_request(f"{loss_fn} has no loss_fn_config {key!r}; it has: {known}")
        if isinstance(value, str) or not math.isfinite(value):
            raise bad_request(f"loss_fn_config {key} is a finite number, got {value!r}")
        settings[key] = float(value)
    return settings


def prompt_ids(prompt: types.ModelInput, vocabulary: int) -> list[int]:
    """Token ids of an input of text alone. Raises BadRequestError for anything else."""
    try:
        ids = prompt.to_ints()
    except ValueError:
        raise bad_request("only text can be taken here, the input has other chunks") from None
    if not ids:
        raise bad_request("the input has no tokens")
    if bad := [t for t in ids if not 0 <= t < vocabulary]:
        raise bad_request(f"token {bad[0]} is outside of the vocabulary of {vocabulary}")
    return ids


def train_row(datum: types.Datum, loss_fn: str, vocabulary: int) -> TrainRow:
    """One datum as the engine takes it. Raises BadRequestError where something is missing."""
    tokens = prompt_ids(datum.model_input, vocabulary)
    names = {"target_tokens": "targets", **LOSSES[loss_fn]}
    if missing := set(names) - set(datum.loss_fn_inputs):
        raise bad_request(f"{loss_fn} needs loss_fn_inputs {sorted(missing)}")
    if surplus := set(datum.loss_fn_inputs) - set(names):
        raise bad_request(f"{loss_fn} does not take loss_fn_inputs {sorted(surplus)}")
    fields = {row: datum.loss_fn_inputs[sdk].tolist() for sdk, row in names.items()}
    for name, values in fields.items():
        if len(values) != len(tokens):
            raise bad_request(f"{len(values)} {name} for {len(tokens)} input tokens")
    return TrainRow(tokens=tokens, **fields)


def train_output(output: TrainOutput) -> types.ForwardBackwardOutput:
    """The engine's result as the SDK's, one record of log-probabilities a datum."""
    return types.ForwardBackwardOutput(
        loss_fn_output_type="ArrayRecord",
        loss_fn_outputs=[{"logprobs": _floats(row)} for row in output.logprobs],
        metrics={"loss:sum": output.loss},
    )


def sample_requests(
    prompt: types.ModelInput, params: types.SamplingParams, num_samples: int, engine: Engine
) -> list[SampleRequest]:
    """One request for each sample; a seed counts up over them."""
    ids = prompt_ids(prompt, engine.config.vocab_size)
    room = engine.config.max_position_embeddings - len(ids)
    if room < 1:
        raise bad_request(f"the prompt has {len(ids)} tokens, which leaves no room in the context")
    drawn = SamplingParams(
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        stop=_stop_ids(params.stop, engine),
    )
    seeds = [None if params.seed is None else params.seed + i for i in range(num_samples)]
    return [SampleRequest(prompt=ids, params=drawn, seed=seed) for seed in seeds]


def sample_response(
    samples: Sequence[Sample], name: str, prompt: Sequence[float | None] | None = None
) -> types.SampleResponse:
    """Samples of one prompt as the SDK's response.

    name: start of the sequences' ids. prompt: log-probabilities of the prompt's tokens, if asked.
    """
    return types.SampleResponse(
        # The first, which has none, becomes NaN.
        prompt_logprobs_np=None if prompt is None else np.array(prompt, dtype=np.float32),
        sequences=[
            types.SampledSequence(
                stop_reason=sample.stop_reason,
                sequence_id=f"{name}:{i}",
                tokens_np=np.asarray(sample.tokens, dtype=np.int32),
                logprobs_np=np.asarray(sample.logprobs, dtype=np.float32),
            )
            for i, sample in enumerate(samples)
        ],
    )


def adam_params(params: types.AdamParams) -> AdamParams:
    """The SDK's settings of an update as the engine's. Raises BadRequestError for another kind."""
    if not isinstance(params, types.AdamParams):
        raise bad_request(f"{type(params).__name__} is not supported in process; use AdamParams")
    return AdamParams(**params.model_dump())


def _stop_ids(stop: str | Sequence[str] | Sequence[int] | None, engine: Engine) -> tuple[int, ...]:
    """Stop tokens; left out, the end of text, and an empty list stops nowhere, as in the SDK."""
    if stop is None:
        end = engine.tokenizer.eos_token_id
        return () if end is None else (end,)
    items = [stop] if isinstance(stop, str) else stop
    return tuple(_stop_id(item, engine) for item in items)


def _stop_id(item: str | int, engine: Engine) -> int:
    if isinstance(item, int):
        return item
    ids = engine.tokenizer.encode(item, add_special_tokens=False)
    if len(ids) != 1:
        raise bad_request(f"stop {item!r} is {len(ids)} tokens; only single tokens can stop here")
    return int(ids[0])


def _floats(values: Sequence[float]) -> types.TensorData:
    return types.TensorData(
        data=np.asarray(values, dtype=np.float32), dtype="float32", shape=[len(values)]
    )
