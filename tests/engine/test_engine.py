"""The engine against transformers, peft and torch.optim: logits, sampling, gradients, files."""

import copy

import peft
import pytest
import torch
import torch.nn.functional as F

from metatrainer.engine import AdamParams, Engine, SampleRequest, SamplingParams, TrainRow
from metatrainer.engine.files import save_model
from metatrainer.engine.model import Plain, forward
from metatrainer.errors import ConfigError

TOLERANCE = 2e-4  # fp32 over three layers; two orders of summation


@pytest.fixture
def engine(reference):
    return Engine(reference[0])


def prompts(n, seed=0, low=3, high=20):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(low, high, (n,), generator=generator).tolist()
    return [torch.randint(1, 61, (s,), generator=generator).tolist() for s in sizes]


def moved(engine, seed=1, scale=0.2):
    """An adapter that changes the model visibly."""
    adapter = engine.create_adapter(4, alpha=8, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in engine._get(adapter).pairs.values():
            b.copy_(torch.randn(b.shape, generator=generator) * scale)
    engine._get(adapter).version += 1
    return adapter


def test_logits_agree_with_transformers(reference, engine):
    ids = torch.tensor([prompts(1, low=19)[0]])
    hidden, _, _ = forward(engine.config, engine.base, Plain(engine.base), engine.rope, ids)
    ours = F.linear(hidden, engine.base.head)
    theirs = reference[1](ids).logits
    assert (ours - theirs).abs().max() < 1e-3


def test_saved_model_is_loaded_by_transformers(reference, engine, tmp_path):
    from transformers import AutoModelForCausalLM

    save_model(tmp_path, engine.config, engine.base)
    ids = torch.tensor([prompts(1)[0]])
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (again(ids).logits - reference[1](ids).logits).abs().max() < 1e-5


def test_sampled_logprobs_are_the_models_own(engine):
    adapter = moved(engine)
    for who in (None, adapter):
        requests = [
            SampleRequest(p, SamplingParams(12, stop=(7,)), who, seed=i)
            for i, p in enumerate(prompts(9))
        ]
        for request, sample in zip(requests, engine.sample(requests)):
            whole = request.prompt + sample.tokens
            scored = engine.logprobs([whole], who)[0][len(request.prompt) - 1 :]
            assert sample.logprobs == pytest.approx(scored, abs=TOLERANCE)
            assert (sample.tokens[-1] == 7) == (sample.stop_reason == "stop")
            assert len(sample.tokens) <= 12


def test_a_row_does_not_depend_on_its_neighbours(engine):
    adapters = [None, moved(engine, 1), moved(engine, 2)]
    params = SamplingParams(16, stop=(7, 9))
    requests = [
        SampleRequest(p, params, adapters[i % 3], seed=i) for i, p in enumerate(prompts(12, seed=3))
    ]
    together = engine.sample(requests)
    for request, sample in zip(requests, together):
        assert engine.sample([request])[0].tokens == sample.tokens


def test_turns_continue_the_cache(engine):
    """Feeding, sampling and feeding again, with fewer rows, equals one pass over all tokens."""
    adapter = moved(engine)
    start = prompts(6, seed=5)
    decoder = engine.decoder(adapter, seeds=list(range(6)))
    rows = [[*start[0]], [*start[0]], *[[*p] for p in start[2:]]]
    engine.feed(decoder, rows)
    params = SamplingParams(10, stop=(7, 8, 9, 10))
    for turn in range(4):
        for row, sample in zip(rows, engine.sample_turn(decoder, params)):
            begin = len(row)
            row += sample.tokens
            scored = engine.logprobs([row], adapter)[0][begin - 1 :]
            assert sample.logprobs == pytest.approx(scored, abs=TOLERANCE)
        if turn == 2:
            decoder.keep([4, 1])
            rows = [rows[4], rows[1]]
        extra = prompts(len(rows), seed=20 + turn, low=1, high=6)
        extra[0] = []
        engine.feed(decoder, extra)
        rows = [row + more for row, more in zip(rows, extra)]


def test_known_prefixes_change_nothing(reference, engine):
    """Turn after turn on growing prompts, and after a step of training: as a fresh engine does."""
    lead = prompts(1, seed=50, low=70, high=71)[0]
    rows = [lead[:66] + tail for tail in prompts(5, seed=51, low=2, high=6)]
    other = prompts(1, seed=52)[0]
    adapter, params = moved(engine), SamplingParams(4, stop=(7, 9))
    for turn in range(3):
        requests = [SampleRequest(p, params, adapter, seed=i) for i, p in enumerate([*rows, other])]
        fresh = Engine(reference[0])
        twin = moved(fresh)
        with torch.no_grad():
            fresh._get(twin).flat.copy_(engine._get(adapter).flat)
        alone = [
            fresh.sample([SampleRequest(r.prompt, params, twin, seed=r.seed)])[0] for r in requests
        ]
        samples = engine.sample(requests)
        for got, expected in zip(samples, alone):
            assert got.tokens == expected.tokens
            assert got.logprobs == pytest.approx(expected.logprobs, abs=TOLERANCE)
        rows = [r + s.tokens + [turn + 1] for r, s in zip(rows, samples)]
        if turn == 1:
            engine.forward_backward(train_rows(), adapter, "cross_entropy")
            engine.optim_step(adapter, AdamParams(0.05))


def test_sampling_follows_the_distribution(engine):
    """Frequencies of 4,000 draws of one token: each within 5 standard errors of its probability."""
    prompt = prompts(1, seed=8)[0]
    ids = torch.tensor([prompt])
    hidden, _, _ = forward(engine.config, engine.base, Plain(engine.base), engine.rope, ids)
    logits = F.linear(hidden[0, -1], engine.base.head)
    n = 4000
    for params in (SamplingParams(1, temperature=0.7), SamplingParams(1, top_k=5)):
        scaled = logits / params.temperature
        if params.top_k > 0:
            scaled[scaled < scaled.topk(5).values[-1]] = -torch.inf
        expected = scaled.softmax(-1)
        drawn = [
            s.tokens[0]
            for s in engine.sample([SampleRequest(prompt, params, seed=i) for i in range(n)])
        ]
        seen = torch.bincount(torch.tensor(drawn), minlength=61) / n
        error = (expected * (1 - expected) / n).sqrt()
        assert ((seen - expected).abs() <= 5 * error + 1e-9).all()
    nucleus = engine.sample([SampleRequest(prompt, SamplingParams(1, top_p=0.01), seed=1)])
    assert nucleus[0].tokens == [int(logits.argmax())]
    greedy = engine.sample([SampleRequest(prompt, SamplingParams(1, temperature=0))])
    assert greedy[0].tokens == [int(logits.argmax())]


def train_rows(n=5, shared=6):
    lead = prompts(1, seed=30, low=shared, high=shared + 1)[0]
    rows = []
    for i, tail in enumerate(prompts(n, seed=31, low=4, high=12)):
        whole = lead + tail
        size = len(whole) - 1
        on = [0.0] * (shared + 1) + [1.0] * (size - shared - 1)
        rows.append(
            TrainRow(
                whole[:-1],
                whole[1:],
                weights=on,
                old_logprobs=[-2.0 * x for x in on],
                advantages=[(i - 2) * 0.5 * x for x in on],
            )
        )
    return rows


def reference_loss(model, rows, loss_fn):
    total = 0.0
    for row in rows:
        logits = model(torch.tensor([row.tokens])).logits[0]
        lp = logits.log_softmax(-1).gather(1, torch.tensor(row.targets)[:, None])[:, 0]
        if loss_fn == "cross_entropy":
            total = total - (lp * torch.tensor(row.weights)).sum()
        else:
            ratio = (lp - torch.tensor(row.old_logprobs)).exp()
            total = total - (ratio * torch.tensor(row.advantages)).sum()
    return total


@pytest.mark.parametrize("loss_fn", ["cross_entropy", "importance_sampling"])
def test_training_agrees_with_peft_and_adam(reference, engine, tmp_path, loss_fn):
    """Three steps: loss, logprobs and resulting weights equal peft's under torch.optim.Adam."""
    adapter = moved(engine)
    engine.save_adapter(adapter, tmp_path / "a")
    model = peft.PeftModel.from_pretrained(
        copy.deepcopy(reference[1]), tmp_path / "a", is_trainable=True
    )
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=0.01, betas=(0.9, 0.95), eps=1e-8)
    rows = train_rows()
    for _ in range(3):
        theirs = reference_loss(model, rows, loss_fn)
        optimizer.zero_grad()
        theirs.backward()
        optimizer.step()
        # Two calls before the step: gradients add up.
        first = engine.forward_backward(rows[:2], adapter, loss_fn)
        second = engine.forward_backward(rows[2:], adapter, loss_fn)
        engine.optim_step(adapter, AdamParams(0.01))
        assert first.loss + second.loss == pytest.approx(float(theirs.detach()), rel=1e-3)
    engine.save_adapter(adapter, tmp_path / "b")
    model.save_pretrained(tmp_path / "c")
    from safetensors.torch import load_file

    ours = load_file(tmp_path / "b" / "adapter_model.safetensors")
    peers = load_file(tmp_path / "c" / "adapter_model.safetensors")
    assert ours.keys() == peers.keys()
    # Adam's first steps move every parameter by about lr whatever the gradient's size, so
    # rounding in a near-zero gradient shows: nearly all must agree, not all.
    agree = [((ours[k] - peers[k]).abs() < 2e-3).float().mean() for k in ours]
    assert min(agree) > 0.97


def test_gradients_agree_with_autograd_through_transformers(reference, engine, tmp_path):
    adapter = moved(engine)
    engine.save_adapter(adapter, tmp_path)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(reference[1]), tmp_path, is_trainable=True)
    rows = train_rows()
    reference_loss(model, rows, "importance_sampling").backward()
    engine.forward_backward(rows, adapter, "importance_sampling")
    named = dict(model.named_parameters())
    for module, pair in engine._get(adapter).pairs.items():
        for letter, tensor in zip("AB", pair):
            for i in range(3):
                (name,) = [
                    n for n in named if f"layers.{i}." in n and f"{module}.lora_{letter}" in n
                ]
                theirs = named[name].grad
                assert (tensor.grad[i] - theirs).norm() / theirs.norm() < 1e-3


def test_in_bfloat16_what_is_sampled_is_what_is_trained(reference):
    """Log-probabilities agree within the type's rounding."""
    engine = Engine(reference[0], dtype=torch.bfloat16)
    adapter = moved(engine)
    requests = [
        SampleRequest(p, SamplingParams(12), adapter, seed=i) for i, p in enumerate(prompts(6))
    ]
    gaps = []
    for request, sample in zip(requests, engine.sample(requests)):
        scored = engine.logprobs([request.prompt + sample.tokens], adapter)[0]
        gaps += [abs(a - b) for a, b in zip(sample.logprobs, scored[len(request.prompt) - 1 :])]
    assert sum(gaps) / len(gaps) < 0.05  # 2 ** -8 of logits up to 10


def test_adapters_do_not_touch_each_other(engine):
    one, two = moved(engine, 1), moved(engine, 2)
    sequence = prompts(1, seed=40, low=15)
    before = engine.logprobs(sequence, two), engine.logprobs(sequence, None)
    frozen = engine.snapshot(one)
    start = engine.logprobs(sequence, one)
    engine.forward_backward(train_rows(), one, "cross_entropy")
    engine.optim_step(one, AdamParams(0.05))
    assert engine.logprobs(sequence, one) != start
    assert engine.logprobs(sequence, frozen) == start
    assert (engine.logprobs(sequence, two), engine.logprobs(sequence, None)) == before


def test_resume_is_bit_identical(engine, tmp_path):
    def step(adapter):
        engine.forward_backward(train_rows(), adapter, "importance_sampling")
        engine.optim_step(adapter, AdamParams(0.01, grad_clip_norm=1.0, weight_decay=0.1))

    one = moved(engine)
    step(one)
    engine.save_state(one, tmp_path)
    two = engine.load_state(tmp_path)
    cold = engine.load_state(tmp_path, optimizer=False)
    for adapter in (one, two, cold):
        step(adapter)
    assert torch.equal(engine._get(one).flat, engine._get(two).flat)
    assert not torch.equal(engine._get(one).flat, engine._get(cold).flat)


def test_peft_round_trip(reference, engine, tmp_path):
    adapter = moved(engine)
    engine.save_adapter(adapter, tmp_path)
    again = engine.load_adapter(tmp_path)
    ids = prompts(1, low=15)[0]
    assert engine.logprobs([ids], again) == engine.logprobs([ids], adapter)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(reference[1]), tmp_path)
    theirs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = theirs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert engine.logprobs([ids], adapter)[0] == pytest.approx(expected, abs=TOLERANCE)


def _first(letter):
    return f"base_model.model.model.layers.0.self_attn.q_proj.lora_{letter}.weight"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t, c: t.update({_first("A"): t[_first("A")][:1].contiguous()}),  # would broadcast
        lambda t, c: t.update({_first("B"): t[_first("B")][:1].contiguous()}),
        lambda t, c: t.update({_first("A"): t[_first("A")][0].contiguous()}),
        lambda t, c: t.update({_first("A"): t[_first("A")] * float("nan")}),
        lambda t, c: t.update({_first("A"): t[_first("A")].int()}),
        lambda t, c: t.pop(_first("B")),
        lambda t, c: t.update({"lm_head.lora_A.weight": torch.zeros(4, 32)}),
        lambda t, c: c.update(r=8),
        lambda t, c: c.update(r=None),
        lambda t, c: c.update(lora_alpha=float("nan")),
        lambda t, c: c.update(lora_alpha=float("inf")),
        lambda t, c: c.pop("lora_alpha"),
    ],
)
def test_an_adapter_that_is_not_this_models_is_refused(engine, tmp_path, spoil):
    import json

    from safetensors.torch import load_file, save_file

    engine.save_adapter(moved(engine), tmp_path)
    engine.load_adapter(tmp_path)
    weights, card = tmp_path / "adapter_model.safetensors", tmp_path / "adapter_config.json"
    tensors, settings = load_file(weights), json.loads(card.read_text())
    spoil(tensors, settings)
    save_file(tensors, weights)
    card.write_text(json.dumps(settings))
    before = dict(engine._adapters)
    with pytest.raises(ConfigError, match=r"not a LoRA adapter|adapts more"):
        engine.load_adapter(tmp_path)
    assert engine._adapters == before


@pytest.mark.parametrize("content", [b"", b"\x80\x04\x95 a pickle", b"[]" * 40])
def test_a_file_that_is_no_adapter_is_refused(engine, tmp_path, content):
    engine.save_adapter(moved(engine), tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="not a LoRA adapter"):
        engine.load_adapter(tmp_path)


def test_clear_errors(reference, engine, tmp_path):
    adapter = engine.create_adapter(4)
    with pytest.raises(ConfigError, match="cross_entropy"):
        engine.forward_backward(train_rows(), adapter, "dpo")
    with pytest.raises(ConfigError, match="1 to 95"):
        engine.sample([SampleRequest([1] * 200, SamplingParams(4))])
    with pytest.raises(ConfigError, match="no adapter"):
        engine.snapshot(99)
    with pytest.raises(ConfigError, match="no config"):
        Engine(tmp_path)
    with pytest.raises(ConfigError, match="not a LoRA adapter"):
        engine.load_adapter(tmp_path)
