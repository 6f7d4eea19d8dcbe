"""A hub on loopback that knows the few things an upload asks for, and remembers what it was sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

USER, TOKEN = "somebody", "hf_secretsecretsecret"


@dataclass
class Hub:
    """What was asked of it."""

    address: str = ""
    fails: str = ""
    """A part of the address that is answered with an error."""
    requests: list[str] = field(default_factory=list)
    created: list[dict[str, Any]] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files, by sha256."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Of the last commit."""


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that went away in the middle is no news."""


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer()

        do_POST = do_PUT = do_HEAD = do_GET  # noqa: N815

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.requests.append(f"{self.command} {self.path}")
            if hub.fails and hub.fails in self.path:
                self._send(403, {"error": f"forbidden for {self.headers.get('Authorization')}"})
            elif (
                self.path != "/api/agent-harnesses"
                and "/upload/" not in self.path
                and self.headers.get("Authorization") != f"Bearer {TOKEN}"
            ):
                self._send(401, {"error": "Invalid credentials"})
            else:
                self._send(*answer(hub, self.path, body))

        @property
        def _is_open(self) -> bool:
            return "/upload/" in self.path or self.path == "/api/agent-harnesses"

        def _send(self, status: int, content: dict[str, Any]) -> None:
            encoded = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(encoded)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(encoded)

        def log_message(self, *_: object) -> None:
            """Nothing on standard error."""

    server = Server(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def answer(hub: Hub, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    path = path.split("?")[0]
    if path == "/api/whoami-v2":
        return 200, {"type": "user", "name": USER, "orgs": [{"name": "our-org"}]}
    if path == "/api/repos/create":
        hub.created.append(json.loads(body))
        return 200, {"url": f"{hub.address}/{hub.created[-1].get('organization', USER)}/{hub.created[-1]['name']}"}
    if "/preupload/" in path:
        asked = json.loads(body)["files"]
        kinds = {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in asked}
        return 200, {"files": [{"path": name, "uploadMode": kind, "shouldIgnore": False} for name, kind in kinds.items()]}
    if path.endswith("/objects/batch"):
        wanted = [(each["oid"], each["size"]) for each in json.loads(body)["objects"]]
        uploads = {oid: {"actions": {"upload": {"href": f"{hub.address}/upload/{oid}"}}} for oid, _ in wanted}
        known = [{"oid": oid, "size": size, **({} if oid in hub.objects else uploads[oid])} for oid, size in wanted]
        return 200, {"transfer": "basic", "objects": known}
    if path.startswith("/upload/"):
        hub.objects[path.removeprefix("/upload/")] = body
        return 200, {}
    if "/commit/" in path:
        return 200, _commit(hub, path, body)
    if path.startswith("/api/models/"):
        return 200, {"id": "x", "sha": "0" * 40, "siblings": []}
    return 200, {}


def _commit(hub: Hub, path: str, body: bytes) -> dict[str, Any]:
    hub.files = {}
    for line in map(json.loads, body.decode().splitlines()):
        value = line["value"]
        if line["key"] == "file":
            hub.files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            hub.files[value["path"]] = hub.objects[value["oid"]]
    repository = path.removeprefix("/api/models").split("/commit/")[0]
    return {"commitUrl": f"{hub.address}{repository}/commit/{'1' * 40}", "commitOid": "1" * 40, "hookOutput": "", "success": True}
