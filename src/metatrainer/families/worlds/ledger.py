"""Ledger: owners, their accounts in several currencies, the entries on them, and rates."""

import random

CURRENCIES = ("yen", "kip", "won", "lek")
OWNERS = 4
ENTRIES = 4


def sample(rng: random.Random, level: int, names: list[str]) -> dict:
    """One balance in another currency: of an account (1), an owner (2), two accounts (3)."""
    drawn = rng.sample(names, 2 * OWNERS)
    owners = dict(zip(drawn, drawn[OWNERS:]))
    wanted = rng.choice(CURRENCIES)
    foreign = [currency for currency in CURRENCIES if currency != wanted]
    rates = {currency: rng.randint(20, 99) for currency in CURRENCIES}
    accounts = {name: _account(rng, rng.choice(foreign)) for name in owners.values()}
    worth = {
        name: (sum(a["entries"]) * rates[a["currency"]] + rates[wanted] // 2) // rates[wanted]
        for name, a in accounts.items()
    }
    owner, other = rng.sample(list(owners), 2)
    asked = [owners[owner]] if level < 3 else [owners[owner], owners[other]]
    calls = [["account", {"owner": owner}]] if level == 2 else []
    for name in asked:
        amount, source = str(sum(accounts[name]["entries"])), accounts[name]["currency"]
        calls.append(["balance", {"account": name}])
        calls.append(["convert", {"amount": amount, "source": source, "target": wanted}])
    if level == 3:
        calls.append(["add", {"first": str(worth[asked[0]]), "second": str(worth[asked[1]])}])
    what = {
        1: f"is on account {asked[0]}",
        2: f"does {owner} have",
        3: f"is on accounts {' and '.join(asked)} together",
    }[level]
    return {
        "prompt": f"How much {what}, in {wanted}?",
        "world": {"owners": owners, "accounts": accounts, "rates": rates},
        "answer": str(sum(worth[name] for name in asked)),
        "calls": calls,
    }


def _account(rng: random.Random, currency: str) -> dict:
    """An account whose entries come to 10 to 99."""
    entries = [rng.randint(-30, 60) for _ in range(ENTRIES)]
    return {
        "currency": currency,
        "entries": [*entries, rng.randint(10, 99) - sum(entries)],
        "limit": 10 * rng.randint(10, 99),
    }
