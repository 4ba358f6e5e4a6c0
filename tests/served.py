"""`metatrainer serve` as a user starts it, over two models of a folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

KEY = "tml-of-the-test"


@contextmanager
def serving(folder: Path, *more: str, key: str | None = None) -> Iterator[str]:
    """`metatrainer serve` as a user starts it; its address. It ends by itself on ctrl-C."""
    environment = {**os.environ, **({} if key is None else {"METATRAINER_API_KEY": key})}
    models = [argument for m in ("first", "second") for argument in ("--model", str(folder / m))]
    command = ["serve", *models, "--port", "0", "--checkpoints", str(folder / "checkpoints"), *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "metatrainer", *command],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        # A test runner that ignores ctrl-C hands that on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("serving ")
        yield process.stdout.readline().strip().removeprefix("export TINKER_BASE_URL=")
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
