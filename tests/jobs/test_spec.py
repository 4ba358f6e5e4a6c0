"""job.toml: what is taken, what is refused, and what a refusal says."""

import pytest

from metatrainer.jobs.findings import Finding, render
from metatrainer.jobs.spec import JobSpec, parse_job_toml

LEAST = "[prime_rl]\nmodel = 'nano-wren'\nlearning_rate = 0.01\n"


def test_defaults_make_a_job_that_learns():
    spec = parse_job_toml(LEAST)
    assert isinstance(spec, JobSpec)
    assert spec.prime_rl.batch_size % spec.prime_rl.group_size == 0
    assert spec.prime_rl.group_size > 1
    assert spec.rollouts == spec.prime_rl.max_steps * spec.prime_rl.batch_size
    assert spec.environment.module == "environment"


def test_everything_can_be_set():
    spec = parse_job_toml(
        "version = 1\n"
        + LEAST
        + "batch_size = 32\ngroup_size = 4\nmax_steps = 5\nmax_tokens = 16\nseq_len = 256\n"
        "lora_rank = 8\ntemperature = 1\n[environment]\nmodule = 'mine'\nargs = {level = 2}\n"
    )
    assert isinstance(spec, JobSpec)
    assert (spec.rollouts, spec.environment.args) == (160, {"level": 2})


BROKEN = {
    "not toml": ("[prime_rl\n", "E-TOML job.toml:1 not TOML"),
    "huge number": ("x = " + "9" * 5000, "E-TOML job.toml not TOML"),
    "deep": ("x = " + "[" * 5000, "E-TOML job.toml"),
    "empty": ("", "E-MISSING job.toml [prime_rl] is missing"),
    "no model": ("[prime_rl]\nlearning_rate = 0.1\n", "E-MISSING job.toml model is missing"),
    "misspelt key": (LEAST + "batch_sise = 8\n", "E-KEY job.toml:4 unknown key 'batch_sise'; did"),
    "other version": (
        "version = 2\n[trainer]\n",
        "E-VERSION job.toml:1 version = 2; allowed: 1; write version = 1",
    ),
    "version as text": ("version = '1'\n" + LEAST, "E-VERSION job.toml:1 version = 1; allowed: 1"),
    "version true": ("version = true\n" + LEAST, "E-VERSION job.toml:1 version = True"),
    "version in a table": (LEAST + "version = 1\n", "E-KEY job.toml:4 unknown key 'version'"),
    "unknown table": (LEAST + "[trainer]\n", "E-KEY job.toml:4 unknown key 'trainer'"),
    "learning rate": (
        LEAST.replace("0.01", "5"),
        "E-LR job.toml:3 learning_rate = 5; allowed: a number from 1e-06 to 0.1",
    ),
    "nan": (LEAST.replace("0.01", "nan"), "E-LR job.toml:3 learning_rate = nan"),
    "text": (LEAST.replace("0.01", "'0.01'"), "E-LR job.toml:3 learning_rate = 0.01"),
    "group of one": (LEAST + "group_size = 1\n", "E-GROUP job.toml:4 group_size = 1"),
    "groups do not fill": (
        LEAST + "batch_size = 60\n",
        "E-BATCH job.toml:4 batch_size = 60; allowed: multiples of group_size = 8; use 64",
    ),
    "no steps": (LEAST + "max_steps = 0\n", "E-STEPS job.toml:4 max_steps = 0"),
    "true": (LEAST + "max_steps = true\n", "E-STEPS job.toml:4 max_steps = True"),
    "rank": (LEAST + "lora_rank = 65\n", "E-RANK job.toml:4 lora_rank = 65"),
    "cold": (LEAST + "temperature = 0\n", "E-TEMP job.toml:4 temperature = 0; allowed: a number a"),
    "message longer than all": (
        LEAST + "max_tokens = 65\nseq_len = 64\n",
        "E-TOKENS job.toml:4 max_tokens = 65; allowed: at most seq_len = 64",
    ),
    "module": (LEAST + "[environment]\nmodule = '../x'\n", "E-MODULE job.toml:5 module = ../x"),
}


@pytest.mark.parametrize("text,said", BROKEN.values(), ids=BROKEN)
def test_broken(text, said):
    findings = parse_job_toml(text)
    assert isinstance(findings, list)
    assert render(findings).startswith(said)


def test_all_faults_are_told_at_once_the_first_ones_shown():
    text = "[prime_rl]\nmodel = 1\nlearning_rate = 9\nbatch_size = 0\ngroup_size = 0\nlora_rank = 0"
    findings = parse_job_toml(text)
    assert isinstance(findings, list)
    assert {f.code for f in findings} == {"E-MODEL", "E-LR", "E-BATCH", "E-GROUP", "E-RANK"}
    assert render(findings).splitlines()[-1] == "and 1 more"


def test_a_finding_is_one_short_line():
    shown = Finding("E-X", "a.py", 3, "\x1b[2J" + "one\ntwo " * 60).render()
    assert shown.isprintable()
    assert len(shown.split()) <= 40
    assert len(Finding("E-X", None, None, "x" * 10_000).render()) <= 400
