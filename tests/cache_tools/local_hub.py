"""As much of the Hugging Face hub's HTTP interface as its client uses for one file: repositories, commits, large files.

huggingface_hub itself, in a process of its own, talks to it as it does to the hub, by ``HF_ENDPOINT``.
"""

import hashlib
import http.server
import json
import re
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_a_token_of_this_test"


class Hub:
    """One model repository, ``team/kernels``: its commits with their large files."""

    def __init__(self):
        self.commits = {"0" * 40: {}}
        self.branches = {"main": "0" * 40}
        self.contents = {}
        self.downloads = 0

    def commit(self, revision):
        """The commit that a branch or a commit's own name means, or None."""
        found = self.branches.get(revision, revision)
        return found if found in self.commits else None


def handler_of(hub):
    """A handler of requests that serves a hub."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def _serve(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            path = unquote(urlsplit(self.path).path)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}" and not path.startswith("/storage/"):
                return self._fail(401, "RepoNotFound")
            for known, pattern, answer in routes:
                found = re.fullmatch(pattern, path)
                if known == self.command and found:
                    return answer(self, body, *found.groups())
            return self._fail(404, "RepoNotFound")

        do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815

        def _repository(self, _, revision="main"):
            commit = hub.commit(revision or "main")
            if commit is None:
                return self._fail(404, "RevisionNotFound")
            return self._answer({"id": "team/kernels", "sha": commit, "siblings": []})

        def _paths(self, body, revision):
            files = hub.commits[hub.commit(revision)]
            wanted = parse_qs(body.decode())["paths"]
            return self._answer([_entry(path, files[path], hub) for path in wanted if path in files])

        def _preupload(self, body, _):
            files = [{"path": f["path"], "uploadMode": "lfs", "shouldIgnore": False} for f in json.loads(body)["files"]]
            return self._answer({"files": files})

        def _batch(self, body):
            host = self.headers["Host"]
            objects = [
                item | {"actions": {"upload": {"href": f"http://{host}/storage/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            return self._answer({"transfer": "basic", "objects": objects})

        def _store(self, body, oid):
            if hashlib.sha256(body).hexdigest() != oid:
                return self._fail(400, "BadDigest")
            hub.contents[oid] = body
            return self._answer({})

        def _commit(self, body, branch):
            if branch not in hub.branches:
                return self._fail(404, "RevisionNotFound")
            values = [item["value"] for item in map(json.loads, body.splitlines()) if item["key"] == "lfsFile"]
            files = hub.commits[hub.branches[branch]] | {value["path"]: value["oid"] for value in values}
            commit = hashlib.sha1(json.dumps([len(hub.commits), files]).encode()).hexdigest()
            hub.commits[commit], hub.branches[branch] = files, commit
            url = f"http://{self.headers['Host']}/team/kernels/commit/{commit}"
            return self._answer({"commitUrl": url, "commitOid": commit, "pullRequestUrl": None})

        def _file(self, _, revision, path):
            commit = hub.commit(revision)
            oid = hub.commits.get(commit, {}).get(path)
            if oid is None:
                return self._fail(404, "EntryNotFound")
            hub.downloads += self.command == "GET"
            return self._answer(hub.contents[oid], ETag=f'"{oid}"', **{"X-Repo-Commit": commit})

        def _answer(self, content, **headers):
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Content-Type", "application/json")
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def _fail(self, status, code):
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    routes = [
        ("GET", "/api/models/team/kernels(?:/revision/(.+))?", Handler._repository),
        ("POST", "/api/models/team/kernels/paths-info/(.+)", Handler._paths),
        ("POST", "/api/models/team/kernels/preupload/(.+)", Handler._preupload),
        ("POST", "/team/kernels.git/info/lfs/objects/batch", Handler._batch),
        ("PUT", "/storage/([0-9a-f]{64})", Handler._store),
        ("POST", "/api/models/team/kernels/commit/(.+)", Handler._commit),
        ("HEAD", "/team/kernels/resolve/([^/]+)/(.+)", Handler._file),
        ("GET", "/team/kernels/resolve/([^/]+)/(.+)", Handler._file),
    ]
    return Handler


def _entry(path, oid, hub):
    size = len(hub.contents[oid])
    lfs = {"oid": oid, "size": size, "pointerSize": 134}
    return {"type": "file", "path": path, "size": size, "oid": "1" * 40, "lfs": lfs}
