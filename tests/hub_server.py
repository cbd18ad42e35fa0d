"""A small server that speaks the protocol of the Hugging Face Hub, for models in folders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

_API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/(?P<what>revision|tree)/(?P<revision>[^/?]+)")
_FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")


@dataclass
class Repo:
    """A model: its ``folder`` for each commit, and the commit of each branch. A ``gated`` one tells what it has, and
    gives no file; a ``private`` one gives everything to callers with its ``token`` alone."""

    commits: dict[str, Path]
    branches: dict[str, str]
    gated: bool = False
    token: str = ""


@dataclass
class Hub:
    """``pause_s`` is waited after each 10 MB of a file. ``drops`` has, by file name, the number of bytes after which
    its next download breaks, and whether by a reset. ``asked`` are the method, the file and the header Range of each
    call for a file."""

    url: str
    repos: dict[str, Repo] = field(default_factory=dict)
    pause_s: float = 0.0
    drops: dict[str, list[tuple[int, bool]]] = field(default_factory=dict)
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def downloads(self, name: str) -> list[str]:
        """The header Range of each download of the file ``name``; empty without one."""
        return [ranged for method, path, ranged in self.asked if method == "GET" and path == name]


def commit_of(text: str) -> str:
    """A commit's id."""
    return hashlib.sha1(text.encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def _answer(self) -> None:
        path = urlsplit(self.path).path
        found = _API.fullmatch(path) or _FILE.fullmatch(path)
        repo = None if found is None else self.hub.repos.get(found["repo"])
        if found is None or repo is None or (repo.token and self.headers["authorization"] != f"Bearer {repo.token}"):
            return self._refuse(404 if self.headers["authorization"] else 401, "RepoNotFound")
        commit = repo.branches.get(found["revision"], found["revision"])
        folder = repo.commits.get(commit)
        if folder is None:
            return self._refuse(404, "RevisionNotFound")
        files = sorted(each for each in folder.rglob("*") if each.is_file())
        if (what := found.groupdict().get("what")) == "revision":
            return self._json(
                {"_id": "1", "id": found["repo"], "modelId": found["repo"], "sha": commit, "siblings": []}
            )
        if what == "tree":
            entries = [
                {
                    "type": "file",
                    "path": each.relative_to(folder).as_posix(),
                    "size": each.stat().st_size,
                    "oid": _etag(each),
                }
                for each in files
            ]
            return self._json(entries)
        file = folder / found["path"]
        if repo.gated:
            return self._refuse(403 if self.headers["authorization"] else 401, "GatedRepo")
        if file not in files:
            return self._refuse(404, "EntryNotFound")
        return self._file(file, commit)

    def _file(self, file: Path, commit: str) -> None:
        ranged = self.headers["range"] or ""
        self.hub.asked.append((self.command, file.name, ranged))
        data = file.read_bytes()
        first = int(ranged.removeprefix("bytes=").partition("-")[0]) if ranged else 0
        self.send_response(206 if ranged else 200)
        self.send_header("etag", f'"{_etag(file)}"')
        self.send_header("x-repo-commit", commit)
        self.send_header("accept-ranges", "bytes")
        self.send_header("content-length", str(len(data) - first))
        if ranged:
            self.send_header("content-range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if drops := self.hub.drops.get(file.name):
            after, reset = drops.pop(0)
            self.wfile.write(data[first : first + after])
            if reset:  # instead of an orderly end
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        with contextlib.suppress(ConnectionError):  # the client may leave
            while first < len(data):
                self.wfile.write(data[first : first + 10_000_000])
                first += 10_000_000
                time.sleep(self.hub.pause_s)

    def _json(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("x-error-code", code)
        self.send_header("x-error-message", "Access to the model is restricted" if code == "GatedRepo" else code)
        self.send_header("content-length", "0")
        self.end_headers()


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def hub_server(port: int = 0) -> Iterator[Hub]:
    """A hub on this host, on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    server.RequestHandlerClass = type("Handler", (_Handler,), {"hub": hub})
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, name="hub")
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
