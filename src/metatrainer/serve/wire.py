"""The SDK's protobuf messages, read and written with its own classes. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tinker import types
from tinker.proto import response_conv
from tinker.proto import tinker_public_pb2 as public

from metatrainer.tinker.convert import bad_request

MEDIA_TYPE = "application/x-protobuf"
_STOP_REASONS = {"stop": public.STOP_REASON_STOP, "length": public.STOP_REASON_LENGTH}


@dataclass(frozen=True)
class Pass:
    """A forward pass that is asked for, with or without a backward one."""

    model_id: str
    seq_id: int
    data: list[types.Datum]
    loss_fn: str
    config: Mapping[str, float | str]
    backward: bool


def read_pass(body: bytes) -> Pass:
    """Raises BadRequestError for what is no such message, or holds other input than text."""
    message = public.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
        data = [_datum(each) for each in message.data]
    except (DecodeError, ValueError, TypeError) as error:
        raise bad_request(f"not a forward_backward request: {error}") from None
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        config[key] = value.text if value.HasField("text") else value.number
    return Pass(
        message.model_id,
        message.seq_id,
        data,
        message.loss_fn,
        config,
        backward=not message.forward_only,
    )


def _datum(message: Any) -> types.Datum:
    chunks: list[types.ModelInputChunk] = []
    for chunk in message.model_input:
        if not chunk.HasField("encoded_text"):
            raise ValueError("only text can be taken here")
        tokens = np.frombuffer(chunk.encoded_text.tokens, np.int32)
        chunks.append(types.EncodedTextChunk(tokens=tokens.tolist()))
    inputs = {
        name: response_conv._tensor_data_from_proto(tensor)
        for name, tensor in message.loss_fn_inputs.items()
    }
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def write(answer: object) -> bytes | None:
    """An answer that the SDK takes as protobuf alone; None for any other."""
    if isinstance(answer, types.SampleResponse):
        return _sampled(answer)
    if isinstance(answer, types.ForwardBackwardOutput):
        return _trained(answer)
    return None


def _sampled(answer: types.SampleResponse) -> bytes:
    prompt = answer.prompt_logprobs_np
    message = public.SampleResponse(
        sequences=[
            public.SampledSequence(
                stop_reason=_STOP_REASONS[sequence.stop_reason],
                tokens=np.asarray(sequence.tokens_np, np.int32).tobytes(),
                logprobs=np.asarray(sequence.logprobs_np, np.float32).tobytes(),
            )
            for sequence in answer.sequences
        ],
        prompt_logprobs=None if prompt is None else prompt.tobytes(),
    )
    return bytes(message.SerializeToString())


def _trained(answer: types.ForwardBackwardOutput) -> bytes:
    names = list(answer.loss_fn_outputs[0]) if answer.loss_fn_outputs else []
    record = public.ArrayRecord(
        fields={
            name: _batched([row[name].to_numpy() for row in answer.loss_fn_outputs])
            for name in names
        },
        num_datums=len(answer.loss_fn_outputs),
    )
    message = public.ForwardBackwardOutput(
        loss_fn_output_type=answer.loss_fn_output_type,
        loss_fn_outputs=[record],
        metrics=answer.metrics,
    )
    return bytes(message.SerializeToString())


def _batched(rows: list[np.ndarray]) -> Any:
    rows = [np.asarray(row, np.float32) for row in rows]
    ends = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64)
    return public.BatchedTensor(
        data=b"".join(row.tobytes() for row in rows),
        offsets=ends.tobytes(),
        dtype=public.DTYPE_FLOAT32,
    )
