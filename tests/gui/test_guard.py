"""Who may ask what: hosts, origins, keys, passwords, folders."""

from __future__ import annotations

import asyncio
import base64
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import access, guard
from lora_trainer.gui.access import GuessLimit, KeyAccess, PasswordAccess, read_key
from lora_trainer.gui.guard import Asked, Guard, GuardResponse, Message, Receive, Send, refusal
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError, MachineError

OWN = {"host": "127.0.0.1:7860"}
HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True)
class Everybody:
    """Lets everybody in."""

    hosts: frozenset[str] = HOSTS

    async def answer(self, asked: Asked) -> GuardResponse | None:
        return None


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:7860", "localhost:1", "LOCALHOST", "[::1]:9"]
)
def test_this_machine_is_answered(host: str) -> None:
    asked = Asked(
        method="GET", path="/", query="", headers={"host": host}, client="127.0.0.1", port=7860
    )
    assert refusal(asked, hosts=HOSTS) is None


def through(
    scope: dict[str, Any], *, body: tuple[bytes, ...] = (), answering: int = 200
) -> tuple[list[Message], list[bytes]]:
    """Return what was answered to a request, and the body that the application has read.

    The application turns an error while it reads into a 400, as web frameworks do.
    """
    sent: list[Message] = []
    read: list[bytes] = []
    parts = list(body)

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        status = answering
        try:
            while parts:
                read.append((await receive())["body"])
        except Exception:  # noqa: BLE001 - the frameworks' own behaviour
            status = 400
        if scope["type"] == "http":
            headers = [(b"content-type", b"text/html"), (b"X-Frame-Options", b"SAMEORIGIN")]
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": b"page"})
        else:
            await send({"type": "passed"})

    async def receive() -> Message:
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(Guard(app, access=Everybody())(scope, receive, send))
    return sent, read


def http(path: str = "/", **headers: str) -> dict[str, Any]:
    fields = {"host": "localhost", **headers}
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in fields.items()
        ],
    }


def test_middleware_answers_for_the_app() -> None:
    sent, _ = through(http(host="evil.example"))
    assert [message.get("status") for message in sent] == [400, None]


def test_a_header_that_comes_twice_is_refused() -> None:
    scope = http()
    scope["headers"].append((b"host", b"evil.example"))
    assert through(scope)[0][0]["status"] == 400


def test_every_answer_keeps_the_browser_to_this_server() -> None:
    for scope in (http(), http(host="evil.example")):
        headers = dict(through(scope)[0][0]["headers"])
        policy = headers[b"content-security-policy"].decode()
        assert "default-src 'self'" in policy
        assert "http:" not in policy
        assert "https:" not in policy
        assert "*" not in policy
        assert headers[b"x-content-type-options"] == b"nosniff"
        assert headers[b"referrer-policy"] == b"no-referrer"


def test_a_header_that_the_application_sets_stays() -> None:
    names = [name.lower() for name, _ in through(http())[0][0]["headers"]]
    assert names.count(b"x-frame-options") == 1
    refused_headers = dict(through(http(host="x"))[0][0]["headers"])
    assert refused_headers[b"x-frame-options"] == b"DENY"


@pytest.mark.parametrize("declared", ["11", "999999999999", "-1", "x"])
def test_a_body_that_says_it_is_too_large_is_not_read(
    declared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_MAX_BYTES", 10)
    sent, read = through(http(content_length=declared), body=(b"x",))
    assert (sent[0]["status"], read) == (413, [])


def test_a_body_that_does_not_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "BODY_MAX_BYTES", 10)
    monkeypatch.setattr(guard, "UPLOAD_MAX_BYTES", 12)
    sent, read = through(http(), body=(b"12345", b"67890", b"1", b"2"))
    assert [message.get("status") for message in sent] == [413, None]
    assert read == [b"12345", b"67890"]
    assert through(http(), body=(b"12345", b"67890"))[0][0]["status"] == 200
    upload = through(http(guard.UPLOAD_PATH), body=(b"12345", b"67890", b"1"))
    assert upload[0][0]["status"] == 200


def test_start_and_end_of_the_server_pass_and_websockets_do_not() -> None:
    assert through({"type": "lifespan"})[0] == [{"type": "passed"}]
    sent, _ = through({"type": "websocket", "headers": []})
    assert sent[0]["type"] == "websocket.close"


KEY = "k" * 43
COOKIE = {"cookie": f"other=1; lora_train_key_7860={KEY}"}


def ask(
    who: KeyAccess | PasswordAccess,
    *,
    query: str = "",
    headers: Mapping[str, str] | None = None,
    path: str = "/",
    method: str = "GET",
    client: str = "127.0.0.1",
) -> GuardResponse | None:
    asked = Asked(
        method=method, path=path, query=query, headers=headers or {}, client=client, port=7860
    )
    return asyncio.run(who.answer(asked))


@pytest.fixture
def local() -> KeyAccess:
    return KeyAccess(key=KEY)


def test_the_link_sets_the_cookie_and_leaves_the_address(local: KeyAccess) -> None:
    answer = ask(local, query=f"run=a%26b&key={KEY}")
    assert answer is not None
    assert (answer.status, answer.headers["location"]) == (303, "/?run=a%26b")
    name, *attributes = answer.headers["set-cookie"].split("; ")
    assert name == f"lora_train_key_7860={KEY}"
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
    assert ask(local, headers=COOKIE) is None
    assert ask(local, headers=COOKIE, path="/gradio_api/queue/join", method="POST") is None


def test_a_link_clicked_on_another_site_gets_its_cookie_before_it_goes_on(local: KeyAccess) -> None:
    answer = ask(local, query=f"key={KEY}", headers={"sec-fetch-site": "cross-site"})
    assert answer is not None
    assert (answer.status, answer.headers["refresh"]) == (200, "0;url=/")
    assert KEY not in answer.sentence


def test_the_key_opens_the_first_page_only(local: KeyAccess) -> None:
    for path, method in (("/media/thumb", "GET"), ("/", "POST"), ("/config", "GET")):
        answer = ask(local, query=f"key={KEY}", path=path, method=method)
        assert answer is not None
        assert answer.status == 403


def test_the_cookie_of_another_server_on_this_machine_is_another_one(local: KeyAccess) -> None:
    answer = ask(local, headers={"cookie": f"lora_train_key_7861={KEY}; lora_train_key={KEY}"})
    assert answer is not None


def test_a_cookie_header_that_cannot_be_read_is_none(local: KeyAccess) -> None:
    assert ask(local, headers={"cookie": f'"\x00[=;;lora_train_key_7860="{KEY}'}) is not None


def test_a_ticket_opens_once(local: KeyAccess) -> None:
    ticket = local.ticket()
    first = ask(local, query=f"key={ticket}")
    assert first is not None
    assert first.headers["set-cookie"].startswith(f"lora_train_key_7860={KEY};")
    second = ask(local, query=f"key={ticket}")
    assert second is not None
    assert second.status == 403
    known = ask(local, query=f"key={ticket}", headers=COOKIE)
    assert known is not None
    assert known.status == 303


def test_the_key_stays_and_only_its_user_reads_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / ".gui"
    key = read_key(folder)
    assert len(key) >= 43
    assert read_key(folder) == key
    assert stat.S_IMODE((folder / "key").stat().st_mode) == 0o600
    assert [path.name for path in folder.iterdir()] == ["key"]
    assert read_key(tmp_path / "other") != key


def test_servers_that_start_together_have_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: read_key(tmp_path / ".gui"), range(16)))
    assert len(keys) == 1


@pytest.mark.parametrize("damage", [b"", b"short", b"\xff" * 50])
def test_a_damaged_key_is_made_anew(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "key").write_bytes(damage)
    key = read_key(tmp_path)
    assert len(key) >= 43
    assert read_key(tmp_path) == key


def test_without_links_the_key_is_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", refuse)
    assert read_key(tmp_path) == read_key(tmp_path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot write"):
        read_key(tmp_path / "file" / ".gui")


def basic(password: str, user: str = "me") -> dict[str, str]:
    return {"authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> PasswordAccess:
    """A server for others whose clock stands still but for the time that it makes others wait."""
    now = [100.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("lora_trainer.gui.access.asyncio.sleep", sleep)
    monkeypatch.setattr("lora_trainer.gui.access.time.monotonic", lambda: now[0])
    return PasswordAccess(password="pass:wörd 1", hosts=frozenset({"studio"}))


def test_the_password_lets_in_under_any_name(listening: PasswordAccess) -> None:
    for user in ("", "me", "anybody"):
        assert ask(listening, headers=basic("pass:wörd 1", user)) is None
        assert ask(listening, headers=basic("pass:wörd 1", user), path="/config") is None


@pytest.mark.parametrize(
    "header",
    ["", "Basic", "Basic !!!", "Bearer pass:wörd 1", "Basic /w==", basic("")["authorization"]]
    + [basic("pass")["authorization"], basic("pass:wörd 1 ")["authorization"]],
)
def test_everything_else_is_asked_for_it(listening: PasswordAccess, header: str) -> None:
    answer = ask(listening, headers={"authorization": header} if header else {})
    assert answer is not None
    assert answer.status == 401
    assert answer.headers["www-authenticate"].startswith("Basic ")
    assert "pass:" not in answer.sentence


def test_guesses_come_once_a_second_and_the_rest_is_refused() -> None:
    limit = GuessLimit()
    assert limit.wait_s("a", now_s=10.0) == 0.0
    limit.wrong("a", now_s=10.0)
    waits = [limit.wait_s("a", now_s=10.0) for _ in range(8)]
    assert waits == [1.0, 2.0, 3.0, 4.0, 5.0, None, None, None]
    assert limit.wait_s("b", now_s=10.0) == 0.0
    limit.right("a")
    assert limit.wait_s("a", now_s=10.0) == 0.0


def test_a_guess_that_is_too_fast_is_refused_before_it_is_looked_at(
    listening: PasswordAccess,
) -> None:
    ask(listening, headers=basic("wrong"))
    listening.held_back.next_s["127.0.0.1"] += 60
    answer = ask(listening, headers=basic("pass:wörd 1"))
    assert answer is not None
    assert answer.status == 429
    assert ask(listening, headers=basic("pass:wörd 1"), client="10.0.0.2") is None


def test_addresses_are_not_remembered_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_ADDRESSES_MAX", 3)
    limit = GuessLimit()
    for address in "abcde":
        limit.wrong(address, now_s=0.0)
    assert list(limit.next_s) == ["c", "d", "e"]


@pytest.mark.parametrize(
    ("address", "local"),
    [("127.0.0.1", True), ("::1", True), ("localhost", True), ("127.1.2.3", True)]
    + [("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("studio.lan", False)],
)
def test_which_addresses_others_reach(address: str, local: bool) -> None:
    assert access.is_loopback(address) == local


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("runs/.gui/uploads/cats", "sets/owls/10_owl", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def bounded(place: Path) -> Workplace:
    return Workplace(runs=place / "runs", roots=(place / "sets",))


def test_alone_every_folder_may_be_named(place: Path) -> None:
    work = Workplace(runs=place / "runs")
    assert work.folder(f' "{place / "elsewhere"}" ') == place / "elsewhere"
    (place / "sets" / "link").symlink_to(place / "elsewhere")
    assert work.folder(str(place / "sets" / "link")) == place / "elsewhere"
    assert work.folder(str(place / "sets")) == place / "sets"


def test_others_may_name_the_given_folders_and_the_runs(place: Path) -> None:
    work = bounded(place)
    assert work.folder(str(place / "sets" / "owls")) == place / "sets" / "owls"
    assert work.folder(str(place / "runs" / ".gui" / "uploads" / "cats")).name == "cats"
    for folder in (place, place / "elsewhere", place / "sets" / ".." / "elsewhere", "~", "/"):
        with pytest.raises(InputError, match="outside of the folders"):
            work.folder(str(folder))


@pytest.mark.parametrize("name", ["a.txt", "10_owl/a.png", "10_owl/sub", "metadata.jsonl"])
def test_a_dataset_with_a_link_out_of_them_is_refused(place: Path, name: str) -> None:
    owls = place / "sets" / "owls"
    (owls / name).symlink_to(place / "elsewhere")
    with pytest.raises(InputError, match="is a link out of the folders"):
        bounded(place).folder(str(owls))
    assert Workplace(runs=place / "runs").folder(str(owls)) == owls


def test_links_inside_of_them_are_no_matter(place: Path) -> None:
    owls = place / "sets" / "owls"
    (owls / "again").symlink_to(owls / "10_owl")
    (owls / "circle").symlink_to(owls / "circle")
    assert bounded(place).folder(str(owls)) == owls


@pytest.mark.parametrize("text", ["", "  ", "\0", "~nobody-of-that-name/x", "x" * 5000, "/a\nb"])
def test_what_is_no_folder_is_one_line(place: Path, text: str) -> None:
    for work in (bounded(place), Workplace(runs=place / "runs")):
        with pytest.raises(InputError) as error:
            work.folder(text)
        assert "\n" not in str(error.value)
