"""How commands that can be gone on with end: by ctrl-C, by an error, by a fault.

Knows nothing about what they do.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from metatrainer.errors import ConfigError, MetatrainerError, SandboxUnavailable

INTERRUPTED = 130


@contextmanager
def resumable(command: str) -> Iterator[None]:
    """Say how to go on, however the work ends before its time.

    command: what goes on, without the program's name.
    """
    again = f"go on with: {invocation()} {command}"
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        fail(f"stopped; {again}", INTERRUPTED)
    except (ConfigError, SandboxUnavailable):
        raise
    except MetatrainerError as error:
        fail(f"{error}\n{again}", 1)
    except Exception:
        print(f"metatrainer: a fault, shown below; what is done is kept; {again}", file=sys.stderr)
        raise


def invocation() -> str:
    """The program as it can be typed again from here."""
    typed = Path(sys.argv[0]).absolute()
    if typed.name == "__main__.py":
        return "python -m metatrainer"
    here = Path.cwd()
    return str(typed.relative_to(here)) if typed.is_relative_to(here) else "metatrainer"


def fail(message: str, code: int) -> NoReturn:
    """End the program with a message."""
    print(f"metatrainer: {message}", file=sys.stderr)
    sys.exit(code)
