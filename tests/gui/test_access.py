"""Who may come in: the key of the machine's user, the password of others, and what guessing costs."""

from __future__ import annotations

import asyncio
import base64
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lora_trainer.gui import access
from lora_trainer.gui.access import GuessLimit, KeyAccess, PasswordAccess, read_key
from lora_trainer.gui.guard import Asked, GuardResponse

from lora_trainer.common.errors import MachineError

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


@pytest.mark.parametrize(
    "query", ["", "key=", "key=wrong", f"key={KEY}x", f"key={KEY[:-1]}", f"KEY={KEY}", "key=%00%ff"]
)
@pytest.mark.parametrize("cookie", ["", "lora_train_key_7860=", f"lora_train_key_7860={KEY}x"])
def test_without_the_key_the_answer_says_where_it_is(
    local: KeyAccess, query: str, cookie: str
) -> None:
    answer = ask(local, query=query, headers={"cookie": cookie})
    assert answer is not None
    assert answer.status == 403
    assert "Open the link that lora-train-gui printed" in answer.sentence
    assert "set-cookie" not in answer.headers


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


# ---- password


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
