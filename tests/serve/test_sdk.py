"""The real tinker SDK against the real server: the same results as in process, and its errors."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
import tinker
from served import KEY, serving
from tinker import types

from metatrainer.engine import Engine
from metatrainer.tinker import client as ours

PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([5, 6, 7]),
    loss_fn_inputs={"target_tokens": [6, 7, 8], "weights": [1.0, 0.5, 1.0]},
)
SAMPLING = types.SamplingParams(max_tokens=6, seed=3)


@pytest.fixture(scope="module")
def service(url: str):
    with tinker.ServiceClient(base_url=url, api_key=KEY) as service:
        yield service


def step(client: Any, times: int = 1) -> list[float]:
    """Losses of some updates, asked for before any is answered."""
    asked = []
    for _ in range(times):
        asked.append(client.forward_backward([DATUM, DATUM], "cross_entropy"))
        client.optim_step(types.AdamParams(learning_rate=1e-2))
    return [each.result().metrics["loss:sum"] for each in asked]


def logprobs(sampler: Any) -> list[float | None]:
    return sampler.compute_logprobs(PROMPT).result()


def test_what_is_trained_and_sampled_is_what_it_is_in_process(service, folder, tmp_path):
    """Two adapters on each of two models, at the same time."""
    inside = ours.ServiceClient(tmp_path, lambda name: Engine(Path(name)))
    for model in ("first", "second"):
        base = str(folder / model)
        there = [service.create_lora_training_client(base, rank=4, seed=s).result() for s in (1, 2)]
        here = [inside.create_lora_training_client(base, rank=4, seed=s) for s in (1, 2)]
        for remote, local in zip(there, here):
            assert step(remote, 3) == pytest.approx(step(local, 3), abs=1e-5)
            a = remote.save_weights_and_get_sampling_client().result()
            b = local.save_weights_and_get_sampling_client()
            assert logprobs(a) == pytest.approx(logprobs(b), abs=1e-5)
            drawn = a.sample(PROMPT, 3, SAMPLING, include_prompt_logprobs=True).result()
            expected = b.sample(PROMPT, 3, SAMPLING, include_prompt_logprobs=True).result()
            assert [s.tokens for s in drawn.sequences] == [s.tokens for s in expected.sequences]
            assert drawn.prompt_logprobs == pytest.approx(expected.prompt_logprobs, abs=1e-5)
            assert drawn.prompt_logprobs[0] is None and drawn.sequences[0].sequence_id
        assert there[0].get_info().lora_rank == 4
    inside.close()


def test_training_goes_on_bit_for_bit_from_a_saved_state(service, folder):
    client = service.create_lora_training_client(str(folder / "first"), rank=4, seed=1).result()
    step(client, 2)
    path = client.save_state("half").result().path
    expected = step(client, 3)
    again = service.create_training_client_from_state_with_optimizer(path).result()
    assert step(again, 3) == expected
    weights = service.create_training_client_from_state(path).result()
    fresh = step(weights, 3)
    assert fresh[0] == expected[0] and fresh[1:] != expected[1:]
    saved = client.save_weights_for_sampler("end").result().path
    sampler = service.create_sampling_client(model_path=saved).result()
    assert logprobs(sampler) == logprobs(again.save_weights_and_get_sampling_client().result())


def test_what_was_saved_is_listed_and_deleted(url, service, folder):
    client = service.create_lora_training_client(str(folder / "first"), rank=2).result()
    path = client.save_state("one").result().path
    client.save_weights_for_sampler("two").result()
    rest = tinker.RestClient(base_url=url, api_key=KEY)
    run = rest.get_training_run_by_tinker_path(path).result()
    assert (run.base_model, run.lora_rank) == (str(folder / "first"), 2)
    listed = rest.list_checkpoints(run.training_run_id).result().checkpoints
    assert [c.checkpoint_id for c in listed] == ["weights/one", "sampler_weights/two"]
    assert rest.list_checkpoints(client.model_id).result().checkpoints == listed
    assert rest.get_weights_info_by_tinker_path(path).result().lora_rank == 2
    page = rest.list_training_runs(limit=1).result()
    assert page.training_runs == [run] and page.cursor.total_count >= 1
    rest.delete_checkpoint_from_tinker_path(path).result()
    assert len(rest.list_checkpoints(run.training_run_id).result().checkpoints) == 1
    with pytest.raises(tinker.NotFoundError, match="no checkpoint"):
        rest.get_weights_info_by_tinker_path(path).result()
    known = rest.get_server_capabilities().result().supported_models
    assert [model.model_name for model in known] == [str(folder / m) for m in ("first", "second")]


def test_what_cannot_be_done_is_said(service, folder):
    with pytest.raises(tinker.APIStatusError, match="'other' is not served here; served: "):
        service.create_lora_training_client("other").result()
    client = service.create_lora_training_client(str(folder / "first"), rank=2).result()
    with pytest.raises(tinker.RequestFailedError, match="needs loss_fn_inputs"):
        client.forward_backward([DATUM], "importance_sampling").result()
    with pytest.raises(tinker.APIStatusError, match="not supported"):
        client.forward_backward([DATUM], "dro").result()
    far = types.ModelInput.from_ints([5, 100_000])
    sampler = client.save_weights_and_get_sampling_client().result()
    with pytest.raises(tinker.RequestFailedError, match="token 100000 is outside"):
        sampler.sample(far, 1, SAMPLING).result()
    assert len(sampler.sample(PROMPT, 1, SAMPLING).result().sequences) == 1
    with pytest.raises(tinker.APIStatusError, match="topk_prompt_logprobs is not supported"):
        sampler.sample(PROMPT, 1, SAMPLING, topk_prompt_logprobs=2).result()


def test_only_the_key_opens(url):
    for key in ("tml-other", "tml-of-the-tesu"):
        with pytest.raises(tinker.AuthenticationError, match="TINKER_API_KEY"):
            tinker.RestClient(base_url=url, api_key=key).get_server_capabilities().result()
    assert httpx.get(f"{url}/api/v1/healthz").status_code == 401
    answer = httpx.get(f"{url}/api/v1/healthz", headers={"X-API-Key": KEY})
    assert answer.json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        ("create_session", b"{", {}, 422),
        ("create_session", b"{}", {}, 422),
        ("create_model", b'{"session_id": 3}', {}, 422),
        ("session_heartbeat", b'{"session_id": "gone"}', {}, 410),
        ("retrieve_future", b'{"request_id": "gone"}', {}, 410),
        ("get_info", b'{"model_id": "gone"}', {}, 404),
        ("forward_backward", b"\xff\xff\xff", {}, 400),
        ("forward_backward", b"not zstd", {"Content-Encoding": "zstd"}, 400),
        ("nothing", b"", {}, 404),
    ],
)
def test_malformed_requests_are_refused_and_harm_nothing(url, path, body, headers, status):
    at = f"{url}/api/v1/{path}"
    answer = httpx.post(at, content=body, headers={"X-API-Key": KEY, **headers})
    assert answer.status_code == status, answer.text
    assert httpx.get(f"{url}/api/v1/healthz", headers={"X-API-Key": KEY}).status_code == 200


def test_too_much_is_refused_packed_or_not(url):
    import zstandard

    at, key = f"{url}/api/v1/forward_backward", {"X-API-Key": KEY}
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (65 << 20))
    assert len(bomb) < 100_000
    packed = httpx.post(at, content=bomb, headers={**key, "Content-Encoding": "zstd"})
    assert (packed.status_code, "at most" in packed.text) == (400, True)


def test_a_request_sent_twice_is_done_once(url, folder):
    """As the SDK does when the answer to the first got lost."""
    headers = {"X-API-Key": KEY}
    with httpx.Client(base_url=f"{url}/api/v1/", headers=headers, timeout=30) as http:

        def post(path: str, **body: Any) -> dict[str, Any]:
            return http.post(path, json=body).raise_for_status().json()

        session = post("create_session", tags=[], user_metadata={}, sdk_version="x")["session_id"]
        asked = {"session_id": session, "model_seq_id": 0, "base_model": str(folder / "first")}
        made = [post("create_model", **asked, lora_config={"rank": 2}) for _ in range(2)]
        assert made[0] == made[1]
        model = post("retrieve_future", request_id=made[0]["request_id"])["model_id"]
        steps = [
            post("optim_step", model_id=model, seq_id=n, adam_params={"learning_rate": 0.1})
            for n in (1, 1, 2)
        ]
        assert steps[0] == steps[1] != steps[2]


def test_a_killed_client_leaves_the_server_to_others(url, folder):
    code = f"""
        import os, tinker
        from tinker import types
        service = tinker.ServiceClient(base_url={url!r}, api_key={KEY!r})
        sampler = service.create_sampling_client(base_model={str(folder / "first")!r}).result()
        for _ in range(50):
            sampler.sample(types.ModelInput.from_ints([5]), 8, types.SamplingParams(max_tokens=200))
        print("asked", flush=True)
        os.kill(os.getpid(), 9)
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert (killed.returncode, killed.stdout) == (-9, "asked\n")
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    sampler = service.create_sampling_client(base_model=str(folder / "first")).result()
    began = time.monotonic()
    assert len(sampler.sample(PROMPT, 2, SAMPLING).result().sequences) == 2
    assert time.monotonic() - began < 60  # what the dead one had asked for is done first


def test_without_a_key_only_this_machine_is_served(folder):
    from typer.testing import CliRunner

    from metatrainer.cli.app import app
    from metatrainer.errors import ConfigError

    def run(*more: str) -> None:
        model = ["serve", "--model", str(folder / "first"), *more]
        CliRunner().invoke(app, model, catch_exceptions=False)

    with pytest.raises(ConfigError, match="can be reached from other machines"):
        run("--host", "0.0.0.0")
    with pytest.raises(ConfigError, match="begin with tml-"):
        run("--api-key", "secret")
    with pytest.raises(ConfigError, match="unknown student 'nano-wran'"):
        run("--model", "nano-wran")
    with serving(folder) as url:
        tinker.ServiceClient(base_url=url, api_key="tml-any").create_sampling_client(
            base_model=str(folder / "first")
        ).result()
        with pytest.raises(ConfigError, match="cannot listen"):
            run("--port", url.rpartition(":")[2])
