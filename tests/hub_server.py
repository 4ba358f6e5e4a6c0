"""A stand-in for the Hugging Face hub on this machine: the calls that pushing a folder makes.

Speaks what huggingface_hub's client asks: who am I, make a repository, which files are large, the
Git LFS batch and its uploads, and the commit. Keeps what it was given.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_a_good_token"
READER = "hf_may_only_read"


class Hub:
    """The server and all it knows. status: what every commit is answered with, if not done."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.commit_status = 200
        self._large: dict[str, bytes] = {}
        hub = self

        class Handler(_Handler):
            def answer(self, body: bytes) -> tuple[int, object]:
                return hub.answer(self, body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, request: _Handler, body: bytes) -> tuple[int, object]:
        path, token = request.path.split("?")[0], request.headers.get("Authorization", "")
        if path.startswith("/lfs/"):  # as a signed address, without a token
            digest = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == digest
            self._large[digest] = body
            return 200, {}
        if token not in (f"Bearer {TOKEN}", f"Bearer {READER}"):
            return 401, {"error": "Invalid credentials in Authorization header"}
        if path == "/api/whoami-v2":
            return 200, {"name": "ada", "type": "user"}
        if token == f"Bearer {READER}":
            return 403, {"error": "You don't have the rights to create a model"}
        if path == "/api/repos/create":
            made = json.loads(body)
            name = f"{made.get('organization') or 'ada'}/{made['name']}"
            self.private[name] = made["visibility"] == "private"
            self.repos.setdefault(name, {})
            return 200, {"url": f"{self.address}/{name}"}
        return self._in_repo(path, body)

    def _in_repo(self, path: str, body: bytes) -> tuple[int, object]:
        name = "/".join(path.removeprefix("/api/models").strip("/").split("/")[:2])
        name = name.removesuffix(".git")
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            large = {f["path"]: f["path"].endswith(".safetensors") for f in files}
            modes = {True: "lfs", False: "regular"}
            return 200, {
                "files": [
                    {"path": p, "uploadMode": modes[is_large], "shouldIgnore": False}
                    for p, is_large in large.items()
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {
                "transfer": "basic",
                "objects": [
                    {**o, "actions": {"upload": {"href": f"{self.address}/lfs/{o['oid']}"}}}
                    for o in json.loads(body)["objects"]
                ],
            }
        if "/commit/" in path:
            if self.commit_status != 200:
                return self.commit_status, {"error": "no"}
            for line in body.decode().splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    self.repos[name][value["path"]] = base64.b64decode(value["content"])
                if entry["key"] == "lfsFile":
                    self.repos[name][value["path"]] = self._large[value["oid"]]
            oid = "0" * 40
            return 200, {"commitUrl": f"{self.address}/{name}/commit/{oid}", "commitOid": oid}
        return 200, {"id": name, "siblings": [], "sha": "0" * 40, "private": True, "tags": []}


class _Handler(BaseHTTPRequestHandler):
    def answer(self, body: bytes) -> tuple[int, object]:
        raise NotImplementedError

    def _handle(self) -> None:
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, found = self.answer(body)
        payload = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    do_GET = do_POST = do_PUT = do_HEAD = _handle

    def log_message(self, *_: object) -> None:
        pass
