"""The page over HTTP: what is where, who may read, what never runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from metatrainer.ledger import Ledger
from metatrainer.web.app import make_app
from tests.web.conftest import add_step

EPISODE = "train-001-00-01"
VIEWS = (
    "/run/nano-try-1",
    "/run/nano-try-1/train/1",
    "/run/nano-try-1/heldout_before/0",
    f"/run/nano-try-1/episode/{EPISODE}",
    f"/run/nano-try-1/job/{EPISODE}-00000001",
    "/run/nano-try-1/job/train-001-00-00-00000000",
    "/run/nano-try-1/pool",
    "/run/nano-try-1/config",
    "/compare?run=nano-try-1",
    "/leaderboard",
    "/families",
    "/families/persona",
    "/",
)


@pytest.fixture
def client(run: Path) -> TestClient:
    return TestClient(make_app(run.parent), base_url="http://localhost:8400")


@pytest.mark.parametrize("address", VIEWS)
def test_every_view_opens_and_nothing_planted_survives(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 200
    page = answer.text
    assert "<script>document" not in page
    assert "<img src=x" not in page
    assert "\x1b" not in page and "\u202e" not in page and "\x00" not in page
    assert "49" not in re.findall(r"\{\{.*?\}\}|49(?= &#39;)", page)  # templates are not run again
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert "<style" not in page and not re.search(r"<[^>]+\sstyle=", page)
    assert not re.search(r"<script(?![^>]*\ssrc=)", page)
    assert not re.search(r"(src|href)=\"https?:", page)


def test_all_links_lead_somewhere(client: TestClient) -> None:
    seen: set[str] = set()
    todo = ["/"]
    while todo:
        address = todo.pop()
        if address in seen:
            continue
        seen.add(address)
        answer = client.get(address)
        assert answer.status_code == 200, address
        if "html" in answer.headers["content-type"]:
            todo += [a for a in re.findall(r'href="(/[^"#]*)"', answer.text) if a not in seen]
    assert len(seen) > 40


def test_numbers_are_the_ledgers(client: TestClient, run: Path) -> None:
    with Ledger(run / "ledger.sqlite", readonly=True) as ledger:
        episode = ledger.episode(EPISODE)
    assert episode is not None and episode.total is not None
    page = client.get(f"/run/nano-try-1/episode/{EPISODE}").text
    assert f"<dd>{episode.total:.3f}</dd>" in page
    step = client.get("/run/nano-try-1").text
    mean = sum(0.1 + 0.2 + 0.02 * i for i in range(4)) / 4
    assert f"{mean:.3f} [" in step


@pytest.mark.parametrize(
    "address",
    ["/run/none", "/run/nano-try-1/train/99", "/run/nano-try-1/nonsense/1",
     "/run/nano-try-1/episode/<script>alert(1)</script>", "/run/nano-try-1/job/x",
     "/families/nope", "/run/..%2f..%2fetc"],
)  # fmt: skip
def test_what_is_not_there_is_said(client: TestClient, address: str) -> None:
    answer = client.get(address)
    assert answer.status_code == 404
    assert "<script>alert" not in answer.text


def test_a_page_is_sent_again_only_when_it_changed(client: TestClient, run: Path) -> None:
    version = client.get("/run/nano-try-1/version").json()
    first = client.get("/run/nano-try-1/train/1")
    tag = {"if-none-match": first.headers["etag"]}
    assert client.get("/run/nano-try-1/train/1", headers=tag).status_code == 304
    with Ledger(run / "ledger.sqlite") as ledger:
        add_step(ledger, 3, 4)
    assert client.get("/run/nano-try-1/version").json() != version
    assert "/train/3" in client.get("/run/nano-try-1").text


def test_only_reading_is_answered(client: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert client.request(method, "/run/nano-try-1").status_code == 405


def test_another_name_for_this_machine_is_refused(run: Path) -> None:
    """A page elsewhere that resolves its own name to 127.0.0.1 must not read this one."""
    client = TestClient(make_app(run.parent), base_url="http://evil.example")
    assert client.get("/").status_code == 400


def test_a_token_is_needed_where_others_can_connect(run: Path) -> None:
    client = TestClient(make_app(run.parent, token="right"), base_url="http://host.example")
    assert client.get("/").status_code == 401
    assert client.get("/static/page.js").status_code == 401
    assert client.get("/?token=wrong").status_code == 401
    assert client.get("/", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/metrics", headers={"authorization": "Bearer right"}).status_code == 200
    answer = client.get("/leaderboard?token=right", follow_redirects=False)
    assert answer.headers["location"].endswith("/leaderboard")
    assert "HttpOnly" in answer.headers["set-cookie"]
    assert client.get("/").status_code == 200  # the cookie is kept


def test_a_run_of_its_own_is_the_first_page(run: Path) -> None:
    client = TestClient(make_app(run), base_url="http://localhost")
    assert client.get("/", follow_redirects=False).headers["location"] == "/run/nano-try-1"


def test_a_ledger_that_cannot_be_read_hides_no_other(client: TestClient, run: Path) -> None:
    broken = run.parent / "broken"
    broken.mkdir()
    (broken / "ledger.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 9)
    page = client.get("/")
    assert page.status_code == 200 and "nano-try-1" in page.text
    assert client.get("/leaderboard").status_code == 200
    assert client.get("/run/broken").status_code == 404


def test_ten_megabytes_in_a_field_are_cut(client: TestClient, run: Path) -> None:
    with Ledger(run / "ledger.sqlite") as ledger:
        ledger.record_message(
            EPISODE, 9, "tool", '{"role": "tool", "content": "%s"}' % ("x" * 10**7)
        )
    page = client.get(f"/run/nano-try-1/episode/{EPISODE}").text
    assert len(page) < 300_000
    assert "more characters" in page
