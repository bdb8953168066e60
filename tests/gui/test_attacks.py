"""What the server does for somebody who wants more than the pages offer: nothing (SEC-01 to SEC-06).

One server with one dataset folder for some hundred hostile requests. In the end no file outside of
the runs folder has changed, nothing of the files beside the served folders was told, nobody was asked
for anything, and the server still answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from PIL import Image

from lora_trainer.queue import commands
from tests.fakes.attacks import (
    COMMANDS,
    MARKER,
    MARKUP,
    Attacker,
    Call,
    Reply,
    as_names,
    climbing,
    quoted,
)
from tests.fakes.gui_server import ROOT, GuiServer
from tests.fakes.run_folder import fake_run
from tests.gui.conftest import StartGui

pytestmark = pytest.mark.timeout(300)

SECRET = "sentinel-7f3a"
RUN = "owl"
MIN_REQUESTS = 300


@dataclass
class Canary:
    """A port of this machine that nobody has a reason to ask."""

    listening: socket.socket
    asked: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.listening.getsockname()[1]}"

    def watch(self) -> None:
        while True:
            try:
                connection, _ = self.listening.accept()
            except OSError:  # closed at the end
                return
            with connection:
                connection.settimeout(5)
                self.asked.append(connection.recv(1000).decode("latin-1"))


@dataclass(frozen=True, kw_only=True)
class Place:
    """The folders on the server's disk."""

    root: Path

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def datasets(self) -> Path:
        return self.root / "datasets"

    @property
    def outside(self) -> Path:
        return self.root / "outside"

    @property
    def secret(self) -> Path:
        return self.outside / "b.png"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    place = Place(root=tmp_path_factory.mktemp("attacked"))
    for name in (RUN, *as_names(COMMANDS)):
        fake_run(place.runs / name, steps=3).write()
    states = place.runs / RUN / "states" / "step-00000003"
    states.mkdir(parents=True)
    (states / "weights.safetensors").write_bytes(SECRET.encode())
    (place.datasets / "set").mkdir(parents=True)
    place.outside.mkdir()
    for folder in (place.datasets / "set", place.outside):
        Image.new("RGB", (64, 64)).save(folder / "a.png")
    place.secret.write_bytes((place.outside / "a.png").read_bytes() + SECRET.encode())
    (place.outside / f"{SECRET}.png").write_bytes(b"a list of the folder names it")
    for name in ("secret.txt", "run.json", "events.jsonl", "report.html"):
        (place.outside / name).write_text(SECRET)
    described = {"file_name": "b.png", "text": SECRET}
    (place.outside / "metadata.jsonl").write_text(json.dumps(described))
    (place.runs / RUN / "linked.png").symlink_to(place.secret)
    (place.runs / "linked").symlink_to(place.outside)
    (place.datasets / "set" / "linked.png").symlink_to(place.secret)
    (place.datasets / "linked").symlink_to(place.outside)
    linked = place.datasets / "captions"
    linked.mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (64, 64)).save(linked / name)
    (linked / "a.txt").symlink_to(place.outside / "secret.txt")
    (linked / "metadata.jsonl").symlink_to(place.outside / "metadata.jsonl")
    (linked / "folder").symlink_to(place.outside)
    return place


@pytest.fixture(scope="module")
def canary() -> Iterator[Canary]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        canary = Canary(listening=listening)
        threading.Thread(target=canary.watch, daemon=True).start()
        yield canary


def fingerprint(place: Place) -> dict[str, str]:
    """Return the content of every file but those that the interface keeps for itself."""
    found = {}
    for path in sorted(place.root.rglob("*")):
        name = path.relative_to(place.root).as_posix()
        if path.is_file() and not name.startswith(("runs/.gui/", "runs/.queue/")):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def copies_of_the_secret(place: Place) -> list[str]:
    """Return the files of the interface that somebody could ask for, and that hold the secret."""
    own = place.runs / ".gui"
    files = [path for path in own.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if SECRET.encode() in path.read_bytes()]


@pytest.fixture(scope="module")
def attacker(place: Place, canary: Canary, gui_server: StartGui) -> Iterator[Attacker]:
    """Return a client with the key; at the end nothing may have come out or been changed."""
    before = fingerprint(place)
    server = gui_server(place.runs, f"--datasets={place.datasets}")
    client = Attacker(server=server, secret=SECRET.encode())
    client.enter()
    yield client
    assert client.escapes == []
    after = fingerprint(place)
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed == set()
    new = set(after) - set(before)
    # A button of a run leaves its wish in the control folder of that run.
    assert {name for name in new if "/control/" not in name} == set()
    assert copies_of_the_secret(place) == []
    assert not list(place.root.rglob(MARKER))
    assert not (ROOT / MARKER).exists()
    assert canary.asked == []
    assert not commands.items(place.runs)
    assert client.get("/").status == 200


# ---- SEC-01: paths


def test_no_spelling_leads_out_of_a_run(attacker: Attacker, place: Place) -> None:
    targets = [place.secret, place.outside / "report.html", place.outside / "run.json"]
    for target in targets:
        spellings = climbing(target)
        assert len(spellings) >= 25
        for spelling in quoted(spellings):
            assert attacker.get(f"/media/run/{RUN}/{spelling}").status in (400, 403, 404)
    for spelling in quoted(climbing(place.outside)):
        assert attacker.get(f"/media/run/{spelling}/run.json").status in (400, 403, 404)


@pytest.mark.parametrize(
    "path",
    [f"/media/run/{RUN}/linked.png", "/media/run/linked/run.json", "/media/run/.gui/key"]
    + ["/media/run/.queue/x.json", f"/media/run/{RUN}/states/step-00000003/weights.safetensors"]
    + [f"/media/run/{RUN}/states", f"/media/run/{RUN}/", "/media/run//", "/media/", "/media"]
    + [f"/media/run/{RUN}/../linked/run.json", f"/media/run/../{RUN}/run.json"],
)
def test_links_states_and_own_files_are_not_served(attacker: Attacker, path: str) -> None:
    assert attacker.get(path).status in (303, 307, 400, 403, 404)


def test_the_files_of_a_run_are_served(attacker: Attacker) -> None:
    assert attacker.get(f"/media/run/{RUN}/run.json").status == 200
    name = quote(f"$(touch {MARKER})", safe="")
    assert attacker.get(f"/media/run/{name}/samples/step-00000003/00.png").status == 200


def test_no_spelling_leads_out_of_the_datasets(attacker: Attacker, place: Place) -> None:
    own = place.datasets / "set"
    assert thumb(attacker, str(own), "a.png") == 200
    for spelling in climbing(place.secret):
        assert thumb(attacker, str(own), spelling) in (400, 403, 404)
        assert thumb(attacker, spelling, "a.png") in (400, 403, 404)
    for spelling in climbing(place.outside):
        assert thumb(attacker, spelling, "a.png") in (400, 403, 404), spelling
        assert thumb(attacker, f"{own}/{spelling}", "a.png") in (400, 403, 404)
    assert thumb(attacker, str(own), "linked.png") in (403, 404)
    assert thumb(attacker, str(place.datasets / "linked"), "a.png") in (403, 404)


def thumb(attacker: Attacker, folder: str, file: str, size: str = "96") -> int:
    asked = urlencode({"folder": folder, "file": file, "size": size}, errors="replace")
    return attacker.get(f"/media/thumb?{asked}").status


def test_gradio_serves_no_file_of_this_machine(attacker: Attacker, place: Place) -> None:
    for target in (place.secret, place.runs / ".gui" / "key", place.runs / RUN / "run.json"):
        for spelling in quoted(climbing(target)):
            for route in ("/gradio_api/file=", "/gradio_api/file/", "/file="):
                assert attacker.get(route + spelling).status in (400, 403, 404)
    for spelling in quoted(climbing(place.secret)):
        for route in ("/static/", "/assets/"):
            assert attacker.get(route + spelling).status in (400, 403, 404)


def test_no_page_opens_a_run_elsewhere(attacker: Attacker, place: Place) -> None:
    for spelling in climbing(place.outside):
        asked = quote(spelling, safe="", errors="replace")
        for page in ("run?run=", "datasets?folder=", "train?folder=", "train?draft="):
            attacker.get(f"/{page}{asked}")  # the page is the same for all; its events ask


def test_nobody_is_asked_for_an_address(attacker: Attacker, canary: Canary) -> None:
    for route in ("file=", "proxy=", "file/"):
        for spelling in (canary.url, quote(canary.url, safe=""), canary.url.upper()):
            assert attacker.get(f"/gradio_api/{route}{spelling}/x.png").status in (400, 403, 404)
    file = {"path": f"{canary.url}/x.png", "url": f"{canary.url}/x.png"}
    payload = {**file, "orig_name": "x.png", "meta": {"_type": "gradio.FileData"}}
    for value in (payload, [payload]):
        attacker.trigger(everywhere(attacker, value))


# ---- hidden fields


def everywhere(
    attacker: Attacker, value: Any, *, draft: str = "", event_data: Any = None
) -> list[Call]:
    """Return a call of each event of all pages, with `value` for each of its fields.

    Choices get their first value, without which gradio refuses the call; with `draft` the hidden
    field of that name is right.
    """
    config = attacker.get("/config").json()
    known: dict[int, Any] = {}
    for component in config["components"]:
        props = component["props"]
        if component["type"] == "radio":
            known[component["id"]] = props["choices"][0][1]
        elif props.get("label") == "draft" and draft:
            known[component["id"]] = draft
    return [
        Call(
            fn_index=handler["id"],
            data=[known.get(field, value) for field in handler["inputs"]],
            event_data=event_data,
        )
        for handler in config["dependencies"]
        if handler["queue"]
    ]


def test_no_field_of_a_page_leads_out(attacker: Attacker, place: Place) -> None:
    hostile = [
        *climbing(place.outside)[:8:3],
        str(place.secret),
        *COMMANDS[:6:2],
        "\0",
        "x" * 100_000,
        *({"path": str(place.secret), "meta": {"_type": "gradio.FileData"}},),
        *({"__class__": "os"}, [[]], None, 10**400, -1, True),
    ]
    attacker.trigger(everywhere(attacker, ""))  # opening a page makes a draft
    (draft, *_) = [path.stem for path in (place.runs / ".gui" / "drafts").glob("*.json")]
    for value in hostile:
        query = urlencode({"run": str(value)[:500], "draft": "../../outside"})
        event = {"action": "stop", "run": value, "step": value, "index": value, "value": value}
        for hidden in ("", draft) if isinstance(value, str) else ("",):
            calls = everywhere(attacker, value, draft=hidden, event_data=event)
            attacker.trigger(calls, query=query)


def test_a_run_is_not_reached_by_a_name_that_is_not_listed(
    attacker: Attacker, place: Place
) -> None:
    names = ("linked", "../outside", str(place.outside), ".gui", f"{RUN}/states", "")
    for name, action in zip(names, ("stop", "resume") * 3, strict=True):
        event = {"action": action, "run": name, "step": 3}
        calls = everywhere(attacker, "", event_data=event)
        attacker.trigger(calls, query=urlencode({"run": name}))
    assert not (place.outside / "control").exists()
    assert not (place.runs / ".gui" / "control").exists()


@pytest.mark.parametrize(
    "body",
    [
        {"data": [], "fn_index": 10**6},
        {"data": [], "fn_index": -1},
        {"data": [], "fn_index": "start"},
        {"data": "x", "fn_index": 0},
        {"data": [1] * 1000, "fn_index": 0},
        {"fn_index": None},
        {"data": [], "fn_index": 0, "session_hash": "../../x", "trigger_id": "../x"},
        {"data": [], "fn_index": 0, "event_id": "../../x", "simple_format": True},
        [],
        None,
        "x",
    ],
)
def test_calls_that_no_page_makes_change_nothing(attacker: Attacker, body: Any) -> None:
    attacker.post("/gradio_api/queue/join", body)
    for name in ("start", "load", "predict", "../x"):
        assert attacker.post(f"/gradio_api/run/{name}", body).status == 404
        assert attacker.post(f"/gradio_api/api/{name}", body).status == 404
        assert attacker.post(f"/gradio_api/call/{name}", body).status == 404


def called(attacker: Attacker, component: Any, function: str, data: Any) -> Reply:
    """Call what a widget's script may ask of the server."""
    body = {"data": data, "component_id": component, "fn_name": function, "session_hash": "x"}
    return attacker.post("/gradio_api/component_server/", body)


def offered(attacker: Attacker) -> list[tuple[int, str]]:
    """Return the functions that the widgets of all pages offer to their scripts."""
    return [
        (component["id"], name)
        for component in attacker.get("/config").json()["components"]
        for name in component["props"].get("server_fns") or ()
    ]


def test_scripts_get_no_file_from_elsewhere(attacker: Attacker, place: Place) -> None:
    functions = offered(attacker)
    assert {"use_best", "dataset_look", "dataset_save", "browse_folder"} <= {
        name for _, name in functions
    }
    folders = [
        *climbing(place.outside)[:8:2],
        *(str(place.datasets / name) for name in ("linked", "captions", "captions/folder", "set")),
    ]
    names = ["a.png", "linked.png", str(place.secret), "../../outside/b.png", "folder/a.png"]
    for component, function in functions:
        for folder in folders:
            for name in names:
                called(attacker, component, function, hostile_wish(folder, name))
        for kind in ("dataset", "base"):
            for folder in folders:
                called(attacker, component, function, {"kind": kind, "path": folder})
        for wrong in (None, [], "x", 10**400, {"folder": ["x"]}, {"folder": {}, "files": 5}):
            called(attacker, component, function, wrong)


def hostile_wish(folder: str, name: str) -> dict[str, Any]:
    """Return an object with every key that a page's script sends."""
    return {
        "folder": folder,
        "dataset": folder,
        "draft": folder,
        "run": folder,
        "path": name,
        "file": name,
        "files": [name],
        "name": name,
        "step": 3,
        "seen": "",
        "text": "changed",
        "group": "g",
        "kind": "append",
        "replacement": "x",
        "joint": ", ",
        "trigger": "",
        "key": "data.cache_dir",
        "value": folder,
        "resolution": "",
        "over": True,
        "json": json.dumps({"data": {"cache_dir": folder}}),
    }


def test_files_that_were_not_uploaded_are_not_taken(attacker: Attacker, place: Place) -> None:
    for batch in ("0123456789abcdef", "..", "%2e%2e", "a/../../key", "x" * 300):
        for name in ("a.png", "a.zip", "../../a.png", str(place.secret)):
            body = {"name": "x", "files": [name]}
            assert attacker.post(f"/upload/{batch}", body).status >= 400
            number = attacker.ask("PUT", f"/upload/{batch}/{name.replace('/', '%2f')}", body=b"x")
            assert number.status >= 400
    for wrong in (None, [], "x", {"files": {}}, {"files": [{"path": str(place.secret)}]}):
        assert attacker.post("/upload/0123456789abcdef", wrong).status == 400


def test_components_have_no_other_functions(attacker: Attacker) -> None:
    components = attacker.get("/config").json()["components"]
    for component in components[:: max(1, len(components) // 12)]:
        for name in ("ls", "__init__", "preprocess", "postprocess", "launch", "../x"):
            assert called(attacker, component["id"], name, ["/"]).status >= 400
    for identity in (-1, 10**9, "x", None):
        assert called(attacker, identity, "ls", ["/"]).status >= 400


# ---- SEC-06: uploads over HTTP


def test_uploads_stay_where_uploads_wait(attacker: Attacker, place: Place) -> None:
    names = [*climbing(place.secret), *as_names(COMMANDS), *as_names(MARKUP)[:8], "", ".", ".."]
    for name in names:
        plain = name.replace("\n", " ").replace('"', "'").replace("\0", "%00")
        reply = attacker.upload([plain])
        if reply.status == 200:
            for path in reply.json():
                landed = Path(path).resolve()
                assert landed.is_relative_to(place.runs / ".gui" / "incoming"), name
    assert place.secret.stat().st_size > 1


def test_an_upload_is_not_served_as_a_page(attacker: Attacker) -> None:
    (path,) = attacker.upload(["x.html"], b"<script>window.__xss=1</script>").json()
    reply = attacker.get(f"/gradio_api/file={quote(path)}")
    assert reply.headers["x-content-type-options"] == "nosniff"
    shown = reply.headers.get("content-disposition", "").startswith("inline")
    assert reply.status != 200 or not shown or "html" not in reply.headers["content-type"]


def test_bodies_without_end_are_refused(attacker: Attacker) -> None:
    for length in (str(2**40), "99999999999999999999", "-1", "x", "0x10"):
        for path in (
            "/gradio_api/queue/join",
            "/gradio_api/upload",
            "/gradio_api/component_server/",
            "/upload/0123456789abcdef",
            "/upload/0123456789abcdef/0",
        ):
            status = attacker.ask("POST", path, headers={"Content-Length": length}).status
            assert status in (400, 413)


# ---- SEC-02: who asks


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "127.0.0.1@evil.example"]
    + ["0.0.0.0", "2130706433", "0x7f000001", "127.1", "[::ffff:127.0.0.1]", "evil.example:7860"]
    + ["", "[::1", "10.0.0.1", "127.0.0.1, evil.example", "0.0.0.0:7860", "evil@127.0.0.1.x"],
)
def test_other_names_for_this_machine_are_refused(attacker: Attacker, host: str) -> None:
    for path in ("/", "/config", f"/media/run/{RUN}/run.json", "/gradio_api/queue/data"):
        assert attacker.get(path, Host=host).status == 400


@pytest.mark.parametrize(
    "origin",
    [
        "http://evil.example",
        "null",
        "https://127.0.0.1",
        "http://127.0.0.1:1",
        "file://",
        "http://[",
    ]
    + ["http://127.0.0.1", "http://127.0.0.1:1.evil.example", "http://evil.example//127.0.0.1:1"],
)
def test_other_pages_are_refused(attacker: Attacker, origin: str) -> None:
    join = {"data": [], "fn_index": 0, "session_hash": "x"}
    assert attacker.post("/gradio_api/queue/join", join, Origin=origin).status == 403
    assert attacker.upload(["a.png"], Origin=origin).status == 403
    assert attacker.get("/config", Origin=origin).status == 403
    form = {"Content-Type": "application/x-www-form-urlencoded", "Origin": origin}
    assert attacker.ask("POST", "/", headers=form, body=b"a=b").status == 403
    plain = {"Content-Type": "text/plain", "Origin": origin}
    body = json.dumps(join).encode()
    path = "/gradio_api/queue/join"
    assert attacker.ask("POST", path, headers=plain, body=body).status == 403
    preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    reply = attacker.ask("OPTIONS", path, headers=preflight)
    assert reply.status == 403
    assert "access-control-allow-origin" not in reply.headers


def test_a_page_elsewhere_embeds_nothing(attacker: Attacker) -> None:
    for site in ("cross-site", "same-site"):
        for path in ("/", "/config", f"/media/run/{RUN}/samples/step-00000003/00.png"):
            fields = {
                "Sec-Fetch-Site": site,
                "Sec-Fetch-Mode": "no-cors",
                "Sec-Fetch-Dest": "image",
            }
            assert attacker.ask("GET", path, headers=fields).status == 403
        opened = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "iframe"}
        assert attacker.ask("GET", "/", headers=opened).status == 403
        linked = {**opened, "Sec-Fetch-Dest": "document"}
        assert attacker.ask("GET", "/", headers=linked).status == 200
        assert attacker.ask("POST", "/", headers=linked).status == 403


@pytest.mark.parametrize(
    "path",
    ["/gradio_api/proxy=http://evil.example/", "/gradio_api/deep_link", "/gradio_api/vibe-edit"]
    + ["/gradio_api/file=http://169.254.169.254/x", "/gradio_api/file=HTTPS://x/", "/monitoring"]
    + ["/gradio_api/file=//host/share", "/gradio_api/file=\\\\host\\share", "//gradio_api/runs"]
    + ["/gradio_api/process_recording", "/gradio_api/call/x", "/gradio_api/run/x", "/openapi.json"]
    + ["/login", "/logout", "/gradio_api/openapi.json", "/gradio_api/token", "/gradio_api/"],
)
def test_routes_that_no_page_uses_are_closed(attacker: Attacker, path: str) -> None:
    assert attacker.get(path).status == 404


@pytest.mark.parametrize(
    "key", ["", "key=", "key=wrong", "key=../key", "key[]=x", "KEY=x", "key=%"]
)
def test_without_the_key_nothing_is_told(attacker: Attacker, key: str) -> None:
    for path in ("/", "/config", "/theme.css", f"/media/run/{RUN}/run.json", "/gradio_api/info"):
        for cookie in ("", "lora_train_key=x", f"lora_train_key_{attacker.server.port}=x"):
            reply = attacker.get(f"{path}?{key}", Cookie=cookie)
            assert (reply.status, reply.headers.get("set-cookie")) == (403, None)
            assert b"Open the link that lora-train-gui printed" in reply.body
    assert attacker.upload(["a.png"], Cookie="").status == 403


def test_every_answer_keeps_the_browser_here(attacker: Attacker) -> None:
    for path in ("/", "/config", "/none", "/theme.css", f"/media/run/{RUN}/run.json", "/media/x"):
        headers = attacker.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["content-security-policy"].startswith("default-src")
        assert "server" not in headers


def test_enough_was_tried(attacker: Attacker) -> None:
    """The last test of the module: the numbers of SEC-01."""
    assert attacker.asked >= MIN_REQUESTS
    assert attacker.escapes == []


# ---- a server that others reach

PASSWORD = "correct horse"


@pytest.fixture(scope="module")
def listening(place: Place, gui_server: StartGui) -> GuiServer:
    return gui_server(
        place.runs,
        "--listen=0.0.0.0",
        f"--datasets={place.datasets}",
        "--host-name=studio.lan",
        env={"LORA_TRAIN_GUI_PASSWORD": PASSWORD},
    )


def basic(password: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{password}".encode()).decode()}


def test_others_need_the_password(listening: GuiServer, place: Place) -> None:
    key = (place.runs / ".gui" / "key").read_text() if (place.runs / ".gui").exists() else ""
    client = Attacker(server=listening, secret=SECRET.encode())
    cookie = f"lora_train_key_{listening.port}={key}"
    for path in ("/", "/config", f"/media/run/{RUN}/run.json", f"/?key={key}"):
        reply = client.get(path, Cookie=cookie)
        assert reply.status == 401
        assert reply.headers["www-authenticate"].startswith("Basic ")
        assert client.get(path, **basic(PASSWORD)).status == 200
    assert client.get("/", Host="studio.lan", **basic(PASSWORD)).status == 200
    assert client.get("/", Host="evil.example", **basic(PASSWORD)).status == 400
    foreign = {**basic(PASSWORD), "Origin": "http://evil.example"}
    assert client.upload(["a.png"], **foreign).status == 403
    assert client.get("/", **basic("wrong")).status == 401
    assert PASSWORD not in listening.said()
    assert PASSWORD not in Path(f"/proc/{listening.process.pid}/cmdline").read_text()


def test_the_password_is_not_handed_on(listening: GuiServer) -> None:
    """Trainings that the pages start inherit the environment."""
    assert listening.process.poll() is None
    client = Attacker(server=listening, secret=PASSWORD.encode())
    client.get("/config", **basic(PASSWORD))
    assert client.escapes == []


def test_link_and_log_tell_no_password(listening: GuiServer) -> None:
    assert "key=" not in listening.link
    assert os.environ.get("LORA_TRAIN_GUI_PASSWORD") is None
