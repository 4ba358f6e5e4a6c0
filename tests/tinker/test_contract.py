"""The in-process clients against the real SDK: names, parameters, types, and what they return.

Everything is by introspection and by the SDK's own (de)serialisers: no network, no key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.metadata
import inspect

import numpy as np
import pytest
import tinker
from tinker import types
from tinker.lib import public_interfaces as real
from tinker.lib.public_interfaces.api_future import APIFuture
from tinker.proto import request_conv, response_conv
from tinker.proto import tinker_public_pb2 as wire

from metatrainer.tinker import client as ours
from metatrainer.tinker.client import SDK_VERSION
from metatrainer.tinker.seam import COOKBOOK_VERSION, serve

CLIENTS = [
    (ours.ServiceClient, real.ServiceClient),
    (ours.TrainingClient, real.TrainingClient),
    (ours.SamplingClient, real.SamplingClient),
    (ours.RestClient, real.RestClient),
]
OURS_ALONE = {"close", "result", "result_async"}
"""Not a copy of the SDK's: our close, and what makes a client its own future."""


def methods(kind: type) -> dict[str, object]:
    return {
        name: member
        for name, member in inspect.getmembers(kind, callable)
        if not name.startswith("_") and name not in OURS_ALONE
    }


def test_the_pinned_versions_are_installed():
    """A bump has to come here: read the SDK's changes, then move the pin."""
    assert importlib.metadata.version("tinker") == SDK_VERSION
    assert importlib.metadata.version("tinker-cookbook") == COOKBOOK_VERSION


@pytest.mark.parametrize(("mine", "theirs"), CLIENTS, ids=lambda kind: kind.__name__)
def test_every_method_is_the_sdks_with_a_part_of_its_parameters(mine, theirs):
    for name, method in methods(mine).items():
        assert hasattr(theirs, name), f"the SDK has no {name}"
        known = inspect.signature(getattr(theirs, name)).parameters
        for parameter in inspect.signature(method).parameters.values():
            assert parameter.name in known, f"{name}({parameter.name})"
            assert parameter.kind == known[parameter.name].kind, f"{name}({parameter.name})"
            assert parameter.default == known[parameter.name].default, f"{name}({parameter.name})"
        asynchronous = inspect.iscoroutinefunction(inspect.unwrap(getattr(theirs, name)))
        assert inspect.iscoroutinefunction(method) == asynchronous, name


@pytest.mark.parametrize(("mine", "theirs"), CLIENTS, ids=lambda kind: kind.__name__)
def test_the_first_parameters_come_in_the_sdks_order(mine, theirs):
    for name, method in methods(mine).items():
        known = list(inspect.signature(getattr(theirs, name)).parameters)
        here = list(inspect.signature(method).parameters)
        assert here == sorted(here, key=known.index), name


@pytest.mark.parametrize(("mine", "theirs"), CLIENTS, ids=lambda kind: kind.__name__)
def test_async_forms_yield_a_future_or_its_result_as_in_the_sdk(mine, theirs):
    """forward_backward_async yields a future to wait for later, sample_async the sample itself."""
    for name, method in methods(mine).items():
        plain = name.removesuffix("_async")
        if plain == name or not str(_returns(getattr(mine, plain))).startswith("APIFuture"):
            continue
        waits = not str(_returns(getattr(theirs, name))).startswith("APIFuture")
        assert (method.__code__.co_name == "awaited") == waits, name


def _returns(method) -> object:
    return inspect.signature(method).return_annotation


CALLS = {
    "ServiceClient": {
        "create_lora_training_client": {"base_model": "m", "rank": 4, "user_metadata": {}},
        "create_training_client_from_state": {"path": "p", "user_metadata": {}},
        "create_training_client_from_state_with_optimizer": {"path": "p", "user_metadata": {}},
        "create_sampling_client": {"model_path": None, "base_model": "m"},
        "create_rest_client": {},
    },
    "TrainingClient": {
        "forward": {"data": [], "loss_fn": "cross_entropy"},
        "forward_backward": {"data": [], "loss_fn": "cross_entropy", "loss_fn_config": None},
        "optim_step": {"optim_params": None},
        "save_state": {"name": "n", "ttl_seconds": 1},
        "save_weights_for_sampler": {"name": "n", "ttl_seconds": 1},
        "save_weights_and_get_sampling_client": {},
        "create_sampling_client": {"model_path": "p"},
        "get_tokenizer": {},
        "get_info": {},
    },
    "SamplingClient": {
        "sample": {"prompt": None, "num_samples": 1, "sampling_params": None},
        "compute_logprobs": {"prompt": None},
        "get_tokenizer": {},
    },
    "RestClient": {
        "get_training_run_by_tinker_path": {"tinker_path": "p"},
        "delete_checkpoint_from_tinker_path": {"tinker_path": "p"},
    },
}
"""What tinker-cookbook calls in training, and how."""


@pytest.mark.parametrize(("mine", "theirs"), CLIENTS, ids=lambda kind: kind.__name__)
def test_both_take_the_calls_that_the_cookbook_makes(mine, theirs):
    for name, arguments in CALLS[mine.__name__].items():
        for kind in (mine, theirs):
            for form in (name, f"{name}_async"):
                if method := getattr(kind, form, None):
                    inspect.signature(method).bind(None, **arguments)
        assert hasattr(mine, f"{name}_async") == hasattr(theirs, f"{name}_async"), name


@pytest.fixture
def outputs(service):
    """One of everything that our clients return."""
    trainer = service.create_lora_training_client("tiny", rank=2, user_metadata={"k": "v"})
    datum = types.Datum(
        types.ModelInput.from_ints([5, 6, 7]),
        {"target_tokens": [6, 7, 8], "weights": [0.0, 1.0, 1.0]},
    )
    params = types.SamplingParams(max_tokens=4, stop=[])
    sampler = trainer.save_weights_and_get_sampling_client()
    state = trainer.save_state("s").result()
    rest = service.create_rest_client()
    return {
        "datum": datum,
        "train": trainer.forward_backward([datum], "cross_entropy").result(),
        "optim": trainer.optim_step(types.AdamParams()).result(),
        "sample": sampler.sample(types.ModelInput.from_ints([5]), 2, params).result(),
        "state": state,
        "sampler": trainer.save_weights_for_sampler("s").result(),
        "info": trainer.get_info(),
        "run": rest.get_training_run_by_tinker_path(state.path).result(),
        "capabilities": service.get_server_capabilities(),
    }


def test_what_is_returned_has_the_sdks_types(outputs):
    kinds = {
        "train": types.ForwardBackwardOutput,
        "optim": types.OptimStepResponse,
        "sample": types.SampleResponse,
        "state": types.SaveWeightsResponse,
        "sampler": types.SaveWeightsForSamplerResponse,
        "info": types.GetInfoResponse,
        "run": types.TrainingRun,
        "capabilities": types.GetServerCapabilitiesResponse,
    }
    assert {name: type(outputs[name]) for name in kinds} == kinds


@pytest.mark.parametrize("name", ["optim", "state", "sampler", "info", "run", "capabilities"])
def test_json_answers_survive_the_sdks_models(outputs, name):
    value = outputs[name]
    assert type(value).model_validate_json(value.model_dump_json()) == value


def test_a_sample_survives_the_sdks_wire_format(outputs):
    answer = outputs["sample"]
    message = wire.SampleResponse(
        sequences=[
            wire.SampledSequence(
                stop_reason=wire.STOP_REASON_LENGTH,
                tokens=s.tokens_np.tobytes(),
                logprobs=s.logprobs_np.tobytes(),
            )
            for s in answer.sequences
        ]
    )
    back = response_conv.deserialize_sample_response(message.SerializeToString())
    for ours_, theirs in zip(answer.sequences, back.sequences, strict=True):
        assert dataclasses.replace(theirs, sequence_id=ours_.sequence_id).stop_reason == "length"
        assert (ours_.tokens, ours_.logprobs) == (theirs.tokens, theirs.logprobs)
        assert ours_.tokens_np.dtype == theirs.tokens_np.dtype
        assert ours_.logprobs_np.dtype == theirs.logprobs_np.dtype


def test_training_output_has_the_form_that_the_sdk_decodes(outputs):
    answer, datum = outputs["train"], outputs["datum"]
    (record,) = answer.loss_fn_outputs
    assert answer.loss_fn_output_type == "ArrayRecord"
    assert isinstance(record["logprobs"], types.TensorData)
    assert (record["logprobs"].dtype, record["logprobs"].shape) == ("float32", [3])
    weights = datum.loss_fn_inputs["weights"].to_numpy()
    loss = -(record["logprobs"].to_numpy() * weights).sum()
    assert answer.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5)  # fp32 sums


def test_training_output_survives_the_sdks_wire_format(outputs):
    answer = outputs["train"]
    rows = [record["logprobs"].to_numpy() for record in answer.loss_fn_outputs]
    ends = np.cumsum([0, *(row.nbytes for row in rows)], dtype=np.int64)
    tensor = wire.BatchedTensor(
        data=b"".join(row.tobytes() for row in rows),
        offsets=ends.tobytes(),
        dtype=wire.DTYPE_FLOAT32,
    )
    message = wire.ForwardBackwardOutput(
        loss_fn_output_type=answer.loss_fn_output_type,
        loss_fn_outputs=[wire.ArrayRecord(fields={"logprobs": tensor}, num_datums=len(rows))],
        metrics=answer.metrics,
    )
    back = response_conv.deserialize_forward_backward_output(message.SerializeToString())
    assert back.loss_fn_output_type == answer.loss_fn_output_type
    assert back.metrics == answer.metrics
    for ours_, theirs in zip(answer.loss_fn_outputs, back.loss_fn_outputs, strict=True):
        assert ours_["logprobs"].to_numpy().tolist() == theirs["logprobs"].to_numpy().tolist()
        assert ours_["logprobs"].shape == theirs["logprobs"].shape
        assert ours_["logprobs"].dtype == theirs["logprobs"].dtype


def test_the_sdk_can_send_the_data_that_we_take(outputs):
    request = types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(
            data=[outputs["datum"]], loss_fn="cross_entropy"
        ),
        model_id="m",
        seq_id=1,
    )
    sent = request_conv.forward_backward_request_to_proto(request)
    (datum,) = sent.data
    assert set(datum.loss_fn_inputs) == {"target_tokens", "weights"}


def test_futures_are_the_sdks_and_work_in_both_worlds(service):
    sampler = service.create_sampling_client(base_model="tiny")
    params = types.SamplingParams(max_tokens=2, seed=1, stop=[])
    future = sampler.sample(types.ModelInput.from_ints([5]), 1, params)
    assert isinstance(future, APIFuture)

    async def wait() -> list:
        return [await future, await future.result_async()]

    first, second = asyncio.run(wait())
    assert first is second is future.result(timeout=1) is future.future().result()


def test_created_clients_may_be_used_awaited_or_asked_for(service):
    """SDK 0.38 hands out futures of clients where older callers take the client itself."""
    trainer = service.create_lora_training_client("tiny", rank=2)
    assert trainer.result() is trainer

    async def wait():
        return await trainer, await trainer.result_async()

    assert asyncio.run(wait()) == (trainer, trainer)


def test_errors_are_of_the_sdks_family(service):
    with pytest.raises(tinker.APIStatusError) as caught:
        service.create_sampling_client(model_path="tinker://run-0000/sampler_weights/x")
    assert isinstance(caught.value, tinker.TinkerError)
    assert caught.value.status_code == caught.value.response.status_code == 404


def test_the_seam_covers_the_cookbooks_loop_and_nothing_else(service):
    from tinker_cookbook.rl import train

    real_client = tinker.ServiceClient
    with serve(service):
        assert train.tinker.ServiceClient(base_url=None, user_metadata={}) is service
        assert train.tinker.AdamParams is tinker.AdamParams
        assert tinker.ServiceClient is real_client
    assert train.tinker is tinker
