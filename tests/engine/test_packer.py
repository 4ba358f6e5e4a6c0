"""Packed against alone: the same work with neighbours gives what it gives without them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from metatrainer.engine import AdamParams, Engine, Packer, SamplingParams, TrainRow, Update
from metatrainer.engine import packer as packing
from metatrainer.engine import project as projecting
from metatrainer.errors import ConfigError, MetatrainerError
from tests.engine.test_engine import TOLERANCE, moved, prompts, train_rows

RANKS = (4, 2, 8)


@pytest.fixture(params=["merged", "low rank"])
def engine(request, reference, monkeypatch):
    """An engine of either kind of projection."""
    if request.param == "low rank":
        monkeypatch.setattr(projecting, "MERGE_BELOW", 0)
    return Engine(reference[0])


@pytest.fixture
def packer(engine):
    packer = Packer(engine)
    yield packer
    packer.close()


def job(engine, seed, steps=3):
    """A job in small: sample, feed, sample, train; of its own shape. Returns all that came of it.

    engine: an Engine or a Lane.
    """
    adapter = engine.create_adapter(RANKS[seed % 3], alpha=8, seed=seed)
    said = []
    params = SamplingParams(6 + seed, temperature=0.7 + 0.1 * seed, top_k=20, stop=(7, 8))
    for step in range(steps):
        start = prompts(2 + seed, seed=100 * seed + step)
        start[1] = start[0]
        decoder = engine.decoder(adapter, [1000 * seed + 10 * step + i for i in range(len(start))])
        engine.feed(decoder, start)
        samples = engine.sample_turn(decoder, params)
        engine.feed(decoder, [[1, 2, 3]] * len(start))
        again = engine.sample_turn(decoder, params)
        said += [s.tokens for s in (*samples, *again)]
        rows = [_row(p, s, (-1.0) ** i) for i, (p, s) in enumerate(zip(start, samples))]
        adam = AdamParams(0.01 * (seed + 1), grad_clip_norm=1.0)
        engine.update(rows, adapter, "importance_sampling", adam)
    return adapter, said


def _row(prompt, sample, advantage):
    whole = prompt + sample.tokens
    blank = [0.0] * (len(prompt) - 1)
    return TrainRow(
        whole[:-1],
        whole[1:],
        old_logprobs=blank + sample.logprobs,
        advantages=blank + [advantage] * len(sample.tokens),
    )


def test_a_job_is_the_same_packed_and_alone(packer, engine, reference):
    """Same tokens; parameters within what the order of summation moves them by through Adam."""
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda seed: job(packer.lane(), seed), range(4)))
    for seed, (adapter, said) in enumerate(together):
        apart = Engine(reference[0])
        own, alone = job(apart, seed)
        assert said == alone
        moved_by = (engine._get(adapter).flat - apart._get(own).flat).abs()
        # Adam moves a parameter whose gradient is near zero by up to lr whatever its size.
        assert moved_by.mean() < 1e-4 * (seed + 1)


def test_work_is_really_shared(packer, engine, monkeypatch):
    """With four jobs at once, passes hold the work of several of them."""
    sizes = []
    real = engine.advance
    monkeypatch.setattr(engine, "advance", lambda works: (sizes.append(len(works)), real(works)))
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda seed: job(packer.lane(), seed), range(4)))
    assert max(sizes) >= 3


def test_jobs_that_were_answered_together_go_on_together(packer, engine, monkeypatch):
    """Who comes first waits for the others, so that none trains alone."""
    monkeypatch.setattr(packing, "_PATIENCE", 1e4)
    lanes = [packer.lane() for _ in range(4)]
    adapters = [lane.create_adapter(4, seed=i) for i, lane in enumerate(lanes)]
    sizes = []
    real = engine.forward_backward_many
    counted = lambda updates: (sizes.append(len(updates)), real(updates))[1]  # noqa: E731
    monkeypatch.setattr(engine, "forward_backward_many", counted)

    def train(i):
        for _ in range(100):
            time.sleep(0.005 * i)
            lanes[i].update(train_rows(2), adapters[i], "cross_entropy", AdamParams(0.01))
            if sizes.count(4) == 3:  # after a pass of all, so that none waits for one that ended
                return

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(train, range(4)))
    assert len(sizes) < 10


def test_two_ways_of_projecting_agree(reference, monkeypatch):
    """Three adapters of other ranks and the base in one batch: losses, gradients and samples."""
    found = []
    for limit in (projecting.MERGE_BELOW, 0):
        monkeypatch.setattr(projecting, "MERGE_BELOW", limit)
        engine = Engine(reference[0])
        adapters = [engine.create_adapter(rank, alpha=2 * rank, seed=rank) for rank in RANKS]
        for adapter in adapters:
            with torch.no_grad():
                for _, b in engine._get(adapter).pairs.values():
                    b.normal_(0, 0.2, generator=torch.Generator().manual_seed(adapter))
        updates = [
            Update(train_rows(n), adapter, "importance_sampling")
            for n, adapter in zip((5, 3, 4), adapters)
        ]
        outputs = engine.forward_backward_many(updates)
        gradients = [engine._get(a).grad.clone() for a in adapters]
        found.append((outputs, gradients))
    for one, two in zip(found[0][0], found[1][0]):
        assert one.loss == pytest.approx(two.loss, rel=1e-4)
        for a, b in zip(one.logprobs, two.logprobs):
            assert a == pytest.approx(b, abs=TOLERANCE)
    for one, two in zip(found[0][1], found[1][1]):
        assert (one - two).norm() < 1e-4 * two.norm()


def test_updates_in_one_pass_equal_updates_apart(engine):
    adapters = [moved(engine, seed) for seed in (1, 2, 3)]
    updates = [
        Update(train_rows(4), adapters[0], "cross_entropy"),
        Update(train_rows(5), adapters[1], "importance_sampling"),
        Update(train_rows(2), adapters[2], "cross_entropy"),
    ]
    together = engine.forward_backward_many(updates)
    grads = [engine._get(a).grad.clone() for a in adapters]
    for update, output, grad in zip(updates, together, grads):
        engine.clear_gradient(update.adapter)
        alone = engine.forward_backward(update.rows, update.adapter, update.loss_fn)
        assert alone.loss == pytest.approx(output.loss, rel=1e-4)
        assert (engine._get(update.adapter).grad - grad).norm() < 1e-4 * grad.norm()


def test_a_job_of_nans_harms_no_other(packer, engine, reference):
    def poisoned(lane):
        adapter = lane.create_adapter(4, seed=9)
        with torch.no_grad():
            engine._get(adapter).flat.fill_(float("nan"))
        engine._get(adapter).version += 1
        for step in range(3):
            decoder = lane.decoder(adapter, [1, 2, 3])
            lane.feed(decoder, prompts(3, seed=step))
            samples = lane.sample_turn(decoder, SamplingParams(5))
            rows = [_row(p, s, 1.0) for p, s in zip(prompts(3, seed=step), samples)]
            output, _ = lane.update(rows, adapter, "importance_sampling", AdamParams(0.1))
        return output.loss

    with ThreadPoolExecutor(3) as threads:
        bad = threads.submit(poisoned, packer.lane())
        good = [threads.submit(job, packer.lane(), seed) for seed in (1, 2)]
        assert bad.result() != bad.result()  # it is not a number
        for seed, future in zip((1, 2), good):
            adapter, said = future.result()
            assert said == job(Engine(reference[0]), seed)[1]
            assert engine._get(adapter).flat.isfinite().all()


def test_a_job_that_fails_is_the_only_one_to_hear_of_it(packer, engine):
    def broken(lane):
        adapter = lane.create_adapter(4)
        decoder = lane.decoder(adapter, [1])
        lane.feed(decoder, [[1, 2, 3]])
        engine.delete_adapter(adapter)
        lane.sample_turn(decoder, SamplingParams(20))

    def wrong_loss(lane):
        lane.update(train_rows(2), lane.create_adapter(4), "no_such_loss", AdamParams(0.1))

    with ThreadPoolExecutor(4) as threads:
        bad = [threads.submit(each, packer.lane()) for each in (broken, wrong_loss)]
        good = [threads.submit(job, packer.lane(), seed) for seed in (1, 2)]
        for future, says in zip(bad, ("no adapter", "no_such_loss")):
            with pytest.raises(ConfigError, match=says):
                future.result()
        assert all(future.result() for future in good)


def raises_as_on_a_gpu():
    raise torch.OutOfMemoryError("no memory")


@pytest.mark.parametrize("fail", [raises_as_on_a_gpu, lambda: torch.empty(1 << 50)])
def test_out_of_memory_means_smaller_batches_and_the_same_gradient(engine, monkeypatch, fail):
    adapter = moved(engine)
    rows = train_rows(8)
    whole = engine.forward_backward(rows, adapter, "cross_entropy")
    expected = engine._get(adapter).grad.clone()
    engine.clear_gradient(adapter)
    real = engine._losses

    def tight(batch, members):
        if len(members) > 3:
            fail()
        return real(batch, members)

    monkeypatch.setattr(engine, "_losses", tight)
    with pytest.warns(UserWarning, match="out of memory"):
        again = engine.forward_backward(rows, adapter, "cross_entropy")
    assert engine._budget < 8 * max(len(row.tokens) for row in rows)
    assert again.loss == pytest.approx(whole.loss, rel=1e-4)
    assert (engine._get(adapter).grad - expected).norm() < 1e-4 * expected.norm()


def test_waiting_for_others_does_not_count(packer, engine):
    """A job's clock stands still while the engine works for somebody else."""
    lane, busy = packer.lane(), packer.lane()
    began, wall = lane.clock(), time.monotonic()
    slow = threading.Thread(target=lambda: busy.call(lambda _: time.sleep(0.5)))
    slow.start()
    time.sleep(0.1)
    lane.create_adapter(2)
    slow.join()
    assert time.monotonic() - wall > 0.45
    assert lane.clock() - began < 0.3
    assert busy.charged >= 0.5


def test_closing_tells_those_who_wait(engine):
    packer = Packer(engine)
    lane = packer.lane()
    decoder = lane.decoder(None, [1])
    packer.close()
    with pytest.raises(MetatrainerError, match="closed"):
        lane.feed(decoder, [[1]])
