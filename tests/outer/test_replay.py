"""The record: a turn is sampled once, whatever service is behind, and comes back as it was."""

from __future__ import annotations

import asyncio
import json

import pytest
import tinker
from tinker import types
from tinker.lib.public_interfaces.api_future import AwaitableConcurrentFuture

from metatrainer.errors import LedgerError
from metatrainer.ledger import Ledger
from metatrainer.outer.replay import Recorder, RecordingSampler, RecordingService, now_playing

PROMPT = types.ModelInput.from_ints([1, 2, 3])
PARAMS = types.SamplingParams(max_tokens=5, temperature=0.7, stop=[9])
EPISODE = "train-000-00-00"


class Sampler:
    """Answers with the seed and counts."""

    def __init__(self):
        self.asked: list[types.SamplingParams] = []

    async def sample_async(self, prompt, num_samples, sampling_params):
        self.asked.append(sampling_params)
        n = len(self.asked)
        sequence = types.SampledSequence(
            stop_reason="length" if n % 2 else "stop",
            sequence_id=f"s{n}",
            _tokens_list=[n, n + 1],
            # 0.1 is not a 32-bit float: the record has to keep all of it
            _logprobs_list=[-0.1 * n, -2.0],
        )
        return types.SampleResponse(sequences=[sequence])

    def get_tokenizer(self):
        return "its own"


@pytest.fixture
def ledger(tmp_path):
    with Ledger(tmp_path / "ledger.db") as ledger:
        ledger.add_task("t", "f", "train", "{}")
        for index in range(3):
            ledger.open_episode(f"train-000-00-{index:02d}", "train", 0, 0, index, "t")
        yield ledger


def recorder(ledger: Ledger, seed: int = 0) -> Recorder:
    return Recorder(ledger, seed, lambda tokens: " ".join(map(str, tokens)))


async def turns(sampler: RecordingSampler, episode: str | None, n: int, prompt=PROMPT):
    if episode:
        now_playing(episode)
    return [await sampler.sample_async(prompt, 1, PARAMS) for _ in range(n)]


def said(responses) -> list:
    return [(s.tokens, s.logprobs, s.stop_reason) for r in responses for s in r.sequences]


def test_a_recorded_turn_is_not_sampled_again_and_the_next_one_is(ledger):
    first = asyncio.run(turns(RecordingSampler(Sampler(), recorder(ledger)), EPISODE, 2))
    inner = Sampler()
    again = asyncio.run(turns(RecordingSampler(inner, recorder(ledger)), EPISODE, 3))
    assert said(again)[:2] == said(first)
    assert len(inner.asked) == 1


def test_the_record_can_be_read(ledger):
    asyncio.run(turns(RecordingSampler(Sampler(), recorder(ledger)), EPISODE, 1))
    (row,) = ledger.turns(EPISODE)
    assert (row.turn, row.prompt_tokens, row.tokens) == (0, 3, [1, 2])
    assert json.loads(row.message) == {
        "role": "assistant",
        "content": "1 2",
        "stop_reason": "length",
    }


def test_seeds_depend_on_run_episode_and_turn_and_on_nothing_else(ledger, tmp_path):
    def seeds(seed: int, episode: str, folder: str) -> list:
        with Ledger(tmp_path / folder / "ledger.db") as other:
            other.add_task("t", "f", "train", "{}")
            other.open_episode(episode, "train", 0, 0, 0, "t")
            inner = Sampler()
            asyncio.run(turns(RecordingSampler(inner, recorder(other, seed)), episode, 2))
        assert all(p.temperature == 0.7 and p.max_tokens == 5 for p in inner.asked)
        return [p.seed for p in inner.asked]

    base = seeds(1, EPISODE, "a")
    assert base == seeds(1, EPISODE, "b")
    others = [*seeds(2, EPISODE, "c"), *seeds(1, "train-000-00-01", "d")]
    assert len({*base, *others}) == 6


def test_episodes_that_are_played_together_are_told_apart(ledger):
    sampler = RecordingSampler(Sampler(), recorder(ledger))

    async def together():
        names = [f"train-000-00-{i:02d}" for i in range(3)]
        await asyncio.gather(*(turns(sampler, name, 2) for name in names))

    asyncio.run(together())
    for index in range(3):
        assert [r.turn for r in ledger.turns(f"train-000-00-{index:02d}")] == [0, 1]


def test_a_sample_is_on_disk_before_the_episode_sees_it(ledger):
    async def one_turn():
        await turns(RecordingSampler(Sampler(), recorder(ledger)), EPISODE, 1)
        with Ledger(ledger.path, readonly=True) as other:
            return len(other.turns(EPISODE))

    assert asyncio.run(one_turn()) == 1


def test_a_sample_that_cannot_be_written_down_stops_all_that_wait(ledger):
    sampler = RecordingSampler(Sampler(), recorder(ledger))

    async def unknown_episodes():
        both = (turns(sampler, f"train-999-00-{i:02d}", 1) for i in range(2))
        return await asyncio.gather(*both, return_exceptions=True)

    failures = asyncio.run(unknown_episodes())
    assert [type(failure) for failure in failures] == [LedgerError, LedgerError]


def test_outside_of_an_episode_nothing_is_recorded(ledger):
    inner = Sampler()
    asyncio.run(turns(RecordingSampler(inner, recorder(ledger)), None, 2))
    assert inner.asked == [PARAMS, PARAMS]
    assert ledger.turns(EPISODE) == []


def test_a_record_of_another_prompt_is_refused(ledger):
    asyncio.run(turns(RecordingSampler(Sampler(), recorder(ledger)), EPISODE, 1))
    longer = types.ModelInput.from_ints([1, 2, 3, 4])
    with pytest.raises(LedgerError, match="sampled after 3 tokens, now there are 4"):
        asyncio.run(turns(RecordingSampler(Sampler(), recorder(ledger)), EPISODE, 1, longer))


def test_a_sampler_that_is_still_a_future_is_waited_for(ledger):
    """SDK 0.38 returns one from create_sampling_client, which the cookbook uses as a client."""
    from concurrent.futures import Future

    pending: Future = Future()
    pending.set_result(Sampler())
    sampler = RecordingSampler(AwaitableConcurrentFuture(pending), recorder(ledger))
    assert len(asyncio.run(turns(sampler, EPISODE, 2))) == 2


class Service:
    """The part of a service that the cookbook's loop uses."""

    def __init__(self):
        self.sampler = Sampler()

    async def create_lora_training_client_async(self, base_model, rank=32):
        return self

    async def create_training_client_from_state_with_optimizer_async(self, path):
        return self

    async def create_sampling_client_async(self, base_model=None):
        return self.sampler

    async def save_weights_and_get_sampling_client_async(self):
        return self.sampler

    def create_sampling_client(self, model_path):
        return self.sampler

    def create_rest_client(self):
        return "rest"


def test_every_sampler_of_a_service_records(ledger):
    service = RecordingService(Service(), recorder(ledger))

    async def all_samplers():
        for trainer in (
            await service.create_lora_training_client_async("m", rank=2),
            await service.create_training_client_from_state_with_optimizer_async("p"),
        ):
            yield await trainer.save_weights_and_get_sampling_client_async()
            yield trainer.create_sampling_client("p")
        yield await service.create_sampling_client_async(base_model="m")

    async def check():
        return [isinstance(s, RecordingSampler) async for s in all_samplers()]

    assert asyncio.run(check()) == [True] * 5
    assert service.create_rest_client() == "rest"


def test_what_is_wrapped_exists_in_the_sdk():
    for kind, names in (
        (
            tinker.ServiceClient,
            (
                "create_lora_training_client_async",
                "create_training_client_from_state_with_optimizer_async",
                "create_sampling_client_async",
            ),
        ),
        (
            tinker.TrainingClient,
            ("save_weights_and_get_sampling_client_async", "create_sampling_client"),
        ),
        (tinker.SamplingClient, ("sample_async",)),
    ):
        assert all(hasattr(kind, name) for name in names)
