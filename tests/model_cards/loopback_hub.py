"""A Hub on the loopback address: an HTTP server that speaks the part of the Hub's protocol that `huggingface_hub` uses.

Repositories are kept in memory, each a list of commits. Tokens are checked, private repositories hidden, large files go
through LFS with their hashes compared, and faults can be ordered for any request.
"""

import base64
import hashlib
import json
import re
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = (".safetensors", ".model", ".png")
"""What goes through LFS, by the end of its name, as the Hub's .gitattributes has it."""


@dataclass
class Repository:
    """`commits` holds the files of every version, path to content, under its hash, the oldest first."""

    kind: str
    name: str
    private: bool
    sdk: str | None = None
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.commit({".gitattributes": b""}, "initial commit")

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.head]

    def commit(self, files: dict[str, bytes], message: str) -> str:
        digest = hashlib.sha1(repr((len(self.commits), sorted(files.items()), message)).encode()).hexdigest()
        self.commits[digest] = files
        self.messages.append(message)
        return digest

    def at(self, revision: str) -> dict[str, bytes] | None:
        return self.files if revision == "main" else self.commits.get(revision)

    def info(self) -> dict[str, Any]:
        card = self.files.get("README.md", b"").decode()
        metadata = yaml.safe_load(card.split("---")[1]) if card.startswith("---") else {}
        config = json.loads(self.files.get("config.json", b"{}"))
        return {
            "id": self.name,
            "modelId": self.name,
            "sha": self.head,
            "private": self.private,
            "tags": [*metadata.get("tags", []), *([config["model_type"]] if "model_type" in config else [])],
            "pipeline_tag": metadata.get("pipeline_tag"),
            "library_name": metadata.get("library_name"),
            "cardData": metadata,
            "sdk": self.sdk,
            "siblings": [{"rfilename": path} for path in self.files],
        }


@dataclass
class Fault:
    """What happens to the next `times` requests whose method and path match: an answer, or a connection cut."""

    request: str
    status: int | None
    times: int
    headers: dict[str, str]


class LoopbackHub:
    """The server; `users` maps access tokens to user names."""

    def __init__(self, users: dict[str, str]) -> None:
        self.users = users
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def fail(self, request: str, status: int | None = None, *, times: int = 1, **headers: str) -> None:
        """Order a fault for requests such as "POST .*/commit/": a status, or a cut connection where it is None."""
        self.faults.append(Fault(request, status, times, headers))

    def count(self, request: str) -> int:
        """How many requests matched a pattern so far."""
        return sum(bool(re.match(request, seen)) for seen in self.requests)


@contextmanager
def loopback_hub(**users: str) -> Iterator[LoopbackHub]:
    """A Hub that runs while the context is open; users by their tokens."""
    hub = LoopbackHub(users)
    thread = threading.Thread(target=hub.server.serve_forever, daemon=True, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
    if hub.server.mistakes:
        raise hub.server.mistakes[0]


class _Server(ThreadingHTTPServer):
    """Keeps what goes wrong in here, which the client would take for a bad line and try again."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.mistakes: list[BaseException] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):  # the client went away, or the test cut the connection
            self.mistakes.append(error)


class _RefusalError(Exception):
    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LoopbackHub

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 (http.server's names)

    def log_message(self, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        url = urlsplit(self.path)
        request = f"{self.command} {unquote(url.path)}"
        self.hub.requests.append(request)
        if (fault := self._fault(request)) and self._broken(fault):
            return
        body = self._body()
        try:
            for pattern, answer in ROUTES.items():
                if match := re.fullmatch(pattern, request):
                    return answer(self, body, parse_qs(url.query), *map(unquote, match.groups("")))
            raise _RefusalError(404, f"no such address: {request}")
        except _RefusalError as refused:
            code = {"X-Error-Code": refused.code} if refused.code else {}
            self._answer(refused.status, {"error": refused.message}, {"X-Error-Message": refused.message, **code})

    def _fault(self, request: str) -> Fault | None:
        for fault in self.hub.faults:
            if fault.times and re.match(fault.request, request):
                fault.times -= 1
                return fault
        return None

    def _broken(self, fault: Fault) -> bool:
        self.close_connection = True
        if fault.status is None:
            self.rfile.read(min(1024, int(self.headers.get("Content-Length", 0))))
            # a reset in the middle of the body, as a cable that is pulled
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        else:
            self._body()
            self._answer(fault.status, {"error": "ordered by the test"}, fault.headers)
        return True

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, content: Any = None, headers: dict[str, str] | None = None) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "X-Request-Id": "loopback", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _user(self) -> str | None:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme and token not in self.hub.users:
            raise _RefusalError(401, "Invalid credentials in Authorization header")
        return self.hub.users.get(token)

    def _repository(self, kind: str, name: str, *, write: bool = False) -> Repository:
        found = self.hub.repositories.get((kind.removesuffix("s") or "model", name))
        owner = name.partition("/")[0]
        if found is None or (found.private and self._user() != owner):
            raise _RefusalError(404 if self._user() else 401, "Repository not found", "RepoNotFound")
        if write and self._user() != owner:
            raise _RefusalError(403, "You do not have the required permissions")
        return found

    def whoami(self, body: bytes, query: dict) -> None:
        if not (user := self._user()):
            raise _RefusalError(401, "Invalid username or password.")
        self._answer(200, {"type": "user", "name": user, "orgs": []})

    def create(self, body: bytes, query: dict) -> None:
        wanted = json.loads(body)
        kind, user = wanted.get("type") or "model", self._user()
        name = f"{wanted.get('organization') or user}/{wanted['name']}"
        if name.partition("/")[0] != user:
            raise _RefusalError(403, f'You don\'t have the rights to create a {kind} under the namespace "{name}"')
        if (kind, name) in self.hub.repositories:
            raise _RefusalError(409, f"You already created this {kind} repo")
        private = wanted.get("visibility") == "private" or bool(wanted.get("private"))
        self.hub.repositories[kind, name] = Repository(kind, name, private, wanted.get("sdk"))
        self._answer(200, {"url": f"{self.hub.url}/{'spaces/' * (kind == 'space')}{name}", "name": name})

    def validate(self, body: bytes, query: dict) -> None:
        content = json.loads(body)["content"]
        try:
            yaml.safe_load(content.split("---")[1])
        except (IndexError, yaml.YAMLError) as error:
            self._answer(400, {"errors": [{"message": str(error)}], "warnings": []})
        else:
            self._answer(200, {"errors": [], "warnings": []})

    def preupload(self, body: bytes, query: dict, kind: str, name: str, revision: str) -> None:
        repository = self._repository(kind, name, write=True)
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": self._object_id(repository.files.get(file["path"]), file["path"]),
            }
            for file in json.loads(body)["files"]
        ]
        self._answer(200, {"files": files})

    @staticmethod
    def _object_id(content: bytes | None, path: str) -> str | None:
        if content is None:
            return None
        if path.endswith(LARGE):
            return hashlib.sha256(content).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def lfs_batch(self, body: bytes, query: dict, kind: str, name: str) -> None:
        self._repository(kind, name, write=True)
        objects = []
        for wanted in json.loads(body)["objects"]:
            if wanted["oid"] not in self.hub.large_files:
                upload = {"href": f"{self.hub.url}/storage/{wanted['oid']}", "header": {}}
                wanted["actions"] = {"upload": upload}
            objects.append(wanted)
        self._answer(200, {"transfer": "basic", "objects": objects})

    def store(self, body: bytes, query: dict, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _RefusalError(400, "the content is not what its hash says")
        self.hub.large_files[oid] = body
        self._answer(200, {})

    def commit(self, body: bytes, query: dict, kind: str, name: str, revision: str) -> None:
        repository = self._repository(kind, name, write=True)
        lines = [json.loads(line) for line in body.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, repository.head):
            raise _RefusalError(412, "A commit has happened since. Please refresh and try again.")
        files = dict(repository.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.large_files:
                    raise _RefusalError(400, f"the content of {value['path']} has not been uploaded")
                files[value["path"]] = self.hub.large_files[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        digest = repository.commit(files, header["summary"])
        self._answer(200, {"success": True, "commitOid": digest, "commitUrl": f"{self.hub.url}/{name}/commit/{digest}"})

    def info(self, body: bytes, query: dict, kind: str, name: str, revision: str = "main") -> None:
        repository = self._repository(kind, name)
        if repository.at(revision or "main") is None:
            raise _RefusalError(404, "no such revision", "RevisionNotFound")
        self._answer(200, repository.info())

    def tree(self, body: bytes, query: dict, kind: str, name: str, revision: str, folder: str = "") -> None:
        files = self._repository(kind, name).at(revision)
        if files is None:
            raise _RefusalError(404, "no such revision", "RevisionNotFound")
        inside = {path: content for path, content in files.items() if path.startswith(folder.strip("/"))}
        if folder and not inside:
            raise _RefusalError(404, f"{folder} does not exist", "EntryNotFound")
        self._answer(200, [self._entry(path, content) for path, content in inside.items()])

    def _entry(self, path: str, content: bytes) -> dict[str, Any]:
        oid = self._object_id(content, path)
        large = {"lfs": {"oid": oid, "size": len(content), "pointerSize": 130}} if path.endswith(LARGE) else {}
        return {"type": "file", "path": path, "size": len(content), "oid": oid, **large}

    def resolve(self, body: bytes, query: dict, kind: str, name: str, revision: str, path: str) -> None:
        repository = self._repository(kind, name)
        files = repository.at(revision)
        if files is None:
            raise _RefusalError(404, "no such revision", "RevisionNotFound")
        if path not in files:
            raise _RefusalError(404, "Entry not found", "EntryNotFound")
        commit = repository.head if revision == "main" else revision
        etag = f'"{self._object_id(files[path], path)}"'
        self._answer(200, files[path], {"ETag": etag, "X-Repo-Commit": commit})


REPOSITORY = r"([\w.-]+/[\w.-]+)"
ROUTES = {
    r"GET /api/whoami-v2": _Handler.whoami,
    r"POST /api/repos/create": _Handler.create,
    r"POST /api/validate-yaml": _Handler.validate,
    rf"POST /api/(models|spaces)/{REPOSITORY}/preupload/(.+)": _Handler.preupload,
    rf"POST /(spaces|)/?{REPOSITORY}\.git/info/lfs/objects/batch": _Handler.lfs_batch,
    r"PUT /storage/(\w+)": _Handler.store,
    rf"POST /api/(models|spaces)/{REPOSITORY}/commit/(.+)": _Handler.commit,
    rf"GET /api/(models|spaces)/{REPOSITORY}": _Handler.info,
    rf"GET /api/(models|spaces)/{REPOSITORY}/revision/(.+)": _Handler.info,
    rf"GET /api/(models|spaces)/{REPOSITORY}/tree/(\w+)(/.*)?": _Handler.tree,
    rf"(?:GET|HEAD) /(spaces|)/?{REPOSITORY}/resolve/(\w+)/(.+)": _Handler.resolve,
}
