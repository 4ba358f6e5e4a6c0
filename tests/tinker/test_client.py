"""The in-process clients: batches, exact checkpoints, isolation, errors."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
import tinker
from tinker import types

from metatrainer.engine import Engine
from metatrainer.errors import ConfigError, MetatrainerError
from metatrainer.tinker.client import ServiceClient

PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
PARAMS = types.SamplingParams(max_tokens=6, temperature=1.0, seed=3, stop=[])
ADAM = types.AdamParams(learning_rate=0.05, eps=1e-8)


def seeded(seed: int) -> types.SamplingParams:
    return PARAMS.model_copy(update={"seed": seed})


def datum(advantage: float = 1.0) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([5, 6, 7, 8]),
        loss_fn_inputs={
            "target_tokens": [6, 7, 8, 9],
            "logprobs": [0.0, 0.0, -2.0, -2.0],
            "advantages": [0.0, 0.0, advantage, advantage],
        },
    )


def train(client, steps: int = 1) -> None:
    for _ in range(steps):
        client.forward_backward([datum()], "importance_sampling").result()
        client.optim_step(ADAM).result()


def logprobs(sampler) -> list[float | None]:
    return sampler.compute_logprobs(types.ModelInput.from_ints([5, 6, 7, 8, 9])).result()


def fresh(service: ServiceClient, **kwargs):
    return service.create_lora_training_client("tiny", rank=4, **kwargs)


class Watched(Engine):
    """An engine that notes the size of every batch and can be held up."""

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.batches: list[int] = []

    def sample(self, requests):
        self.batches.append(len(requests))
        return super().sample(requests)


def watched_service(model_folder: Path, tmp_path: Path) -> tuple[ServiceClient, list[Watched]]:
    opened: list[Watched] = []

    def open_engine(name: str) -> Engine:
        opened.append(Watched(model_folder))
        return opened[-1]

    return ServiceClient(tmp_path, open_engine), opened


def test_samples_that_wait_together_share_a_batch(model_folder, tmp_path):
    service, opened = watched_service(model_folder, tmp_path)
    sampler = service.create_sampling_client(base_model="tiny")
    free = threading.Event()
    sampler._model.worker.call(lambda engine: free.wait(30))

    async def ask() -> list[types.SampleResponse]:
        tasks = [asyncio.create_task(sampler.sample_async(PROMPT, 1, seeded(i))) for i in range(5)]
        await asyncio.sleep(0)
        free.set()
        return await asyncio.gather(*tasks)

    together = asyncio.run(ask())
    assert opened[0].batches == [5]
    alone = [sampler.sample(PROMPT, 1, seeded(i)).result() for i in range(5)]
    assert [r.sequences[0].tokens for r in together] == [r.sequences[0].tokens for r in alone]
    service.close()


def test_samples_of_one_request_differ_and_repeat_with_the_seed(service):
    sampler = service.create_sampling_client(base_model="tiny")
    first, second = (sampler.sample(PROMPT, 4, PARAMS).result() for _ in range(2))
    tokens = [s.tokens for s in first.sequences]
    assert tokens == [s.tokens for s in second.sequences]
    assert len({tuple(t) for t in tokens}) > 1
    assert len({s.sequence_id for s in (*first.sequences, *second.sequences)}) == 8


def test_sampled_logprobs_are_those_of_the_model(service):
    sampler = service.create_sampling_client(base_model="tiny")
    sequence = sampler.sample(PROMPT, 1, PARAMS).result().sequences[0]
    whole = types.ModelInput.from_ints([*PROMPT.to_ints(), *sequence.tokens])
    scored = sampler.compute_logprobs(whole).result()
    # fp32, decoding step by step against one pass over the whole sequence
    assert scored[PROMPT.length :] == pytest.approx(sequence.logprobs, abs=1e-4)


def test_a_bad_request_fails_alone(service):
    sampler = service.create_sampling_client(base_model="tiny")
    free = threading.Event()
    sampler._model.worker.call(lambda engine: free.wait(30))
    long = types.ModelInput.from_ints([1] * 600)
    good, bad = sampler.sample(PROMPT, 1, PARAMS), sampler.sample(long, 1, PARAMS)
    free.set()
    assert len(good.result().sequences[0].tokens) == 6
    with pytest.raises(tinker.BadRequestError, match="600 tokens"):
        bad.result()


def test_a_sample_that_nobody_waits_for_any_more_is_not_drawn(model_folder, tmp_path, caplog):
    service, opened = watched_service(model_folder, tmp_path)
    sampler = service.create_sampling_client(base_model="tiny")
    free = threading.Event()
    sampler._model.worker.call(lambda engine: free.wait(30))

    async def give_up_on_one():
        first, second = (
            asyncio.ensure_future(sampler.sample_async(PROMPT, 1, PARAMS)) for _ in range(2)
        )
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        free.set()
        return await second

    asyncio.run(give_up_on_one())
    service.close()
    assert opened[0].batches == [1]
    assert caplog.records == []


def test_max_tokens_past_the_context_end_there(service):
    sampler = service.create_sampling_client(base_model="tiny")
    prompt = types.ModelInput.from_ints([1] * 510)
    sequence = sampler.sample(prompt, 1, PARAMS).result().sequences[0]
    assert (len(sequence.tokens), sequence.stop_reason) == (2, "length")


def test_a_sampler_is_frozen_while_training_goes_on(service):
    client = fresh(service)
    before = client.save_weights_and_get_sampling_client()
    frozen = logprobs(before)
    train(client)
    assert logprobs(before) == frozen
    assert logprobs(client.save_weights_and_get_sampling_client()) != frozen


def test_adapters_do_not_touch_each_other(service):
    base = logprobs(service.create_sampling_client(base_model="tiny"))
    one, other = fresh(service), fresh(service)
    train(one)
    assert logprobs(other.save_weights_and_get_sampling_client()) == base
    assert logprobs(service.create_sampling_client(base_model="tiny")) == base


def test_saved_sampler_weights_are_exact(service):
    client = fresh(service)
    train(client, 2)
    path = client.save_weights_for_sampler("000002").result().path
    assert path == "tinker://run-0000/sampler_weights/000002"
    live = logprobs(client.save_weights_and_get_sampling_client())
    assert logprobs(client.create_sampling_client(path)) == live
    assert logprobs(service.create_sampling_client(model_path=path)) == live


def test_training_goes_on_bit_for_bit_from_a_saved_state(service, model_folder, tmp_path):
    client = fresh(service)
    train(client, 2)
    path = client.save_state("000002").result().path
    train(client, 2)
    straight = logprobs(client.save_weights_and_get_sampling_client())
    service.close()

    again = ServiceClient(tmp_path / "checkpoints", lambda name: Engine(model_folder))
    resumed = again.create_training_client_from_state_with_optimizer(path)
    train(resumed, 2)
    assert logprobs(resumed.save_weights_and_get_sampling_client()) == straight
    without = again.create_training_client_from_state(path)
    train(without, 2)
    assert logprobs(without.save_weights_and_get_sampling_client()) != straight
    assert len({client.model_id, resumed.model_id, without.model_id}) == 3
    again.close()


def test_adapters_of_one_seed_start_alike_and_of_two_do_not(model_folder, tmp_path):
    def trained(root: str, seed: int):
        service = ServiceClient(tmp_path / root, lambda name: Engine(model_folder), seed=seed)
        client = fresh(service)
        train(client)
        return logprobs(client.save_weights_and_get_sampling_client())

    assert trained("a", 1) == trained("b", 1)
    assert trained("a", 1) != trained("c", 2)


def test_forward_gives_the_loss_and_leaves_no_gradient(service):
    client = fresh(service)
    evaluated = client.forward([datum()], "importance_sampling").result()
    trained = client.forward_backward([datum()], "importance_sampling").result()
    assert evaluated.metrics == trained.metrics
    client.optim_step(ADAM).result()
    twice = fresh(service)
    twice.forward([datum()], "importance_sampling").result()
    train(twice)
    one, two = (c.save_weights_and_get_sampling_client() for c in (client, twice))
    assert logprobs(one) == logprobs(two)


def test_a_failed_write_leaves_no_checkpoint(service, monkeypatch):
    client = fresh(service)

    def half(self, adapter, folder):
        folder.mkdir()
        (folder / "weights").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(Engine, "save_state", half)
    with pytest.raises(OSError, match="disk full"):
        client.save_state("000001").result()
    monkeypatch.undo()
    with pytest.raises(tinker.NotFoundError):
        service.create_training_client_from_state("tinker://run-0000/weights/000001")
    assert client.save_state("000001").result().path == "tinker://run-0000/weights/000001"


def test_a_state_is_not_overwritten_unless_asked(service):
    client = fresh(service)
    client.save_state("a").result()
    with pytest.raises(tinker.ConflictError, match="already has weights/a"):
        client.save_state("a").result()
    train(client)
    client.save_state("a", overwrite=True).result()
    loaded = service.create_training_client_from_state("tinker://run-0000/weights/a")
    assert logprobs(loaded.save_weights_and_get_sampling_client()) == logprobs(
        client.save_weights_and_get_sampling_client()
    )


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("tinker://run-0000/weights/gone", tinker.NotFoundError, "there are: tinker://run-0000"),
        ("tinker://run-0000/sampler_weights/a", tinker.BadRequestError, "not a weights path"),
        ("tinker://../weights/a", tinker.BadRequestError, "not a path of this service"),
        ("/some/folder", ValueError, "Invalid tinker path"),
    ],
)
def test_a_wrong_path_is_refused(service, path, error, message):
    client = fresh(service)
    client.save_state("a").result()
    with pytest.raises(error, match=message):
        service.create_training_client_from_state(path)


@pytest.mark.parametrize("loss", ["dro", "nonsense"])
def test_a_loss_that_is_not_there_is_refused(service, loss):
    with pytest.raises(tinker.BadRequestError, match="supported: cross_entropy, importance"):
        fresh(service).forward_backward([datum()], loss)


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
def test_what_a_ratio_is_clipped_to_can_be_set(service, loss):
    """The token's ratio, exp(logprob + 2), lies far from 1: narrow and wide clips must differ."""
    client, found = fresh(service), []
    for low, high in ((0.8, 1.2), (0.0, 1e6)):
        config = {"clip_low_threshold": low, "clip_high_threshold": high}
        output = client.forward([datum(-1.0)], loss, config).result()
        found.append(output.metrics["loss:sum"])
    assert found[0] != pytest.approx(found[1])
    assert client.forward([datum(-1.0)], loss).result().metrics["loss:sum"] == found[0]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"clip": 0.2}, "has no loss_fn_config 'clip'; it has: clip_low_threshold"),
        ({"clip_low_threshold": "low"}, "is a finite number"),
        ({"clip_low_threshold": float("nan")}, "is a finite number"),
    ],
)
def test_a_setting_that_the_loss_does_not_have_is_refused(service, config, says):
    with pytest.raises(tinker.BadRequestError, match=says):
        fresh(service).forward_backward([datum()], "ppo", config)


def test_missing_loss_inputs_are_named(service):
    bare = types.Datum(types.ModelInput.from_ints([5]), {"target_tokens": [6]})
    with pytest.raises(tinker.BadRequestError, match=r"needs loss_fn_inputs \['weights'\]"):
        fresh(service).forward_backward([bare], "cross_entropy").result()


def test_an_engine_that_cannot_open_fails_the_calls(tmp_path):
    service = ServiceClient(tmp_path, lambda name: Engine(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="no config"):
        service.create_sampling_client(base_model="x").sample(PROMPT, 1, PARAMS).result()
    service.close()


def test_a_closed_service_refuses_instead_of_hanging(service):
    sampler = service.create_sampling_client(base_model="tiny")
    service.close()
    with pytest.raises(MetatrainerError, match="closed"):
        sampler.sample(PROMPT, 1, PARAMS)


def test_adapters_of_dropped_clients_are_deleted(model_folder, tmp_path):
    service, opened = watched_service(model_folder, tmp_path)
    client = fresh(service)
    for _ in range(3):
        logprobs(client.save_weights_and_get_sampling_client())
    client.get_tokenizer()  # a call after the deletions, so that they are done
    assert len(opened[0]._adapters) == 1
    service.close()
