"""The page on job.toml is the one that its declaration makes."""

import re
from pathlib import Path

from metatrainer.jobs import reference
from metatrainer.jobs.spec import TABLES, JobSpec, parse_job_toml

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "job-toml.md"


def test_the_page_of_the_docs_is_up_to_date():
    """If this fails: python -m metatrainer.jobs.reference docs/reference/job-toml.md"""
    assert PAGE.read_text() == reference.render()


def test_every_key_is_explained_and_the_example_is_taken():
    page = reference.render()
    for name in ("version", *(key for table in TABLES.values() for key in table.model_fields)):
        (row,) = re.findall(rf"^\| `{name}` \| .+$", page, re.M)
        assert all(cell.strip() for cell in row.strip("|").split("|")), row
    spec = parse_job_toml(page.partition("```toml\n")[2].partition("```")[0])
    assert isinstance(spec, JobSpec)
    assert spec.prime_rl.batch_size == TABLES["prime_rl"].model_fields["batch_size"].default
