"""What the server does for somebody who wants more than the pages offer: nothing (SEC-01, SEC-02, SEC-06).

One server with one dataset folder for hundreds of hostile requests. In the end no file outside of
the runs folder has changed, nothing of the files beside the served folders was told, nobody was asked
for anything, and the server still answers.
"""

from __future__ import annotations

import http.client
import json
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest
from PIL import Image

from lora_trainer.queue import commands
from tests.fakes.gui_server import ROOT, GuiServer
from tests.fakes.live_runs import write_status
from tests.fakes.run_folder import fake_run
from tests.gui.conftest import COMMANDS, MARKER, StartGui, as_names, tree

pytestmark = pytest.mark.timeout(300)

SECRET = "sentinel-7f3a"
RUN = "owl"
NOTHING = (400, 403, 404)
SAMPLE = f"/media/run/{RUN}/samples/step-00000003/00.png"


def climbing(target: Path) -> list[str]:
    """Return spellings of the path of a file, absolute and out of any folder up to six levels deep."""
    plain = target.as_posix()
    rest = plain.lstrip("/")
    up = [f"{'../' * levels}{rest}" for levels in (1, 2, 3, 6, 12)]
    nested = "../" * 6 + rest
    encoded = (
        "%2e%2e/ %2e%2e%2f ..%2f ..%252f %252e%252e%252f ..%5c ..%c0%af ..%ef%bc%8f \uff0e\uff0e/"
    )
    return [
        plain,
        *up,
        *(step.replace("/", "\\") for step in up),
        *(nested.replace("../", step) for step in ("....//", "..;/", *encoded.split())),
        *(f"/{nested}", f"//{rest}", f"./{nested}", f"x/../{nested}", f"//localhost/{rest}"),
        *(f"{nested}\0.png", f"{nested}%00.png", f"{plain}/.", f"{plain}\n", f"~/../../{rest}"),
        *(f"C:{plain}", f"C:\\{rest}", f"\\\\localhost\\{rest}", f"file://{plain}"),
    ]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class AtOnce(http.client.HTTPConnection):
    """Sends head and body in one piece: a server that refuses the head cuts the connection, and its answer with it,
    where a body is still on its way."""

    def __init__(self, *address: Any, **options: Any) -> None:
        super().__init__(*address, **options)
        self._pieces: list[bytes] = []

    def send(self, data: Any) -> None:
        self._pieces.append(data)

    def getresponse(self) -> http.client.HTTPResponse:
        super().send(b"".join(self._pieces))
        return super().getresponse()


@dataclass(kw_only=True)
class Attacker:
    """A client that sends requests as they stand, where browsers and libraries tidy a path up before."""

    server: GuiServer
    cookie: str = ""
    escapes: list[str] = field(default_factory=list)
    """Answers with the word that stands in files outside of the served folders, and in no request."""

    def ask(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: bytes = b""
    ) -> Reply:
        """Send one request as it stands; a header of the value "" is left out."""
        connection = AtOnce("127.0.0.1", self.server.port, timeout=120)
        fields = {"Host": self.server.host, "Cookie": self.cookie, **(headers or {})}
        if body or method == "POST":
            fields.setdefault("Content-Length", str(len(body)))
        with closing(connection):
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in fields.items():
                if value:
                    connection.putheader(name, value.encode())
            connection.endheaders(body or None)
            answer = connection.getresponse()
            known = {name.lower(): value for name, value in answer.getheaders()}
            reply = Reply(status=answer.status, headers=known, body=answer.read())
        if SECRET.encode() in reply.body:
            self.escapes.append(f"{method} {path} {body[:300]!r}")
        return reply

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, value: Any, **headers: str) -> Reply:
        """Send JSON."""
        fields = {"Content-Type": "application/json", **headers}
        return self.ask("POST", path, headers=fields, body=json.dumps(value).encode())

    def upload(self, name: str, data: bytes = b"x", **headers: str) -> Reply:
        """Send a file as a form of a page does, under any name."""
        mark = uuid.uuid4().hex
        disposition = b'Content-Disposition: form-data; name="files"; filename="'
        named = name.encode(errors="replace") + b'"\r\nContent-Type: image/png\r\n\r\n'
        body = b"--%b\r\n%b%b%b\r\n--%b--\r\n" % (
            *(mark.encode(), disposition, named, data, mark.encode()),
        )
        fields = {"Content-Type": f"multipart/form-data; boundary={mark}", **headers}
        return self.ask("POST", "/gradio_api/upload", headers=fields, body=body)

    def call(self, functions: Iterable[tuple[int, list[Any]]]) -> None:
        """Call operations, each by number and values, as gradio_client does; wait for all answers."""
        session = uuid.uuid4().hex[:11]
        joined = 0
        for function, values in functions:
            body = {"data": values, "fn_index": function, "session_hash": session}
            joined += self.post("/gradio_api/queue/join?", body).status == 200
        if joined:
            self.get(f"/gradio_api/queue/data?session_hash={session}")


def quoted(texts: list[str]) -> Iterator[str]:
    """Yield texts for a place in an address, as they are where that is possible, and quoted."""
    for text in texts:
        if text.isascii() and text.isprintable() and not set(text) & set(" #?"):
            yield text
        yield quote(text, safe="")


@dataclass(frozen=True, kw_only=True)
class Place:
    """The folders on the server's disk, and a port of this machine that nobody has a reason to ask."""

    root: Path
    runs: Path
    datasets: Path
    outside: Path
    canary: socket.socket

    @property
    def secret(self) -> Path:
        return self.outside / "b.png"

    def files(self) -> dict[str, bytes]:
        """Return every file but those that the interface keeps for itself, and wishes left for a run by its buttons."""
        kept = ("runs/.gui/", "runs/.queue/")
        files = tree(self.root).items()
        return {
            name: data
            for name, data in files
            if not name.startswith(kept) and "/control/" not in name
        }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with socket.create_server(("127.0.0.1", 0)) as canary:
        root = tmp_path_factory.mktemp("attacked")
        folders = {name: root / name for name in ("runs", "datasets", "outside")}
        place = Place(root=root, canary=canary, **folders)
        for name in (RUN, *as_names(COMMANDS)):
            fake_run(place.runs / name, steps=3).write()
        states = place.runs / RUN / "states" / "step-00000003"
        states.mkdir(parents=True)
        (states / "weights.safetensors").write_bytes(SECRET.encode())
        place.outside.mkdir()
        linked = place.datasets / "captions"
        for folder in (place.datasets / "set", linked):
            folder.mkdir(parents=True)
        for path in (place.datasets / "set" / "a.png", place.outside / "a.png", linked / "a.png"):
            Image.new("RGB", (64, 64)).save(path)
        place.secret.write_bytes((place.outside / "a.png").read_bytes() + SECRET.encode())
        (place.outside / f"{SECRET}.png").write_bytes(b"a list of the folder names it")
        for name in ("secret.txt", "run.json", "events.jsonl", "report.html"):
            (place.outside / name).write_text(SECRET)
        write_status(place.outside, message=SECRET)  # as if it trained, so that a stop is written
        described = {"file_name": "b.png", "text": SECRET}
        (place.outside / "metadata.jsonl").write_text(json.dumps(described))
        for link, target in (
            (place.runs / RUN / "linked.png", place.secret),
            (place.runs / "linked", place.outside),
            (place.datasets / "set" / "linked.png", place.secret),
            (place.datasets / "linked", place.outside),
            (linked / "a.txt", place.outside / "secret.txt"),
            (linked / "metadata.jsonl", place.outside / "metadata.jsonl"),
            (linked / "folder", place.outside),
        ):
            link.symlink_to(target)
        yield place


@pytest.fixture(scope="module")
def attacker(place: Place, gui_server: StartGui) -> Iterator[Attacker]:
    """Return a client with the key; at the end nothing may have come out or been changed."""
    before = place.files()
    server = gui_server(place.runs, f"--datasets={place.datasets}")
    client = Attacker(server=server)
    reply = client.get(f"/?{urlsplit(server.link).query}")
    assert reply.headers["set-cookie"].startswith(server.cookie)
    client.cookie = reply.headers["set-cookie"].partition(";")[0]
    yield client
    assert client.escapes == []
    assert place.files() == before
    assert not [name for name, data in tree(place.runs / ".gui").items() if SECRET.encode() in data]
    assert not list(place.root.rglob(MARKER)) and not (ROOT / MARKER).exists()
    place.canary.setblocking(False)
    with pytest.raises(BlockingIOError):
        place.canary.accept()
    assert not commands.items(place.runs)
    assert client.get("/").status == 200


def thumb(attacker: Attacker, folder: str, file: str) -> int:
    asked = urlencode({"folder": folder, "file": file, "size": "96"}, errors="replace")
    return attacker.get(f"/media/thumb?{asked}").status


def test_no_spelling_leads_out_of_a_run_or_a_dataset(attacker: Attacker, place: Place) -> None:
    assert len(climbing(place.secret)) >= 25
    own = place.datasets / "set"
    assert attacker.get(f"/media/run/{RUN}/run.json").status == 200
    assert thumb(attacker, str(own), "a.png") == 200
    for spelling in quoted(climbing(place.outside / "report.html")):
        for route in (f"/media/run/{RUN}/", "/static/", "/gradio_api/file=", "/file="):
            assert attacker.get(route + spelling).status in NOTHING
    for spelling in quoted(climbing(place.outside)):
        assert attacker.get(f"/media/run/{spelling}/run.json").status in NOTHING
    for spelling in quoted(climbing(place.runs / ".gui" / "key")):
        assert attacker.get(f"/gradio_api/file={spelling}").status in NOTHING
    for file, folder in zip(climbing(place.secret), climbing(place.outside), strict=True):
        assert thumb(attacker, str(own), file) in NOTHING
        assert thumb(attacker, folder, "a.png") in NOTHING, folder
        assert thumb(attacker, f"{own}/{folder}", "a.png") in NOTHING
    for folder, file in ((own, "linked.png"), (place.datasets / "linked", "a.png")):
        assert thumb(attacker, str(folder), file) in NOTHING
    state = f"{RUN}/states/step-00000003/weights.safetensors"
    for path in (
        *(state, f"{RUN}/../linked/run.json", f"{RUN}/linked.png", "linked/run.json"),
        *(".gui/key", ".queue/x.json", f"{RUN}/", "/"),
    ):
        assert attacker.get(f"/media/run/{path}").status in NOTHING


def test_no_operation_leads_out_or_asks_an_address(attacker: Attacker, place: Place) -> None:
    address = f"http://127.0.0.1:{place.canary.getsockname()[1]}/x.png"
    upload = {"path": address, "url": address, "meta": {"_type": "gradio.FileData"}}
    numbers = {
        each["api_name"]: each["id"]
        for each in json.loads(attacker.get("/config").body)["dependencies"]
    }
    assert {"plan", "train", "validate", "caption"} <= numbers.keys(), "else nothing is tried here"
    hostile = (str(place.secret), str(place.outside), COMMANDS[1], "../outside", ".gui", "\0")
    for value in (*hostile, address, upload, [upload], 10**400, None):
        attacker.call((number, [value] * count) for number in numbers.values() for count in (1, 5))
        attacker.call([(numbers["train"], [value, "", "balanced", "", None])])
        attacker.call([(numbers["validate"], [RUN, value]), (numbers["caption"], [value, "blip"])])
    for folder in (place.outside, place.runs / ".gui"):
        assert not (folder / "control").exists()
    for body in ({"data": [], "fn_index": 10**6}, {"data": "x", "fn_index": 0}, [], None):
        attacker.post("/gradio_api/queue/join", body)
        assert attacker.post("/gradio_api/run/start", body).status == 404
        assert attacker.post("/gradio_api/component_server/", body).status == 404


EDIT = {"kind": "append", "text": "x", "replacement": "", "joint": ", "}
DATASET_WISHES: Mapping[str, Mapping[str, Any]] = {
    **dict.fromkeys(
        ("look", "glance", "check", "undo", "redo", "caption_state", "caption_stop"), {}
    ),
    "caption_names": {},
    "caption_undo": {},
    **dict.fromkeys(("exclude", "put_back"), {"files": ["a.png"]}),
    "keep_one": {"kind": "duplicate"},
    "closer": {"file": "a.png"},
    "subject": {"file": "a.png"},
    "mask": {"file": "a.png", "mask": ""},
    "save": {"file": "a.png", "text": "changed", "seen": "", "group": "g"},
    "preview": {"files": ["a.png"], **EDIT},
    "apply": {"seen": {"a.png": ""}, **EDIT},
    "caption": {"files": ["a.png"], "model": "blip", "mode": "missing"},
}
"""What the scripts send for each question about a dataset, beside its folder."""
ASKED = (
    *(
        "/queue/look",
        "/queue/times",
        "/series/look",
        "/compare/sheet",
        "/compare/curves",
        "/trash/put",
        "/trash/back",
        "/trash/empty",
    ),
    *(
        "/doctor/cache",
        "/doctor/clear",
        "/doctor/bases",
        "/doctor/fits",
        "/doctor/offline",
        "/browse/look",
        "/browse/chosen",
        "/datasets/recent",
    ),
    *(f"/datasets/{name}" for name in DATASET_WISHES),
    "/home/look",
    *("/run/look", "/run/chart", "/run/prompt", "/run/sample"),
    *("/share/folder", "/share/copy", "/share/signed-in", "/share/sign-in", "/share/publish"),
    *("/share/published", "/share/comfyui", "/share/seen", "/share/civitai"),
    *(f"/library/{name}" for name in ("search", "tries", "rename", "note", "texts", "preview")),
    *(f"/library/{name}" for name in ("jobs", "check", "export", "inside", "bring")),
    *(f"/train/{name}" for name in ("look", "start", "bases", "fits", "found")),
)
"""What the scripts of the pages ask."""


def test_what_a_script_asks_is_refused_where_it_names_something_else(
    attacker: Attacker, place: Place
) -> None:
    names = (*climbing(place.secret), *climbing(place.outside), "linked", f"{RUN}/../linked/a.png")
    for number, path in enumerate(ASKED):
        for body in (None, "x", 5, [], [{}], {"id": ["x"]}, {"ref": 5}, {"kind": "run", "ref": {}}):
            assert attacker.post(path, body).status == 400
        # Refused for its keys before a value is read, so that a spelling or two a path are enough for all.
        for name in names[number :: len(ASKED)]:
            refused = hostile_wish(name, name)
            assert attacker.post(path, refused).status == 400, "a key that no script sends"
        assert attacker.get(path).status == 405
        for origin in ("http://evil.example", "null"):
            assert attacker.post(path, {}, Origin=origin).status == 403
        assert attacker.post(path, {}, Cookie="").status == 403
    for name in names:
        for kind in ("run", "lora", "dataset"):
            assert "error" in json.loads(
                attacker.post("/trash/put", {"kind": kind, "ref": name}).body
            ), name
        wishes = {
            "/trash/back": {"id": name[:40]},
            "/compare/sheet": {"run": name},
            "/compare/curves": {"runs": [name, name]},
            "/series/look": {"id": name, "study": name, "stamp": ""},
            "/queue/look": {"stamp": name, "press": {"action": "stop", "id": name}},
            "/browse/look": {"kind": "dataset", "path": name},
            "/browse/chosen": {"kind": "base", "path": name},
            "/train/look": {"draft": name[:40]},
            "/train/start": {"draft": name[:40]},
            "/train/bases": {"draft": name[:40]},
            "/train/fits": {"draft": name[:40], "source": "auto"},
            "/train/found": {"named": name},
            **{f"/datasets/{of}": {"folder": name, **more} for of, more in DATASET_WISHES.items()},
            "/home/look": {"stamp": name, "press": {"action": "stop", "run": name}},
            "/run/look": {"run": name, "stamp": "", "keys": {}, "press": {"action": "best"}},
            "/run/chart": {
                "run": name,
                "smoothing": "some",
                "log": False,
                "outliers": False,
                "first": 0,
                "last": 9,
            },
            "/run/prompt": {"run": name},
            "/run/sample": {"run": name, "prompt": ""},
            "/share/copy": {"file": name, "folder": name},
            "/share/comfyui": {"file": name, "folder": name, "address": name, "prompt": ""},
            "/share/seen": {"file": name},
            "/share/publish": {"file": name, "name": "x", "who": "private"},
            "/share/published": {"file": name},
            "/share/civitai": {"file": name, "weight": 1},
            "/library/bring": {"batch": name, "name": name},
            "/library/rename": {"file": name, "name": name},
            "/library/note": {"file": name, "text": name},
            "/library/preview": {"file": name, "batch": name},
            "/library/tries": {"file": name, "stamp": "", "stop": True},
            "/library/jobs": {"file": name, "stamp": ""},
            "/library/check": {"file": name},
            "/library/inside": {"file": name},
            "/library/export": {
                "file": name,
                "weight": 1,
                "notes": "",
                "folder": name,
            },
        }
        for path, wish in wishes.items():
            assert "error" in json.loads(attacker.post(path, wish).body), name


def test_what_is_asked_of_a_dataset_leads_to_no_file_from_elsewhere(
    attacker: Attacker, place: Place
) -> None:
    folders = [
        *(str(place.datasets / name) for name in ("linked", "captions", "captions/folder", "set")),
        f"{place.datasets}/../{place.outside.name}",
    ]
    for folder in folders:
        for kind in ("dataset", "base"):
            attacker.post("/browse/look", {"kind": kind, "path": folder})
        attacker.post("/datasets/look", {"folder": folder})
        for name in ("linked.png", "../../outside/b.png", str(place.secret)):
            named = {"file": name, "files": [name], "seen": {name: ""}}
            for of in ("exclude", "put_back", "closer", "mask", "preview", "apply"):
                more = DATASET_WISHES[of]
                wish = {"folder": folder, **more, **{k: named[k] for k in more if k in named}}
                assert attacker.post(f"/datasets/{of}", wish).status == 200, "as the script asks"
            save = {**DATASET_WISHES["save"], "folder": folder, "file": name}
            assert attacker.post("/datasets/save", save).status == 200


def test_a_draft_leads_to_no_folder_or_base_from_elsewhere(
    attacker: Attacker, place: Place
) -> None:
    attacker.get("/train?draft=new")
    draft = max(path.stem for path in (place.runs / ".gui" / "drafts").glob("*.json"))
    queued = len(commands.items(place.runs))
    for name in (*climbing(place.outside), *COMMANDS, str(place.datasets / "linked")):
        for key, wanted in (("dataset", place.datasets / "set"), ("base.model", name)):
            typed = {"dataset": name if key == "dataset" else str(wanted), "base.model": "auto"}
            typed[key] = name
            wish = {"draft": draft, "typed": typed}
            asked = attacker.post("/train/look", {**wish, "show": ["images", "plan"]})
            assert asked.status == 200
            if key == "dataset":
                assert json.loads(asked.body)["plan"]["works"] is False, name
                assert "error" in json.loads(attacker.post("/train/start", wish).body), name
    assert len(commands.items(place.runs)) == queued
    for query in ({"folder": str(place.outside)}, {"again": "linked"}, {"draft": "../../outside"}):
        assert attacker.get(f"/train?{urlencode(query)}").status == 200
        assert not (place.outside / "_excluded").exists()


def hostile_wish(folder: str, name: str) -> dict[str, Any]:
    """Return an object with every key that a page's script sends."""
    words = {"text": "changed", "group": "g", "kind": "append", "replacement": "x", "joint": ", "}
    more = {"files": [name], "step": 3, "key": "data.cache_dir", "over": True}
    return words | {
        **more,
        **dict.fromkeys(("folder", "dataset", "draft", "run", "value"), folder),
        **dict.fromkeys(("path", "file", "name"), name),
        **dict.fromkeys(("seen", "trigger", "resolution"), ""),
        "json": json.dumps({"data": {"x": folder}}),
    }


def test_uploads_stay_where_uploads_wait_and_are_no_pages(attacker: Attacker, place: Place) -> None:
    for name in ("a.png", str(place.secret), "x.html"):
        assert attacker.upload(name).status == 404, "the form of Gradio's own pages"
    for batch in ("0123456789abcdef", "..", "a/../../key"):
        for name in ("a.png", "../../a.png", str(place.secret)):
            body = {"name": "x", "files": [name]}
            assert attacker.post(f"/upload/{batch}", body).status >= 400
            number = attacker.ask("PUT", f"/upload/{batch}/{name.replace('/', '%2f')}", body=b"x")
            assert number.status >= 400
    for wrong in (None, "x", {"files": {}}, {"files": [{"path": str(place.secret)}]}):
        assert attacker.post("/upload/0123456789abcdef", wrong).status == 400
    for length in (str(2**40), "99999999999999999999", "-1", "x"):
        for path in ("/gradio_api/queue/join", "/upload/0123456789abcdef/0"):
            status = attacker.ask("POST", path, headers={"Content-Length": length}).status
            assert status in (400, 413)


def test_other_names_and_other_pages_are_refused(attacker: Attacker) -> None:
    here = attacker.server.host
    for host in (here, here.upper(), here.partition(":")[0]):
        assert attacker.get("/", Host=host).status == 200
    for host in ("127.0.0.1", "LOCALHOST:1", "[::1]:9", f"127.0.0.1:{attacker.server.port}"):
        for path in ("/", "/live", "/config", SAMPLE):  # what a server on another port has caught
            assert attacker.get(path, Host=host).status == 403
    names = ("evil.example", "127.0.0.1.evil.example", "localhost@evil.example")
    for host in (*names, "0.0.0.0", "127.1"):
        for path in ("/", "/config", SAMPLE, "/gradio_api/queue/data"):
            assert attacker.get(path, Host=host).status == 400
    for host in ("2130706433", "[::ffff:127.0.0.1]", "[::1", "10.0.0.1", "127.0.0.1, evil.example"):
        assert attacker.get("/", Host=host).status == 400
    join = {"data": [], "fn_index": 0, "session_hash": "x"}
    for origin in (
        *("http://evil.example", "null", "file://", "http://[", "http://127.0.0.1:1"),
        *(f"http://{here}.evil.example", f"http://evil.example//{here}", "http://127.0.0.1"),
    ):
        assert attacker.post("/gradio_api/queue/join", join, Origin=origin).status == 403
        assert attacker.upload("a.png", Origin=origin).status == 403
        assert attacker.get("/config", Origin=origin).status == 403
        form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": origin}
        assert attacker.ask("POST", "/", headers=form, body=b"a=b").status == 403
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        reply = attacker.ask("OPTIONS", "/gradio_api/queue/join", headers=preflight)
        assert reply.status == 403 and "access-control-allow-origin" not in reply.headers
    for site in ("cross-site", "same-site"):
        image = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors", "Sec-Fetch-Dest": "image"}
        for path in ("/", "/config", SAMPLE):
            assert attacker.ask("GET", path, headers=image).status == 403
        framed = {**image, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
        assert attacker.ask("GET", "/", headers=framed).status == 403
        linked = {**framed, "Sec-Fetch-Dest": "document"}
        assert attacker.ask("GET", "/", headers=linked).status == 200
        assert attacker.ask("POST", "/", headers=linked).status == 403


def test_routes_that_no_page_uses_are_closed(attacker: Attacker, place: Place) -> None:
    address = f"http://127.0.0.1:{place.canary.getsockname()[1]}/"
    for path in (
        *(f"proxy={address}", "deep_link", "vibe-edit", f"file={address}x", "file=HTTPS://x/"),
        *("file=//host/share", "file=\\\\host\\share", "process_recording", "call/x", "run/x"),
        *("openapi.json", "token", ""),
    ):
        assert attacker.get(f"/gradio_api/{path}").status == 404
    for path in ("/monitoring", "//gradio_api/runs", "/login", "/logout", "/openapi.json"):
        assert attacker.get(path).status == 404


@pytest.mark.parametrize(
    "path",
    [
        *("/", f"/run?run={RUN}", "/queue", "/compare", "/trash", "/doctor", "/library", "/train"),
        *("/settings", "/datasets", "/nowhere"),
        "/ui/queue/script.js",
    ],
)
def test_no_script_but_those_of_files_runs_on_a_page(attacker: Attacker, path: str) -> None:
    reply = attacker.get(path, Accept="text/html")
    assert reply.status == (404 if path == "/nowhere" else 200)
    assert "script-src 'self';" in reply.headers["content-security-policy"]
    assert b"<script>" not in reply.body and b" on" + b"click=" not in reply.body


def test_without_the_key_nothing_is_told_and_no_answer_leaves_the_browser(
    attacker: Attacker,
) -> None:
    paths = ("/", "/config", "/theme.css", f"/media/run/{RUN}/run.json", "/gradio_api/info")
    for key in ("", "key=", "key=wrong", "key[]=x", "key=%"):
        for path in paths:
            for cookie in ("", "lora_train_key=x", f"lora_train_key_{attacker.server.port}=x"):
                reply = attacker.get(f"{path}?{key}", Cookie=cookie)
                assert (reply.status, reply.headers.get("set-cookie")) == (403, None)
                assert b"Open the link that lora-train-gui printed" in reply.body
    upload = {"Cookie": ""}
    assert attacker.ask("PUT", "/upload/0123456789abcdef/0", upload, b"x").status == 403
    for path in (*paths, "/none", "/media/x"):
        for host in (attacker.server.host, f"127.0.0.1:{attacker.server.port}", "evil.example"):
            headers = attacker.get(path, Host=host).headers
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src")
            assert "http" not in policy and "*" not in policy
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert "x-frame-options" in headers and "server" not in headers
