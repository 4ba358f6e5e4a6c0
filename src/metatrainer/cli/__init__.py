"""The command line: a module for each command or group, `app` for what holds them together."""

from metatrainer.cli.app import main

__all__ = ["main"]
