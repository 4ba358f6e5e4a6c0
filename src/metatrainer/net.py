"""Sockets to serve on. Knows nothing about what is served."""

from __future__ import annotations

import socket

from metatrainer.errors import ConfigError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Hosts that only this machine reaches."""


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 takes a free one. Raises ConfigError if it cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen at {host}:{port}: {error.strerror}; try --port 0"
        ) from None
    return listening


def url(host: str, listening: socket.socket) -> str:
    """Where a socket is reached."""
    at = f"[{host}]" if ":" in host else host
    return f"http://{at}:{listening.getsockname()[1]}"
