"""Commands on another machine through OpenSSH's client, over one connection that is kept.

A machine's host key is pinned at the first contact; another one later is refused. Knows nothing
about who rents the machine or what runs on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import tempfile
from pathlib import Path

from metatrainer.errors import ConfigError, PoolError, WorkerFault
from metatrainer.pool.base import LOST
from metatrainer.pool.runpod_api import Address
from metatrainer.shown import visible

CONNECT_SECONDS = 15
KEEP_SECONDS = 120
"""How long a connection is kept that nobody uses."""
SAID_CHARS = 1_500
_NO_CONNECTION = 255
_CHANGED = "HOST IDENTIFICATION HAS CHANGED"


class Keys:
    """A run's own key pair and the host keys it has seen, as files of one folder."""

    def __init__(self, folder: Path):
        self.private = folder / "id_ed25519"
        self.known_hosts = folder / "known_hosts"

    def public(self) -> str:
        """The public key; made if there is none yet."""
        path = self.private.with_suffix(".pub")
        if not path.exists():
            self.private.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.private.unlink(missing_ok=True)  # half a pair, from a start that was killed
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "metatrainer", "-f"]
            subprocess.run([*command, str(self.private)], check=True, capture_output=True)
        return path.read_text().strip()


class Ssh:
    """One machine. Calls may be under way side by side."""

    def __init__(self, name: str, address: Address, keys: Keys):
        """name: under which its host key is known, whatever its address."""
        self._name = name
        self._address = address
        self._keys = keys
        # Sockets' paths are short, and a run's folder may lie deep.
        self._home = tempfile.TemporaryDirectory(prefix="mt-ssh-")

    @property
    def address(self) -> Address:
        return self._address

    def command(self, script: str) -> list[str]:
        """What is started for a script, as arguments."""
        return [*self._client(), self._login, script]

    async def run(self, script: str, given: bytes = b"", seconds: float = 120.0) -> bytes:
        """What a shell script prints there. given: its standard input.

        Raises WorkerFault(LOST) where the machine cannot be reached or is too slow, PoolError if
        the script fails or the host key is another one.
        """
        return await self._call([self._login, script], given, seconds)

    async def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(WorkerFault, PoolError):
            await self._call(["-O", "exit", self._login], b"", CONNECT_SECONDS)
        self._home.cleanup()

    async def _call(self, arguments: list[str], given: bytes, seconds: float) -> bytes:
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *self._client(), *arguments, stdin=pipe, stdout=pipe, stderr=pipe
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(given), seconds)
        except TimeoutError:
            raise WorkerFault(LOST, f"{self._name} did not answer in {seconds:.0f} s") from None
        finally:
            # Killed, a client leaves its pipes with the connection that is kept until the script
            # ends there: do not wait for that.
            process._transport.close()  # type: ignore[attr-defined]
            while process.returncode is None:
                await asyncio.sleep(0.01)
        if process.returncode == 0:
            return out
        told = visible(err.decode(errors="replace").strip()[-SAID_CHARS:], SAID_CHARS)
        if _CHANGED in told:
            raise PoolError(
                f"the host key of {self._name} at {self._address.host}:{self._address.port} is not "
                "the one it had at first: the pod was restarted, or somebody stands in between. "
                f"Nothing was sent to it. The keys seen are in {self._keys.known_hosts}"
            )
        if process.returncode == _NO_CONNECTION:
            raise WorkerFault(LOST, f"{self._name} cannot be reached: {told}")
        raise PoolError(f"a script on {self._name} ended with {process.returncode}: {told}")

    @property
    def _login(self) -> str:
        return f"{self._address.username}@{self._address.host}"

    def _client(self) -> list[str]:
        options = {
            "BatchMode": "yes",
            "IdentitiesOnly": "yes",
            "IdentityFile": str(self._keys.private),
            "UserKnownHostsFile": str(self._keys.known_hosts),
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "accept-new",
            "HostKeyAlias": self._name,
            "UpdateHostKeys": "no",
            "ForwardAgent": "no",
            "LogLevel": "ERROR",
            "ConnectTimeout": str(CONNECT_SECONDS),
            "ServerAliveInterval": "15",
            "ServerAliveCountMax": "4",
            "ControlMaster": "auto",
            "ControlPath": f"{self._home.name}/s",
            "ControlPersist": str(KEEP_SECONDS),
        }
        said = [part for key, value in options.items() for part in ("-o", f"{key}={value}")]
        return ["ssh", "-F", "/dev/null", *said, "-p", str(self._address.port), "-T"]


def check_installed() -> None:
    """Raises ConfigError without OpenSSH's client."""
    for program in ("ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            raise ConfigError(
                f'pool.kind is "runpod", which needs {program}; on Debian: apt install'
                " openssh-client"
            )
