"""The program of the interface: its command, its pages and their language, who may ask what, the page Doctor.

Hosts, origins and routes: test_attacks.py. What needs gradio is skipped where it is not installed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import socket
import stat
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from lora_trainer.gui import app, command_lines
from lora_trainer.gui.server.faults import Faults
from lora_trainer.gui.server.guard import Guard, Message, Receive, Send
from lora_trainer.gui.server.guesses import BURST, GUESS_EVERY_S, GuessLimit, network_of
from lora_trainer.gui.workplace import Workplace

from lora_trainer import families
from lora_trainer.cache.store import in_use
from lora_trainer.cli import main
from lora_trainer.common.errors import InputError, MachineError, RequestError
from lora_trainer.families.base.tables import family_table
from lora_trainer.hardware.devices import TorchBuild
from lora_trainer.hardware.kept_memory import Keeper
from lora_trainer.hardware.machine import detect
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.queue.rules import OFFLINE_VARIABLES, environment_of, read_rules
from scripts import gui_texts
from tests.fakes.live_runs import write_status
from tests.fakes.nvml import GIB
from tests.fakes.run_folder import fake_run
from tests.gui.conftest import PORT, answered, skip_without_gradio

ROOT = Path(__file__).resolve().parents[2]
PAGE = b"page"


def test_without_gradio_there_is_one_line_and_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for command, words in ((app.main, []), (main.run, ["gui"])):
        with pytest.raises(SystemExit) as ended:
            command(words)
        assert ended.value.code == 4
        assert capsys.readouterr().err == (
            "error: the graphical interface needs gradio, which is not installed."
            ' Fix: pip install "lora-train[gui]".\n'
        )


def test_what_would_open_the_server_is_no_option_and_its_address_is_as_browsers_take_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for word in ("--share", "--password=x", "--key=x", "--auth=a:b"):
        with pytest.raises(SystemExit) as ended:
            app.parsed([word])
        assert ended.value.code == 2
        assert "unrecognized arguments" in capsys.readouterr().err
    options = app.parsed(["--port", "7999", "--no-browser"])
    assert (options.runs, options.port, options.browser) == (Path("runs"), 7999, False)
    assert app.parsed([]).browser is True
    assert app.address_of("127.0.0.1", 7860) == "http://127.0.0.1:7860/"
    assert app.address_of("::1", 7860) == "http://[::1]:7860/"
    for everywhere in ("0.0.0.0", "::"):
        assert app.address_of(everywhere, 7860) == f"http://{socket.gethostname()}:7860/"


def test_a_server_for_others_is_behind_the_password_and_prints_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    served: list[tuple[Any, list[socket.socket]]] = []
    monkeypatch.setenv("LORA_TRAIN_GUI_PASSWORD", "correct horse")
    monkeypatch.setattr("lora_trainer.gui.server.serve.quiet_gradio", lambda _: None)
    monkeypatch.setattr("lora_trainer.gui.server.serve.run", lambda *both: served.append(both))
    app.main([f"--runs={tmp_path / 'runs'}", f"--datasets={tmp_path}", "--listen=0.0.0.0"])
    ((pages, listening),) = served
    with listening[0]:
        assert listening[0].getsockname()[0] == "0.0.0.0"
    assert answered(pages, "/config")[0] == 401
    printed = capsys.readouterr().out
    assert "http://" in printed and "correct horse" not in printed and "key=" not in printed


PROGRAM = """
import json, sys
from pathlib import Path
from lora_trainer.gui.server import access, serve as server
from lora_trainer.gui.workplace import Workplace
work = Workplace(runs=Path(sys.argv[1]))
server.quiet_gradio(work)
routes = server.application(work, access=access.KeyAccess.of("k" * 43)).app
before = [name for name in ("gradio", "torch") if name in sys.modules]
print(json.dumps({"before": before, "routes": [route.path for route in routes.own.routes]}))
from lora_trainer.gui.programs.operations import Operations
from lora_trainer.gui.programs.served import gradio_application
(mount,) = [route for route in gradio_application(Operations(work=work)).routes if route.path == ""]
blocks = mount.app.get_blocks()
print(json.dumps({
    "loaded": [name for name in ("torch", "diffusers", "transformers") if name in sys.modules],
    "allowed_paths": blocks.allowed_paths,
    "uploads": mount.app.uploaded_file_dir,
    "off": [blocks.analytics_enabled, blocks.run_history, blocks.enable_monitoring, blocks.share],
}))
"""


def test_the_pages_build_without_torch_behind_our_routes_and_share_nothing(tmp_path: Path) -> None:
    """In a new interpreter."""
    skip_without_gradio()
    runs = tmp_path / "runs"
    command = [sys.executable, "-c", PROGRAM, str(runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr
    served, gradio = map(json.loads, done.stdout.splitlines()[-2:])
    assert served["before"] == [], "the first page waits for no import"
    assert len(served["routes"]) == len(set(served["routes"])), "a route is listed once"
    pages = {path.parent.name for path in ROOT.glob("gui/*/routes.py")}
    assert {"home", "train", "run", "share"} <= pages
    for page in pages:
        declared = re.findall(
            r'"(/[\w/-]*)"', (ROOT / "gui" / page / "routes.py").read_text("utf-8")
        )
        assert set(declared) <= set(served["routes"]), page
    firsts = {route.split("/")[1] for route in served["routes"]}
    others = {"live", "favicon.ico", "ui", "browse", "upload", "media", "config", "gradio_api"}
    assert firsts == others | (pages - {"machine"}) | {"", "doctor"}
    assert gradio["loaded"] == []
    assert gradio["allowed_paths"] == [] and gradio["off"] == [False] * 4
    assert gradio["uploads"] == f"{runs}/.gui/incoming"


def test_every_file_that_a_page_or_a_style_sheet_names_is_served_as_what_it_is() -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from lora_trainer.gui.server import asset_files
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    browser = TestClient(Starlette(routes=asset_files.routes()))
    sources = [*ROOT.glob("gui/**/*.html"), *ROOT.glob("gui/**/*.css"), *ROOT.glob("gui/**/*.js")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    named = set(re.findall(r"""["'(](/ui/[\w./-]+\.\w+)""", text))
    assert {"/ui/site.css", "/ui/inter.woff2"} <= named
    kinds = {address: browser.get(address).headers["content-type"] for address in named}
    unknown = ("text/plain", "application/octet-stream")
    assert [each for each, kind in kinds.items() if kind.startswith(unknown)] == []
    assert kinds["/ui/inter.woff2"] == "font/woff2"


# ---- the language


def test_the_choice_counts_before_what_the_browser_asks_for_and_each_entry_is_a_text_of_the_sources() -> (
    None
):
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from lora_trainer.gui.server import language
    from starlette.datastructures import Headers

    for accepted, cookie, code in (
        ("de-DE,de;q=0.9,en;q=0.8", "", "de"),
        ("en-GB,en;q=0.9,de;q=0.5", "", "en"),
        ("fr,de;q=0.3,en;q=0.2", "", "de"),
        ("de;q=0,fr", "", "en"),
        ("de;q=much,*", "", "en"),
        ("", "", "en"),
        ("de", f"{language.COOKIE}=en", "en"),
        ("en", f"other=1; {language.COOKIE}=de", "de"),
        ("de", f"{language.COOKIE}=../../etc", "de"),
    ):
        headers = Headers({"accept-language": accepted, "cookie": cookie})
        assert language.wanted(headers) == code
    codes = [path.stem for path in gui_texts.LANGUAGES.glob("*.json")]
    assert codes
    for code in codes:
        assert gui_texts.dead(code) == []
        for english, other in gui_texts.known(code).items():
            placed = Counter(gui_texts.PLACEHOLDER.findall(english))
            assert placed == Counter(gui_texts.PLACEHOLDER.findall(other)), english
            assert other and other.rstrip() == other, english
            letters = re.sub(r"[^A-Za-z]", "", gui_texts.PLACEHOLDER.sub("", english))
            assert len(letters) >= 2 or not placed, f"{english}: only placeholders"


def test_a_language_has_each_text_once_and_says_why_settings_of_other_trainers_come_to_nothing() -> (
    None
):
    for path in gui_texts.LANGUAGES.glob("*.json"):
        rows: list[tuple[str, str]] = json.loads(path.read_text("utf-8"), object_pairs_hook=list)
        assert [
            text for text, count in Counter(text for text, _ in rows).items() if count > 1
        ] == []
        assert [why for why in set(gui_texts.of_trainers()) if why not in dict(rows)] == []


def test_every_text_of_a_template_and_of_its_script_has_its_translation() -> None:
    said = re.compile(r"""(?<!\.)\b(?:_|say)\(\s*((?:"[^"]*"\s*)+)[,)]""")
    for path in (*ROOT.glob("gui/*/*.html"), *ROOT.glob("gui/*/*.js")):
        if path.parent.name == "assets":
            continue
        for found in said.findall(path.read_text(encoding="utf-8")):
            english = json.loads('"' + "".join(re.findall(r'"([^"]*)"', found)) + '"')
            for code in (each.stem for each in gui_texts.LANGUAGES.glob("*.json")):
                assert english in gui_texts.known(code), f"{path.name}: {english}"


@pytest.mark.parametrize(
    ("figure", "german"),
    [
        ("8.3 h", "8,3 h"), ("1,234", "1.234"), ("12.9 GiB", "12,9 GiB"), ("2.13.0", "2.13.0"),
        ("64 days", "64 Tage"), ("Qwen2.5", "Qwen2.5"), ("1e-4", "1e-4"), ("1,234,567.8 MiB", "1.234.567,8 MiB"),
    ],
)  # fmt: skip
def test_figures_have_the_separators_and_units_of_the_language(figure: str, german: str) -> None:
    from lora_trainer.gui.server.translation import words

    assert words("en").figure(figure) == figure
    assert words("de").figure(figure) == german
    assert words("de").message(figure) == german, "what a page shows as it is written elsewhere"
    assert words("de")("Show {#} more", figure) == f"{german} weitere zeigen"
    assert words("de")("{}, on this machine", figure).startswith(figure), "a name stays"


@pytest.mark.parametrize(
    ("english", "german"),
    [
        ("step 12 of 30, loss 0.1000", "Schritt 12 von 30, Loss 0,1000"),
        ("64 days", "64 Tage"),
        ("a.png, b.jpg and 1,234 more", "a.png, b.jpg und 1.234 weitere"),
        ("the size embedded was trained on", "die Größe, mit der embedded trainiert wurde"),
        ("at most; predicted 905.5 MiB", "höchstens; vorhergesagt 905,5 MiB"),
        ("Finished after 1,200 steps.", "Fertig nach 1.200 Schritten."),
        (
            "Solid green rule: step 1,200, the best of the saved steps.",
            "Durchgezogene grüne Linie: Schritt 1.200, der beste der gespeicherten.",
        ),
    ],
)
def test_figures_of_a_message_have_the_separators_of_the_language(
    english: str, german: str
) -> None:
    from lora_trainer.gui.server.translation import words

    assert words("de").message(english) == german


def test_german_has_one_word_for_rank_and_for_samples_and_one_gender_for_a_lora() -> None:
    others = r"\b(Rangs?|Ränge|Rängen|Probebild\w*)\b|\b([Dd]ie|[Ee]iner?|[DdMmSs]einer?|[Dd]ieser?) LoRA\b(?!-)"
    assert not [said for said in gui_texts.known("de").values() if re.search(others, said)]


@pytest.mark.parametrize("code", [each.stem for each in gui_texts.LANGUAGES.glob("*.json")])
def test_what_a_release_is_good_for_is_said_in_every_language(code: str) -> None:
    from lora_trainer.gui.server.translation import words

    rows = [row for name in families.NAMES for row in family_table(name)["releases"]]
    for row in (each for each in rows if "good_for" in each):
        assert words(code).message(row["good_for"]) == row["good_for_in"][code] != row["good_for"]


@pytest.mark.parametrize("code", [each.stem for each in gui_texts.LANGUAGES.glob("*.json")])
def test_every_text_of_a_field_of_the_page_train_has_its_translation(code: str) -> None:
    from lora_trainer.gui.train.fields import FIELDS

    for row in FIELDS:
        for english in filter(None, (row.label, row.info, row.placeholder, *row.options.values())):
            assert english in gui_texts.known(code), f"{row.key}: {english}"


@pytest.mark.parametrize(
    ("english", "values", "german"),
    [
        ("Put back {}", ("<b>",), "<b> zur\u00fcckholen"),
        ("1 deleted thing, {#}. Nothing is gone until you empty it.", ("3 MiB",), "3 MiB. End"),
        ("of no language {}", ("x",), "of no language x"),
    ],
)
def test_a_text_is_said_with_its_values_in_the_language(
    english: str, values: tuple[str, ...], german: str
) -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from lora_trainer.gui.server.translation import words

    assert german in words("de")(english, *values)
    assert words("en")(english, *values).count("{") == 0


def test_texts_of_markup_are_translated_and_what_is_code_or_of_the_user_stays() -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from lora_trainer.gui.server.translation import words

    html = (
        '<p title="Stop"> Stop <b translate="no"><i title="Stop">Stop</i></b><br><code>Stop</code>'
        '<img alt="Open &lt;b&gt;"> Stop</p>'
    )
    german = words("de").markup(html)
    assert german == (
        '<p title="Anhalten"> Anhalten <b translate="no"><i title="Stop">Stop</i></b><br>'
        '<code>Stop</code><img alt="&lt;b&gt; \u00f6ffnen"> Anhalten</p>'
    )
    assert words("en").markup(html) == html


def test_what_a_training_says_of_itself_is_translated_by_its_form() -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from lora_trainer.gui.server.translation import words

    for english, german in (
        ("step 12 of 30", "Schritt 12 von 30"),
        (
            "Train again, step 12 of 30 as usual",
            "Noch einmal trainieren, Schritt 12 von 30 wie \u00fcblich",
        ),
        ("what nobody has translated", "what nobody has translated"),
    ):
        assert words("en").message(english) == english
        assert words("de").message(english) == german


# ---- who may ask what


def through(
    who: Any, path: str = "/", *, body: tuple[bytes, ...] = (), **asked: Any
) -> tuple[int, dict[str, str], bytes, list[bytes]]:
    """Return status, headers and body of the answer to a request, and the body that the application has read.

    The application turns an error while it reads into a 400, as web frameworks do.
    """
    read: list[bytes] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        status = 200
        try:
            while len(read) < len(body):
                read.append((await receive())["body"])
        except Exception:  # noqa: BLE001 - as the frameworks do: any error of reading is a 400
            status = 400
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": PAGE})

    return *answered(Guard(application, access=who), path, body=body, **asked), read


def opened(*words: str) -> Any:
    """Return who may come in by a command line, and make its runs folder."""
    options = app.parsed(words)
    return app.access_for(options, Workplace(runs=options.runs))


@pytest.fixture
def local(tmp_path: Path) -> Any:
    return opened(f"--runs={tmp_path}")


@pytest.fixture
def cookie(local: Any) -> str:
    return f"other=1; {'='.join(local.cookie(PORT))}"


@pytest.fixture
def own(local: Any) -> str:
    """Return the host name of the pages."""
    (name,) = local.hosts - app.LOOPBACK
    return str(name)


def test_a_fault_of_the_program_says_what_happened_and_what_to_do_and_is_still_in_the_terminal() -> (
    None
):
    token = "hf_" + "a" * 34

    async def broken(scope: Message, receive: Receive, send: Send) -> None:
        raise KeyError(f"<b>{token}")

    async def served(scope: Message, receive: Receive, send: Send) -> None:
        with pytest.raises(KeyError):  # which the server writes into its terminal
            await Faults(broken)(scope, receive, send)

    for language, said in (("en", "Load the page again."), ("de", "Lade die Seite neu.")):
        status, headers, body = answered(served, "/", accept="text/html", accept_language=language)
        shown = body.decode()
        assert status == 500 and headers["cache-control"] == "no-store" and said in shown
        assert "KeyError:" in shown and "in broken" in shown, "the lines for a report"
        assert token not in shown and "<b>" not in shown.partition("<main")[2]
    status, _, body = answered(served, "/run/look", method="POST")
    assert status == 500 and "KeyError" in json.loads(body)["error"], "not that nobody answers"


def test_a_body_that_is_too_large_is_not_read_one_without_end_is_cut_and_a_websocket_closed(
    local: Any, cookie: str, own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = {"cookie": cookie, "host": own}
    monkeypatch.setattr("lora_trainer.gui.server.guard.BODY_MAX_BYTES", 10)
    monkeypatch.setattr("lora_trainer.gui.server.guard.UPLOAD_MAX_BYTES", 12)
    for declared in ("11", "999999999999", "-1", "x"):
        status, _, _, read = through(local, body=(b"x",), content_length=declared, **entered)
        assert (status, read) == (413, [])
    parts = (b"12345", b"67890", b"1", b"2")
    status, _, said, read = through(local, body=parts, **entered)
    assert (status, read) == (413, [b"12345", b"67890"]) and PAGE not in said
    assert through(local, body=parts[:2], **entered)[0] == 200
    assert through(local, "/upload/a/0", body=parts[:3], **entered)[0] == 200
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    guard: Any = Guard(None, access=local)
    asyncio.run(guard({"type": "websocket", "headers": []}, None, send))
    assert sent[0]["type"] == "websocket.close"


OPENED = {"sec_fetch_mode": "navigate", "sec_fetch_dest": "document", "accept": "text/html"}


def test_the_link_leads_to_a_name_of_its_own_whose_cookie_opens_that_name_and_port_alone(
    local: Any, cookie: str, own: str, tmp_path: Path
) -> None:
    for host in ("127.0.0.1:9000", "localhost:9000", "[::1]:9000"):  # 9000: through a tunnel
        shown = {"host": host, "query": f"run=a%26b&key={local.key}", **OPENED}
        status, headers, said, _ = through(local, **shown)
        assert (status, headers.get("set-cookie")) == (200, None)
        (address,) = re.findall(rb'given = "([^"]+)"', said)
        found = urlsplit(address.decode())
        assert (found.hostname, found.port) == (own, 9000)
        assert local.key.encode() not in said, "one ticket, not the key"
        asked = {"host": f"{own}:9000", "query": found.query, **OPENED}
        status, headers, said, _ = through(local, sec_fetch_site="cross-site", **asked)
        assert (status, headers["refresh"]) == (200, "0;url=/?run=a%26b"), "no redirection"
        name, *attributes = headers["set-cookie"].split("; ")
        assert name == "=".join(local.cookie(PORT)) and local.key not in name
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(attributes)
        assert through(local, **asked)[0] == 403, "a ticket does once"
    # The door leads there in a browser that is signed in: its strict cookie comes with the page's own request alone.
    led = {"host": own, "sec_fetch_site": "cross-site", **OPENED}
    for path, query, there in (
        ("/", "", "/"),
        ("/run", "run=a%26b", "/run?run=a%26b"),
        ("//evil.example/\r\n", "", "/evil.example/%0D%0A"),
    ):
        status, headers, _, _ = through(local, path, query=query, **led)
        assert (status, headers["refresh"]) == (200, f"0;url={there}")
        assert "set-cookie" not in headers
        own_request = {**led, "sec_fetch_site": "same-origin"}
        assert through(local, path, query=query, **own_request)[0] == 403, "once, not for ever"
    for method, path in (("POST", "/home/look"), ("GET", "/live")):
        changed = {**led, "accept": "*/*", "method": method}
        assert through(local, path, **changed)[0] == 403
    # The cookie of that name alone; who has caught it elsewhere does not know the name.
    assert through(local, cookie=cookie, host=own)[0] == 200
    assert (
        through(local, "/gradio_api/queue/join", method="POST", cookie=cookie, host=own)[0] == 200
    )
    for host in ("127.0.0.1", "localhost", f"localhost:{PORT}", "[::1]"):
        for path in ("/", "/live", "/media/thumb"):
            status, _, said, _ = through(local, path, cookie=cookie, host=host, **OPENED)
            assert status == 403 and own.encode() not in said and b"Open the link" in said
    # Who pastes the whole link into the page gets in, as by the key alone; the page speaks the reader's language.
    pasted = quote(f" http://127.0.0.1:{PORT}/?key={local.key}\n")
    assert through(local, query=f"key={pasted}", host="127.0.0.1")[0] == 200
    assert through(local, query="key=http://[", host="127.0.0.1")[0] == 403
    for host in ("127.0.0.1", own):
        status, _, said, _ = through(local, "/train", host=host, accept_language="de", **OPENED)
        assert status == 403 and "Öffne den Link" in said.decode() and b'name="key"' in said
        assert (b"<script>" in said) is (host != own), "under its own name it would lead to itself"
    other = opened(f"--runs={tmp_path / 'other'}")
    assert through(other, cookie=cookie, host=own)[0] == 400
    for name in (
        f"lora_train_key_7861={local.cookie(7861)[1]}",
        f"lora_train_key_{PORT}={local.key}",
    ):
        assert through(local, cookie=name, host=own)[0] == 403
    # Names differ too: a browser would replace one server's cookie by the other's.
    assert all(at != here for at, here in zip(local.cookie(7861), local.cookie(PORT), strict=True))
    for path, method in (("/media/thumb", "GET"), ("/", "POST"), ("/config", "GET")):
        assert through(local, path, query=f"key={local.key}", method=method, host=own)[0] == 403
    # A program sends the key itself, under any name of this machine.
    for host in ("127.0.0.1", own):
        by_program = {"authorization": f"Bearer {local.key}", "host": host}
        assert through(local, "/config", **by_program)[0] == 200
        for wrong in (f"Bearer {local.key}x", "Bearer ", f"Basic {local.key}", local.key):
            assert through(local, "/config", authorization=wrong, host=host)[0] == 403
    ticket = local.ticket()
    assert through(local, query=f"key={ticket}", host="127.0.0.1")[0] == 200
    assert through(local, query=f"key={ticket}", host="127.0.0.1")[0] == 403
    assert through(local, query=f"key={ticket}", cookie=cookie, host=own)[0] == 303
    again = opened(f"--runs={tmp_path}")
    assert through(again, cookie=cookie, host=own)[0] == 200, "after a restart"


def test_a_page_may_ask_whether_its_browser_finds_the_name_and_nothing_more(
    local: Any, own: str
) -> None:
    elsewhere = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"}
    status, headers, said, _ = through(local, "/here", host=own, **elsewhere)
    assert (status, said, headers["cross-origin-resource-policy"]) == (200, b"", "cross-origin")
    assert through(local, "/here/x", host=own, **elsewhere)[0] == 403
    assert through(local, "/here", host="evil.example")[0] == 400


@pytest.mark.parametrize(
    "others",
    ["a b=1", "x@y=1", '"\x00[=', "bad={1:2}", "=", ";;", "lora_train_key_7861=1", "k\xe4se=1", ""],
)
def test_no_cookie_of_another_program_locks_out(
    local: Any, cookie: str, own: str, others: str
) -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from lora_trainer.gui.server import language
    from starlette.datastructures import Headers

    name = local.cookie(PORT)[0]
    for header in (f"{others}; {cookie}", f"{cookie}; {others}", f"{name}=old; {others}; {cookie}"):
        assert through(local, cookie=header, host=own)[0] == 200
        chosen = Headers({"accept-language": "en", "cookie": f"{others}; {language.COOKIE}=de"})
        assert language.wanted(chosen) == "de"
        page = Headers({language.HEADER: "en", "cookie": f"{language.COOKIE}=de"})
        assert language.wanted(page) == "en", "another tab has chosen German meanwhile"
    assert through(local, cookie=f"{others}; {name}=x", host=own)[0] == 403


def test_nobody_else_can_listen_on_the_other_loopback_address(tmp_path: Path) -> None:
    skip_without_gradio()
    from lora_trainer.gui.server import serve as server

    addresses = ("127.0.0.1", "127.0.0.1", "127.0.0.2")  # not each machine has ::1
    with socket.create_server(("127.0.0.2", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(MachineError, match="cannot serve"):
            server.listen(addresses, port)
    listening = server.listen(addresses, 0)
    assert len({place.getsockname()[1] for place in listening}) == 1 and len(listening) == 2
    for place in listening:
        place.close()
    assert "::1" in app.LOOPBACK_ADDRESSES
    (alone,) = server.listen(("127.0.0.1", "2001:db8::1"), 0)  # an address it does not have
    alone.close()


def test_the_key_stays_and_only_its_user_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(runs: Path) -> str:
        return str(opened(f"--runs={runs}").key)

    runs, file = tmp_path / "runs", tmp_path / "runs" / ".gui" / "key"
    with ThreadPoolExecutor(8) as pool:
        (first,) = set(pool.map(lambda _: key(runs), range(16)))
    assert len(first) >= 43
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [path.name for path in file.parent.iterdir()] == ["key"]
    assert key(tmp_path / "other") != first
    for damage in (b"", b"short", b"\xff" * 50):
        file.write_bytes(damage)
        again = key(runs)
        assert len(again) >= 43 and key(runs) == again

    def refuse(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr("os.link", refuse)
    assert key(tmp_path / "no links") == key(tmp_path / "no links")
    with pytest.raises(MachineError, match="cannot write"):
        key(file)


def basic(password: str, user: str = "me") -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def test_others_give_the_password_under_any_name_and_guess_once_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits_s: list[float] = []

    async def sleep(seconds: float) -> None:
        waits_s.append(seconds)

    monkeypatch.setattr("lora_trainer.gui.server.access.asyncio.sleep", sleep)
    monkeypatch.setattr(
        "lora_trainer.gui.server.access.time.monotonic", lambda: 100.0
    )  # but for that
    right = "pass:w\u00f6rd 1"
    monkeypatch.setenv("LORA_TRAIN_GUI_PASSWORD", right)
    who = opened("--listen=10.1.2.3", "--host-name=studio.lan", f"--runs={tmp_path}")
    assert {"10.1.2.3", "studio.lan", "localhost", "127.0.0.1"} <= who.hosts
    for user in ("", "me"):
        assert through(who, "/config", authorization=basic(right, user))[0] == 200
    local = opened(f"--runs={tmp_path}")
    its_cookie = "=".join(local.cookie(PORT))
    assert through(who, query=f"key={local.key}", cookie=its_cookie)[0] == 401
    for host, origin, status in (
        ("studio.lan", "", 200),
        ("evil.example", "", 400),
        ("studio.lan", "http://evil.example", 403),
    ):
        headers = {
            "host": host,
            "authorization": basic(right),
            **({"origin": origin} if origin else {}),
        }
        assert through(who, **headers)[0] == status
    for header in ("", "Basic !!!", "Bearer x", "Basic /w=="):
        status, headers, said, _ = through(who, authorization=header)
        assert status == 401 and headers["www-authenticate"].startswith("Basic ")
        assert b"pass:" not in said
        status, headers, said, _ = through(who, authorization=header, accept="text/html")
        assert status == 401 and headers["www-authenticate"].startswith("Basic ")
        assert b"A password is needed" in said and b"pass:" not in said
    assert waits_s == [], "a request without a password is not a guess"
    guesses = [through(who, authorization=basic(right[:4]))[0] for _ in range(8)]
    assert guesses == [401] * 6 + [429] * 2
    assert waits_s == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert through(who, authorization=basic(right))[0] == 429, "not even looked at"
    assert through(who, client="10.0.0.2", authorization=basic(right))[0] == 200
    monkeypatch.setattr("lora_trainer.gui.server.guesses.NETWORKS_MAX", 3)
    for client in "abcde":
        assert through(who, client=client, authorization=basic("wrong"))[0] == 401
    assert list(who.held_back.next_s) == ["c", "d", "e"]
    through(who, client="d", authorization=basic(right))
    assert list(who.held_back.next_s) == ["c", "e"]


def test_guesses_count_by_network_and_together_and_who_knows_the_password_does_not_wait() -> None:
    assert network_of("2001:db8:1:2:3::4") == network_of("2001:db8:1:2:ffff::%eth0")
    assert network_of("2001:db8:1:2::") != network_of("2001:db8:1:3::")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") != network_of("10.0.0.2")

    def looked_at(clients: Iterable[str], *, each_s: float) -> int:
        limit, number = GuessLimit(), 0
        limit.right("10.1.1.1")
        for index, client in enumerate(clients):
            if (wait_s := limit.wait_s(client, now_s=1e3 + index * each_s)) is not None:
                number += 1
                limit.wrong(client, now_s=1e3 + index * each_s + wait_s)
        now_s = 1e3 + index * each_s
        assert limit.wait_s("10.1.1.1", now_s=now_s) == 0.0
        limit.wrong("10.1.1.1", now_s=now_s)
        assert limit.wait_s("10.1.1.1", now_s=now_s) in (None, 1.0), "a wrong one ends the trust"
        return number

    one = (f"2001:db8::{n >> 16:x}:{n & 0xFFFF:x}" for n in range(100_000))
    assert looked_at(one, each_s=0.001) <= 100 / GUESS_EVERY_S + 10
    many = (f"2001:db8:{n >> 16:x}:{n & 0xFFFF:x}::1" for n in range(100_000))
    assert looked_at(many, each_s=0.001) <= BURST + 100 / GUESS_EVERY_S + 10


def test_a_server_for_others_needs_a_good_password_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = f"--runs={tmp_path / 'runs'}"
    for address in ("0.0.0.0", "::", "10.0.0.1", "studio.lan"):
        for password in ("", "short"):
            monkeypatch.setenv("LORA_TRAIN_GUI_PASSWORD", password)
            with pytest.raises(RequestError, match="at least 8 characters"):
                opened(f"--listen={address}", runs)
        with pytest.raises(RequestError, match="--datasets"):
            app.workplace(app.parsed([f"--listen={address}", runs]))
    for address in ("127.0.0.1", "::1", "localhost", "127.1.2.3"):
        assert opened(f"--listen={address}", runs).key
        assert app.workplace(app.parsed([f"--listen={address}", runs])).roots is None
    with pytest.raises(RequestError, match="--listen"):
        opened("--host-name=studio.lan", runs)
    with pytest.raises(InputError, match="the folder .* does not exist"):
        app.workplace(app.parsed([runs, f"--datasets={tmp_path}/none"]))
    named = app.parsed(["--listen=0.0.0.0", runs, f"--datasets={tmp_path}"])
    assert app.workplace(named).roots == (tmp_path,)


def test_alone_every_folder_may_be_named_and_others_name_the_given_ones(tmp_path: Path) -> None:
    place = tmp_path
    for name in ("runs/.gui/uploads/cats", "sets/owls/10_owl", "elsewhere"):
        (place / name).mkdir(parents=True)
    work = Workplace(runs=place / "runs")
    (place / "sets" / "link").symlink_to(place / "elsewhere")
    for typed in (f' "{place / "elsewhere"}" ', str(place / "sets" / "link")):
        assert work.folder(typed) == place / "elsewhere"
    (place / "sets" / "link").unlink()
    bounded = Workplace(runs=place / "runs", roots=(place / "sets",))
    owls = place / "sets" / "owls"
    assert bounded.folder(str(owls)) == owls
    assert bounded.folder(str(place / "runs" / ".gui" / "uploads" / "cats")).name == "cats"
    for folder in (place, place / "elsewhere", place / "sets" / ".." / "elsewhere", "~", "/"):
        with pytest.raises(InputError, match="outside of the folders"):
            bounded.folder(str(folder))
    for text in ("", "\0", "~nobody-of-that-name/x", "x" * 5000, "/a\nb"):
        for either in (bounded, work):
            with pytest.raises(InputError) as error:
                either.folder(text)
            assert "\n" not in str(error.value)
    (owls / "again").symlink_to(owls / "10_owl")
    (owls / "circle").symlink_to(owls / "circle")
    assert bounded.folder(str(owls)) == owls, "links inside do not matter"
    for name in ("a.txt", "10_owl/a.png", "10_owl/sub"):
        (owls / name).symlink_to(place / "elsewhere")
        with pytest.raises(InputError, match="is a link out of the folders"):
            bounded.folder(str(owls))
        assert work.folder(str(owls)) == owls
        (owls / name).unlink()


# ---- the page Machine


def machine_page(work: Workplace, found: Any, *, code: str = "en", **shown: Any) -> str:
    """Return the report of the page Machine."""
    from lora_trainer.gui.machine import report
    from lora_trainer.gui.server.templates import render
    from lora_trainer.gui.server.translation import words

    said = {"cache": report.cache_state(), "links": report.hub(), **shown}
    return render("machine/report.html", words(code), **report.shown(work, found, **said))


def test_every_size_of_the_page_machine_has_the_comma_of_the_language(work: Workplace) -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    here = replace(detect(), gpus=(), gpu_reason="no driver")
    sizes = re.findall(r"\d+[.,]\d+ [KMG]iB", machine_page(work, here, code="de"))
    assert len(sizes) >= 4 and not [size for size in sizes if "." in size]


def test_the_memory_that_a_loaded_base_keeps_is_named(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from lora_trainer.gui.machine import report

    here = replace(detect(), gpus=(), gpu_reason="no driver")
    assert "stays loaded" not in machine_page(work, here)
    kept = Keeper(pid=1, started_s=0.0, gpu_uuid="GPU-a", gpu_bytes=3 * GIB)
    monkeypatch.setattr(report, "keeper", lambda: kept)
    assert "page of a LoRA: 3.0 GiB. They count as free" in machine_page(work, here)


def test_the_machine_is_told_in_words_and_a_missing_package_with_its_command(
    work: Workplace,
) -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    here = replace(detect(), gpus=(), gpu_reason="no driver")
    sizes = {"total_bytes": 24 * GIB, "free_bytes": 23 * GIB, "compute_capability": (8, 9)}
    card = Gpu(index=0, name="<b>RTX 4090</b>", driver="580.1", **sizes)
    markup = machine_page(work, here)
    assert "Trains on the processor" in markup and "no driver" in markup
    build = TorchBuild(version="2.13.0+cu130", kind="cuda", toolkit="13.0")
    markup = machine_page(work, replace(here, gpus=(card,), torch=build))
    assert "Trains on &lt;b&gt;RTX 4090&lt;/b&gt;." in markup
    assert "23.0 GiB free of 24.0 GiB" in markup
    markup = machine_page(work, replace(here, packages={**here.packages, "peft": None}))
    assert "1 to be mended" in markup
    assert "<code>pip install peft</code>" in markup
    markup = machine_page(work, replace(here, packages={**here.packages, "prodigyopt": None}))
    assert "All that is needed is installed" in markup
    assert "<code>pip install prodigyopt</code>" in markup


def test_the_page_machine_says_which_bases_fit(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from lora_trainer.gui.machine import routes as machine
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    asked: list[tuple[str, ...]] = []

    def answer_of(words: tuple[str, ...]) -> command_lines.Answer:
        if words == ("bases",):
            rows = [
                {
                    "source": f"of/{number}",
                    "offered": number,
                    "family": "sd15",
                    "subjects": ["people"],
                    "download_bytes": 100 - number,
                }
                for number in range(20, 0, -1)
            ]
            return command_lines.Answer(values={"releases": rows})
        asked.append(words)
        return command_lines.Answer(
            values=None,
            error="error: this run needs at least 31.40 GiB for training, but there are only 24.00 GiB of "
            "memory free, less a margin. Fix: another base",
        )

    plans = command_lines.Plans(work, ask=answer_of)
    monkeypatch.setattr(machine.command_lines, "Plans", lambda _work: plans)
    client = TestClient(Starlette(routes=machine.routes(work)))
    bases = client.post("/doctor/bases", json={}).json()["bases"]
    releases = [f"of/{number}" for number in range(1, 9)]
    assert [base["source"] for base in bases] == ["embedded", *reversed(releases)], "small to large"
    assert "family=sd15" in bases[1]["picture"]
    assert bases[0]["name"] == "Miniature", "which trains on any machine"
    fits = client.post("/doctor/fits", json={"source": "of/1"}).json()
    assert (fits["fits"], fits["said"]) == ("bad", "Does not fit")
    assert (
        fits["why"]
        == "This run needs at least 31.40 GiB for training, but there are only 24.00 GiB of memory free, less a margin."
    )
    assert fits["needs"] == "needs 31.40 GiB" and fits["needs_bytes"] == round(31.4 * GIB)
    german = client.post("/doctor/fits", json={"source": "of/1"}, headers={"accept-language": "de"})
    assert german.json()["why"] == (
        "Dieses Training braucht mindestens 31,40 GiB (Training), "
        "doch da sind nur 24,00 GiB freier Arbeitsspeicher, abzüglich einer Reserve."
    )
    assert german.json()["needs"] == "braucht 31,40 GiB"
    assert "--base=of/1" in asked[0]
    client.post("/doctor/fits", json={"source": "of/1", "vram_gib": 12})
    assert asked[-1][-2:] == ("--json", "--vram=12"), "a card that one has somewhere else"


def test_downloads_are_forbidden_for_this_process_and_all_it_starts_and_allowed_again(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from huggingface_hub import constants
    from lora_trainer.gui import offline, plan_process
    from lora_trainer.gui.machine import routes as machine
    from starlette.applications import Starlette
    from starlette.testclient import TestClient

    def process(*_words: object, **_options: object) -> SimpleNamespace:
        ends = {"kill": lambda: None, "wait": lambda: 0}
        return SimpleNamespace(poll=lambda: None, **ends)

    for name in OFFLINE_VARIABLES:
        monkeypatch.setenv(name, "")  # given back at the end
        monkeypatch.delenv(name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(plan_process.subprocess, "Popen", process)
    plans = plan_process.PlanProcess(within_s=1)
    first = plans._alive()
    client = TestClient(Starlette(routes=machine.routes(work)))
    forbidden = client.post("/doctor/offline", json={"offline": True}).json()
    assert forbidden["done"] == "Nothing is downloaded any more."
    assert "checked>" in forbidden["report"]
    assert os.environ["HF_HUB_OFFLINE"] == "1" and constants.HF_HUB_OFFLINE
    assert plans._alive() is not first, "it has read at its start that it may download"
    # A program that is started later on the same runs keeps to it; one that its user has forbidden downloads stays so.
    assert environment_of(read_rules(work.runs), {"A": "b"}).items() >= {
        ("A", "b"),
        ("HF_HUB_OFFLINE", "1"),
    }
    allowed = client.post("/doctor/offline", json={"offline": False}).json()
    assert allowed["done"] == "Downloads are allowed again." and "checked" not in allowed["report"]
    assert not {*OFFLINE_VARIABLES} & {*os.environ} and not constants.HF_HUB_OFFLINE
    # A worker that was started meanwhile hands on what is allowed now.
    begun = {"HF_HUB_OFFLINE": "1", OFFLINE_VARIABLES[1]: "1"}
    assert environment_of(read_rules(work.runs), begun) == {}
    own = {"HF_HUB_OFFLINE": "1"}
    assert environment_of(read_rules(work.runs), own) == own
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    offline.apply(work)
    assert constants.HF_HUB_OFFLINE


def test_folders_network_and_login_are_told_and_no_token_and_a_cache_in_use_stays(
    work: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from lora_trainer.gui.machine import report as doctor

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = doctor.cache_state().folder
    folder.create()
    entry = folder.root / "latents" / "01" / f"{'0123456789abcdef' * 4}.safetensors"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"x" * 2048)
    secret = "hf_" + "abcDEF0123" * 4
    monkeypatch.setenv("HF_TOKEN", secret)
    off, here = doctor.hub(), detect()  # tests are offline
    markup = machine_page(work, here, links=off)
    assert off.token and secret not in f"{off} {markup}"
    assert off.is_fixed and "HF_HUB_OFFLINE was set at the start" in markup
    assert "checked disabled" in markup and "Signed in" in markup
    on = replace(
        off, offline=False, is_fixed=False, token=False, folder=work.runs / "not" / "there"
    )
    markup = machine_page(work, here, links=on)
    assert "checked" not in markup and "Train asks for it then" in markup
    assert "2.0 KiB in 1 entries" in markup and str(work.runs) in markup
    folders = markup[markup.index("Folders") : markup.index("Versions")]
    assert folders.count("GiB") + folders.count("MiB") >= 3
    live = fake_run(work.runs / "live", steps=30).write()
    write_status(live)
    with pytest.raises(MachineError, match="while live trains"):
        doctor.clear_cache(work)
    write_status(live, state="finished")
    with in_use(entry.parents[2]), pytest.raises(MachineError, match="a training uses"):
        doctor.clear_cache(work)
    assert entry.exists()
