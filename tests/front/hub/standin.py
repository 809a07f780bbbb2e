"""A stand-in of the hub: an HTTP server with the part of its API that downloads and uploads use,
and errors on request.
"""

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "standInTokenOfTheTests0123456789"
LARGE = (".safetensors", ".bin", ".parquet")


@dataclass
class Repo:
    """A repository; every commit has all files."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    head: str = ""
    gated: bool = False
    private: bool = False

    def commit(self, files: dict[str, bytes]) -> str:
        """A new commit with these files; gives its id."""
        self.head = hashlib.sha1(
            repr((self.head, sorted(files))).encode() + b"".join(files.values())
        ).hexdigest()
        self.commits[self.head] = files
        return self.head


@dataclass
class Fault:
    """An answer in place of the right one.

    Attributes:
        where: method and path, as a regular expression.
        status: the answer's; 0: the connection is cut after `after` bytes of the body.
        times: how often.
        flip: one byte of the body is changed.
    """

    where: str
    status: int = 200
    times: int = 1_000
    after: int = 0
    flip: bool = False
    code: str = ""


@dataclass
class Hub:
    """The server's state.

    Attributes:
        seen: method and path of every request.
        lost_uploads: a byte of each uploaded large file is changed.
        described: replaces parts of the description of a repository: `sha`, `siblings`.
        headers: replaces headers of the answers with files.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    created: list[dict[str, Any]] = field(default_factory=list)
    lost_uploads: bool = False
    described: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    url: str = ""

    def fault(self, request: str) -> Fault | None:
        """The fault for a request."""
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.where, request):
                fault.times -= 1
                return fault
        return None


def git_digest(body: bytes) -> str:
    """The SHA-1 of git's blob."""
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def etag(path: str, body: bytes) -> str:
    """What the hub names a file's content by."""
    return hashlib.sha256(body).hexdigest() if path.endswith(LARGE) else git_digest(body)


def entry(path: str, body: bytes) -> dict[str, Any]:
    """A file in the answer of `revision`."""
    lfs = {"sha256": etag(path, body), "size": len(body), "pointerSize": 134}
    return {"rfilename": path, "size": len(body), "blobId": git_digest(body)} | (
        {"lfs": lfs} if path.endswith(LARGE) else {}
    )


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the name of the base class
        """Silent."""

    def do_HEAD(self) -> None:
        self.answer(b"")

    def do_GET(self) -> None:
        self.answer(b"")

    def do_PUT(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def do_POST(self) -> None:
        self.answer(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def answer(self, body: bytes) -> None:
        path = unquote(urlsplit(self.path).path)
        request = f"{self.command} {path}"
        self.hub.seen.append(request)
        if authorization := self.headers.get("Authorization"):
            self.hub.tokens.add(authorization.removeprefix("Bearer "))
        fault = self.hub.fault(request)
        if fault is not None and fault.status >= 400:
            self.send(fault.status, b"{}", {"X-Error-Code": fault.code} if fault.code else {})
            return
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+|[^/]+)/resolve/([^/]+)/(.+)", path):
            self.resolve(match[1] or "", match[2], match[3], match[4], fault)
        elif match := re.fullmatch(
            r"/api/(model|dataset)s/(.+?)(?:/(revision|preupload|commit|tree)/([^/]+)(?:/.*)?)?", path
        ):
            self.api(match[1], match[2], match[3] or "revision", match[4] or "main", body)
        elif path == "/api/repos/create":
            self.create(json.loads(body))
        elif path == "/api/validate-yaml":
            self.send_json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/(.+)\.git/info/lfs/objects/batch", path):
            self.batch(json.loads(body))
        elif match := re.fullmatch(r"/lfs/([0-9a-f]{64})", path):
            self.hub.objects[match[1]] = flipped(body) if self.hub.lost_uploads else body
            self.send(200, b"")
        else:
            self.send(404, b"{}")

    def repo(self, kind: str, name: str, *, content: bool) -> Repo | None:
        """The repository, if it may be seen; else an answer is sent."""
        repo = self.hub.repos.get(name if kind == "model" else f"datasets/{name}")
        known = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo is None or (repo.private and not known):
            self.send(404 if known else 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif repo.gated and content and not known:
            self.send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        else:
            return repo
        return None

    def resolve(self, prefix: str, name: str, revision: str, path: str, fault: Fault | None) -> None:
        repo = self.repo("dataset" if prefix else "model", name, content=True)
        if repo is None:
            return
        commit = repo.head if revision == "main" else revision
        body = repo.commits.get(commit, {}).get(path)
        if body is None:
            self.send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"X-Repo-Commit": commit, "ETag": f'"{etag(path, body)}"', "Accept-Ranges": "bytes"}
        if path.endswith(LARGE):
            headers |= {"X-Linked-Etag": f'"{etag(path, body)}"', "X-Linked-Size": str(len(body))}
        start = 0
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", "")):
            start = int(match[1])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        part = body[start:]
        if fault is not None and fault.flip:
            part = flipped(part)
        cut = fault.after if fault is not None and fault.status == 0 and self.command == "GET" else None
        self.send(206 if start else 200, part, headers | self.hub.headers, cut=cut)

    def api(self, kind: str, name: str, what: str, revision: str, body: bytes) -> None:
        repo = self.repo(kind, name, content=False)
        if repo is None:
            return
        commit = repo.head if revision == "main" else revision
        if what == "preupload":
            files = json.loads(body)["files"]
            self.send_json({"files": [{"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(LARGE) else "regular", "shouldIgnore": False, "oid": None} for f in files]})  # fmt: skip
        elif what == "commit":
            self.receive(repo, name, body)
        elif commit not in repo.commits:
            self.send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif what == "tree":
            self.send_json([tree_entry(path, content) for path, content in repo.commits[commit].items()])
        else:
            self.send_json({"id": name, "sha": commit, "private": repo.private, "gated": repo.gated, "tags": [], "siblings": [entry(path, content) for path, content in repo.commits[commit].items()]} | self.hub.described)  # fmt: skip

    def receive(self, repo: Repo, name: str, body: bytes) -> None:
        files = dict(repo.commits.get(repo.head, {}))
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        commit = repo.commit(files)
        self.send_json(
            {"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit, "success": True}
        )

    def create(self, asked: dict[str, Any]) -> None:
        self.hub.created.append(asked)
        name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.send(401, b'{"error": "Invalid username or password."}')
        elif name in self.hub.repos:
            self.send(409, json.dumps({"url": f"{self.hub.url}/{name}"}).encode())
        else:
            self.hub.repos[name] = Repo(private=asked.get("visibility") == "private")
            self.hub.repos[name].commit({})
            self.send_json({"url": f"{self.hub.url}/{name}", "name": name})

    def batch(self, asked: dict[str, Any]) -> None:
        objects = [
            {
                "oid": item["oid"],
                "size": item["size"],
                "actions": {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}},
            }
            for item in asked["objects"]
        ]
        self.send_json({"objects": objects, "transfer": "basic"})

    def send_json(self, value: Any) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, *, cut: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


def tree_entry(path: str, body: bytes) -> dict[str, Any]:
    """A file in the answer of `tree`."""
    lfs = (
        {"lfs": {"oid": etag(path, body), "size": len(body), "pointerSize": 134}}
        if path.endswith(LARGE)
        else {}
    )
    return {"type": "file", "path": path, "size": len(body), "oid": git_digest(body)} | lfs


def flipped(body: bytes) -> bytes:
    """The same with one bit changed."""
    return body[:-1] + bytes([body[-1] ^ 1]) if body else body


@contextmanager
def running_hub(port: int = 0) -> Iterator[Hub]:
    """A hub that answers on 127.0.0.1."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", port), type("OneHub", (Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def environment(url: str, home: Path, **more: str) -> dict[str, str]:
    """Of a command that asks the hub at this address, with an empty cache in `home`, and no
    token.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    return kept | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"} | more  # fmt: skip
