"""The source `hf:` against a hub on the loopback interface; nothing here leaves the machine."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from headrace.core.model.load import resolve
from headrace.hooks.errors import ModelError
from headrace.hooks.registry import Registry
from headrace.plugins.hub import HubSource, Reference

SHA, OTHER_SHA = "a" * 40, "b" * 40
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors": bytes(70_000),
    "pytorch_model.bin": b"not wanted",
    "consolidated.safetensors": b"not wanted",
    "onnx/config.json": b"not wanted",
    "tiny.Q4_0.gguf": b"GGUF" + bytes(5000),
    "more/[v1] x.gguf": b"GGUF!",
}


class Hub(ThreadingHTTPServer):
    """Answers as much of the hub's API as a download needs.

    Repositories: `org/model` with FILES (and a branch `old` without the tokenizer), `org/bare` with GGUF files only,
    `org/gated`, `org/cut`, whose weights break off, and `org/broken`, which fails.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.asked = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"

    def got(self):
        """Names of the files that were downloaded."""
        return sorted(path.rsplit("/", 1)[1] for method, path in self.asked if method == "GET" and "/resolve/" in path)


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = urlsplit(self.path).path
        self.server.asked.append((self.command, path))
        match path.strip("/").replace("%5B", "[").replace("%5D", "]").replace("%20", " ").split("/"):
            case ["api", "models", "org", "gated", *_]:
                self.refuse(401, "GatedRepo", "Access to model org/gated is restricted.")
            case ["api", "models", "org", "broken", *_]:
                self.refuse(500, "", "on fire")
            case ["api", "models", "org", ("model" | "bare" | "cut") as name, "revision", "main"]:
                self.send(json.dumps({"id": f"org/{name}", "sha": SHA, "siblings": []}).encode())
            case ["api", "models", "org", "model", "revision", "old"]:
                self.send(json.dumps({"id": "org/model", "sha": OTHER_SHA, "siblings": []}).encode())
            case ["api", "models", "org", "model", "revision", _]:
                self.refuse(404, "RevisionNotFound", "Invalid rev id")
            case ["api", "models", "org", name, "tree", sha]:
                self.send(json.dumps([self.entry(path) for path in self.names(name, sha)]).encode())
            case ["org", name, "resolve", sha, *file]:
                self.send(FILES["/".join(file)], commit=sha, cut=name == "cut" and self.command == "GET")
            case _:
                self.refuse(404, "RepoNotFound", "Repository not found")

    def names(self, name, sha):
        names = [name for name in FILES if name.endswith(".gguf")] if name == "bare" else list(FILES)
        return [name for name in names if sha == SHA or name != "tokenizer.json"]

    def entry(self, path):
        return {"type": "file", "path": path, "size": len(FILES[path]), "oid": hashlib.sha1(FILES[path]).hexdigest()}

    def send(self, body, *, commit="", cut=False):
        tag = hashlib.sha1(body).hexdigest()
        # A proxy between that lost the second half.
        body = body[: len(body) // 2] if cut and len(body) > 100 else body
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit} if commit else {"Content-Type": "application/json"}
        self.reply(200, headers, body)

    def refuse(self, status, code, message):
        self.reply(status, {"X-Error-Code": code, "X-Error-Message": message}, b"")

    def reply(self, status, headers, body):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


class Bring:
    """Resolves references at *hub*, with a cache of its own, and keeps what was told of progress."""

    def __init__(self, url, cache):
        self.source = HubSource(endpoint=url, cache=cache)
        self.told = []

    def __call__(self, reference):
        return resolve(reference, {"hf": self.source}, lambda *progress: self.told.append(progress))


@pytest.fixture
def bring(hub, tmp_path):
    return Bring(hub.url, tmp_path / "cache")


def test_a_folder_comes_with_what_is_needed_and_no_more(bring, hub):
    artifact = bring("hf:org/model")

    assert (artifact.kind, artifact.name) == ("safetensors", "model")
    names = sorted(path.name for path in artifact.path.iterdir())
    assert names == ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert all((artifact.path / name).read_bytes() == FILES[name] for name in names)
    assert hub.got() == names


def test_progress_is_told_in_bytes_up_to_the_end(bring):
    bring("hf:org/model")

    size = sum(len(FILES[n]) for n in ("chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"))
    assert bring.told[-1] == ("hf:org/model", size, size)
    assert all(done <= size for _, done, _ in bring.told)
    assert [done for _, done, _ in bring.told] == sorted(done for _, done, _ in bring.told)


def test_what_is_in_the_cache_is_not_downloaded_again(bring, hub):
    first = bring("hf:org/model")
    hub.asked.clear()

    assert bring("hf:org/model") == first
    assert hub.got() == []


def test_a_revision_is_another_folder(bring):
    assert (bring("hf:org/model").path / "tokenizer.json").exists()
    assert not (bring("hf:org/model@old").path / "tokenizer.json").exists()
    assert bring(f"hf:org/model@{SHA}").path == bring("hf:org/model").path


@pytest.mark.parametrize(("file", "name"), [("tiny.Q4_0.gguf", "tiny.Q4_0"), ("more/[v1] x.gguf", "[v1] x")])
def test_a_gguf_file_comes_alone(file, name, bring, hub):
    artifact = bring(f"hf:org/model/{file}")

    assert (artifact.kind, artifact.name) == ("gguf", name)
    assert artifact.path.read_bytes() == FILES[file]
    assert len(hub.got()) == 1


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (
            "hf:org/nothing",
            r"hf:org/nothing: the hub knows no model org/nothing, .* check the spelling, or set HF_TOKEN",
        ),
        ("hf:org/gated", "access to org/gated must be granted first; ask for it on the model's page"),
        ("hf:org/model@new", "org/model has no revision new; name a branch"),
        ("hf:org/model/none.gguf", r"there is no file none\.gguf in org/model"),
        ("hf:org/bare", r"no config\.json in org/bare; .* hf:org/bare/FILE\.gguf"),
        ("hf:org/cut", r"the download broke off: .* 70000 .* 35000"),
        ("hf:org/broken", "the hub cannot be reached .*500 .*; check the connection and HF_ENDPOINT"),
        ("hf:org/b--d..", "not a name the hub could have"),
    ],
)
def test_what_cannot_be_brought_is_said_with_what_to_do(reference, message, bring):
    with pytest.raises(ModelError, match=message):
        bring(reference)


def test_a_download_that_broke_off_is_not_taken_for_a_model(bring, hub):
    for _ in range(2):
        with pytest.raises(ModelError, match="broke off"):
            bring("hf:org/cut")


def test_a_hub_that_does_not_answer_is_named_as_the_cause(tmp_path):
    with pytest.raises(
        ModelError, match=r"hf:org/model: the hub cannot be reached \(ConnectError: .* check the connect"
    ):
        Bring("http://127.0.0.1:1", tmp_path)("hf:org/model")


def test_what_the_cache_holds_is_used_when_the_hub_is_gone(bring, tmp_path):
    first = bring("hf:org/model")

    assert Bring("http://127.0.0.1:1", tmp_path / "cache")("hf:org/model") == first
    with pytest.raises(ModelError, match="all files of org/model must be in the cache, and they are not"):
        Bring("http://127.0.0.1:1", tmp_path / "cache")("hf:org/model/tiny.Q4_0.gguf")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("org/name", ("org/name", "", "")),
        ("org/name@refs/pr/1", ("org/name", "", "refs/pr/1")),
        ("org/name/a/b.gguf@v1", ("org/name", "a/b.gguf", "v1")),
    ],
)
def test_a_reference_has_repository_file_and_revision(text, parts):
    assert Reference.parse(text) == parts
    assert str(Reference.parse(text)) == f"hf:{text}"


@pytest.mark.parametrize(
    "text", ["", "name", "/name", "org/", "org/name@", "org/name/", "org/name/../x.gguf", "a/b/c.bin"]
)
def test_what_is_no_reference_is_refused_without_asking_the_hub(text):
    with pytest.raises(ModelError, match=r"must be (hf:ORG/NAME|a \*\.gguf)"):
        HubSource(endpoint="http://127.0.0.1:1").resolve(text, lambda *progress: None)


SCRIPT = """
import sys
from headrace.hooks.errors import ModelError
from headrace.hooks.registry import Registry
from headrace.plugins.hub import HubSource
try:
    print(HubSource().resolve(sys.argv[1], lambda *progress: None).path)
except ModelError as error:
    print("ModelError:", error)
"""


def run(reference, home, **variables):
    """What a process of its own says, for the library reads its variables once."""
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, reference],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_hubs_own_variables_count(hub, tmp_path):
    online = run("org/model", tmp_path, HF_ENDPOINT=hub.url, NO_PROXY="127.0.0.1")
    assert online.startswith(str(tmp_path))
    hub.asked.clear()

    assert run("org/model", tmp_path, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1") == online
    refused = run("org/other", tmp_path, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="1")
    assert refused.startswith(
        "ModelError: hf:org/other: HF_HUB_OFFLINE is set, so all files of org/other must be in the"
    )
    assert "start once without it, or download it elsewhere and give its path" in refused
    assert hub.asked == []


def test_the_source_is_offered_by_its_entry_point():
    registry = Registry.discover()

    assert "hf" in {component.name for component in registry.offered("model_source")}
