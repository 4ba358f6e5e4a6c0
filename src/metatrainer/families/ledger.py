"""ledger: what accounts come to in another currency; tools do the arithmetic, students the order.

A statement is paginated, and holds more than is asked for.
"""

from __future__ import annotations

from metatrainer.families.base import Family, World, tool
from metatrainer.families.worlds import ledger as worlds

PAGE = 3
"""Entries on one page of a statement."""
_MOST = 10**9
"""Larger amounts are refused, as any bank does."""


@tool
def account(world: World, owner: str) -> str:
    """Name of an owner's account."""
    return str(world["owners"][owner])


@tool
def balance(world: World, account: str) -> str:
    """Balance of an account in its own currency, and its limit."""
    found = world["accounts"][account]
    return f"{sum(found['entries'])} {found['currency']}, limit {found['limit']}"


@tool
def entries(world: World, account: str, page: str) -> str:
    """Entries on one page of an account's statement; pages count from 1."""
    found = world["accounts"][account]["entries"]
    pages = -(-len(found) // PAGE)
    number = int(page)
    if not 1 <= number <= pages:
        raise KeyError(f"page {number}; pages: 1 to {pages}")
    shown = found[PAGE * (number - 1) : PAGE * number]
    return f"page {number} of {pages}: {', '.join(map(str, shown))}"


@tool
def convert(world: World, amount: str, source: str, target: str) -> str:
    """An amount of one currency in another one, rounded to a whole number."""
    rates = world["rates"]
    return str((_number(amount) * rates[source] + rates[target] // 2) // rates[target])


@tool
def add(world: World, first: str, second: str) -> str:
    """Sum of two amounts."""
    del world
    return str(_number(first) + _number(second))


def _number(text: str) -> int:
    number = int(text)
    if abs(number) > _MOST:
        raise ValueError(f"{text} is more than {_MOST}")
    return number


def _world_problem(world: World) -> str | None:
    if not all(isinstance(name, str) for name in world["owners"].values()):
        return "each owner must have the name of an account"
    for name, found in world["accounts"].items():
        if not isinstance(found["currency"], str) or "limit" not in found:
            return f"account {name} must have a currency and a limit"
        if not all(isinstance(entry, int) for entry in found["entries"]):
            return f"account {name} must have whole numbers as entries"
    if not all(isinstance(rate, int) and rate > 0 for rate in world["rates"].values()):
        return "rates must be whole numbers above 0"
    return None if world["accounts"] else "the world has no accounts"


FAMILY = Family(
    name="ledger",
    title="Accounts and currencies",
    goal="say what accounts come to in another currency: find the account, its balance, convert it",
    answer_format="the whole number alone",
    levels=(1, 2, 3),
    eval_level=2,
    tools=(account, balance, entries, convert, add),
    sample=worlds.sample,
    world_problem=_world_problem,
)
