"""The plan of a run: the same in every process, families in turn, held-out tasks paired."""

from __future__ import annotations

import subprocess
import sys

from metatrainer.config import parse_config
from metatrainer.outer import plan

SETTINGS = parse_config(
    {
        "seed": 3,
        "families": ["a", "b", "c"],
        "heldout": ["x", "y"],
        "outer": {"steps": 4, "groups": 2, "group_size": 3, "heldout_episodes": 2},
    }
)


def test_families_take_turns_over_groups_and_steps():
    families = [g[0].family for s in range(4) for g in plan.training_step(SETTINGS, s)]
    assert families == ["a", "b", "c", "a", "b", "c", "a", "b"]


def test_a_group_shares_its_task_and_no_two_groups_do():
    groups = [g for s in range(4) for g in plan.training_step(SETTINGS, s)]
    assert all(len({(p.family, p.task_seed) for p in group}) == 1 for group in groups)
    assert len({group[0].task_seed for group in groups}) == len(groups)


def test_held_out_tasks_are_the_same_before_and_after_and_differ_among_themselves():
    before, after = (
        [(p.family, p.task_seed) for p in plan.heldout(SETTINGS, phase)]
        for phase in ("heldout_before", "heldout_after")
    )
    assert before == after
    assert [family for family, _ in before] == ["x", "x", "y", "y"]
    assert len(set(before)) == 4


def test_every_episode_of_a_run_has_an_id_of_its_own():
    ids = [str(p.id) for p in plan.whole_run(SETTINGS)]
    assert len(set(ids)) == len(ids) == 4 + 4 * 2 * 3 + 4


def test_another_seed_draws_other_tasks():
    other = SETTINGS.model_copy(update={"seed": 4})
    assert plan.training_step(other, 0)[0][0].task_seed != (
        plan.training_step(SETTINGS, 0)[0][0].task_seed
    )


def test_seeds_do_not_depend_on_the_process():
    code = "from metatrainer.outer.plan import derive; print(derive(3, 'sample', 'id', 0))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) == plan.derive(3, "sample", "id", 0) < 2**31


def test_the_loop_can_be_imported_without_the_cookbook():
    code = "import sys, metatrainer.outer.loop as l; print({'tinker_cookbook'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
