"""`normscope watch --page`: who may ask, what is answered, and what condensed columns keep."""

import html
import http.client
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from normscope.cli.main import run
from normscope.errors import UsageError
from normscope.monitor import Event, Layout, Raised, Row, RunReader, RunStore
from normscope.monitor.condense import MOST, Held, condense
from normscope.monitor.page import Figures, document
from normscope.monitor.serve import Server
from normscope.monitor.store import Grid
from normscope.rules import Finding, Severity

STEP: Layout = (("loss", ""), ("lr", ""), ("stream/rms", "blocks.0"), ("stream/rms", "blocks.1"))
HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'


def row(step: int, *values: float, rank: int = 0) -> Row:
    return Row(step, rank, float(step), "step", np.array(values))


def rows(first: int, last: int) -> list[Row]:
    return [row(step, 5.0 - step / 1e5, 1e-3, 1.0, float(step)) for step in range(first, last + 1)]


def alarm(step: int, rank: int = 0) -> Raised:
    return Raised(step, rank, 1.0, Finding("NS802", "loss-spike", Severity.WARNING, (), f"At step {step}."))


@pytest.fixture
def store(path: Path) -> Iterator[RunStore]:
    with RunStore(path) as store:
        store.declare("step", STEP)
        store.note("model", HOSTILE)
        store.add(rows(1, 100), [alarm(50)])
        yield store


@pytest.fixture
def server(store: RunStore, path: Path) -> Iterator[Server]:
    with Server(document(path.name), Figures(path)) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


def ask(
    server: Server, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, str]:
    """Status, headers and text of an answer; `headers` with _ for -, and our Host unless one is given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    given = {"Host": f"127.0.0.1:{server.server_port}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    for name, value in given.items():
        for each in value.split("|") if value else []:
            connection.putheader(name, each)
    connection.endheaders()
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, answer.headers, text


# Who may ask --------------------------------------------------------------------------------------------


def test_the_page_is_served_to_its_own_address(server: Server) -> None:
    place = f"/{server.token}/"
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{43}/", server.url)
    for headers in (
        {},
        {"Host": f"localhost:{server.server_port}"},
        {"Sec_Fetch_Site": "none"},
        {"Sec_Fetch_Site": "same-origin", "Origin": f"http://127.0.0.1:{server.server_port}"},
    ):
        status, said, text = ask(server, place, **headers)
        assert (status, said["Content-Type"]) == (200, "text/html; charset=utf-8")
        assert text.startswith("<!doctype html>")
        assert ask(server, place + "data", **headers)[0] == 200


PORT = "{port}"
FOREIGN: dict[str, dict[str, str]] = {
    "another host": {"Host": "evil.example"},
    "another host with our port": {"Host": f"evil.example:{PORT}"},
    "a name that ends as ours": {"Host": f"evil.127.0.0.1:{PORT}"},
    "our host without the port": {"Host": "127.0.0.1"},
    "another port": {"Host": "127.0.0.1:1"},
    "no host": {"Host": ""},
    "two hosts": {"Host": f"127.0.0.1:{PORT}|evil.example"},
    "all addresses": {"Host": f"0.0.0.0:{PORT}"},
    "another origin": {"Origin": "https://evil.example"},
    "another port as origin": {"Origin": "http://127.0.0.1:1"},
    "https as origin": {"Origin": f"https://127.0.0.1:{PORT}"},
    "an origin that is hidden": {"Origin": "null"},
    "an origin of our other name": {"Origin": f"http://localhost:{PORT}"},
    "two origins": {"Origin": f"http://127.0.0.1:{PORT}|https://evil.example"},
    "another site": {"Sec_Fetch_Site": "cross-site"},
    "another port of this machine": {"Sec_Fetch_Site": "same-site"},
    "an unknown site": {"Sec_Fetch_Site": "?"},
}


@pytest.mark.parametrize("who", FOREIGN)
def test_another_page_is_refused_even_with_the_token(server: Server, who: str) -> None:
    headers = {name: value.replace(PORT, str(server.server_port)) for name, value in FOREIGN[who].items()}
    for what in ("", "data", "data?quantity=stream/rms", "nothing"):
        status, said, text = ask(server, f"/{server.token}/{what}", **headers)
        assert status == 403, what
        assert server.token not in text + str(said)
        assert "run.db" not in text


@pytest.mark.parametrize(
    "place",
    [
        *(
            "/",
            "/data",
            "//",
            "/{short}/",
            "/{short}/data",
            "/{long}/data",
            "/{case}/data",
            "/x/{token}/data",
        ),
        *("/data?token={token}", "?{token}", "/%00/data", "/é/data", "/../{token}/data"),
        *("http://127.0.0.1/", "*"),
    ],
)
def test_a_request_without_the_token_is_refused(server: Server, place: str) -> None:
    token = server.token
    words = {"short": token[:-1], "long": token + "A", "case": token.swapcase(), "token": token}
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection._encode_request = lambda text: text.encode("latin-1")  # type: ignore[attr-defined]
    connection.putrequest("GET", place.format(**words), skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 403
    assert token not in answer.read().decode()
    connection.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
def test_the_page_only_reads(server: Server, method: str) -> None:
    status, said, _ = ask(server, f"/{server.token}/data", method)
    assert (status, said["Access-Control-Allow-Origin"]) == (405, None)
    assert ask(server, "/data", method)[0] == 403
    assert ask(server, f"/{server.token}/data", method, Origin="https://evil.example")[0] == 403


def test_an_answer_is_for_this_page_alone(server: Server) -> None:
    for place in ("", "data", "nothing"):
        status, said, _ = ask(server, f"/{server.token}/{place}")
        assert status == (404 if place == "nothing" else 200)
        assert not [name for name in said if name.lower().startswith("access-control")]
        assert said["Cache-Control"] == "no-store"
        assert said["Referrer-Policy"] == "no-referrer"
        assert said["X-Content-Type-Options"] == "nosniff"
        assert said["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "default-src 'none'" in said["Content-Security-Policy"]
        assert "Python" not in said["Server"]


def test_the_page_runs_no_script_but_its_own_and_loads_nothing(server: Server) -> None:
    _, said, text = ask(server, f"/{server.token}/")
    policy = said["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in policy
    assert "connect-src 'self'" in policy
    (digest,) = re.findall(r"script-src 'sha256-([\w+/=]+)'", policy)
    assert f"script-src &#39;sha256-{digest}&#39;" in text or f"script-src 'sha256-{digest}'" in text
    assert not re.findall(r"""(?:src|href)\s*=\s*["']""", text)
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert "innerHTML" not in text, "names of the run are text, never markup"


def test_names_are_escaped(path: Path) -> None:
    assert HOSTILE not in document(HOSTILE).html


def test_bytes_that_are_no_request_are_answered_or_dropped(server: Server) -> None:
    for bytes_ in (
        b"\x00\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"BREW / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
    ):
        with socket.create_connection(("127.0.0.1", server.server_port), 20) as connection:
            connection.sendall(bytes_)
            assert server.token.encode() not in connection.recv(1 << 16)
    assert ask(server, f"/{server.token}/data")[0] == 200


def test_the_address_for_a_browsers_command_line_works_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    server.open_browser()
    assert server.token not in opened[0]
    place = "/" + opened[0].rpartition("/")[2]
    assert ask(server, place, Host="evil.example")[0] == 403
    status, said, _ = ask(server, place)
    assert (status, said["Location"]) == (303, f"/{server.token}/")
    assert ask(server, place)[0] == 403


def test_it_listens_on_loopback_alone(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"


# What is answered ---------------------------------------------------------------------------------------


def figures_of(server: Server, **asked: Any) -> dict[str, Any]:
    query = "&".join(f"{name}={value}" for name, value in asked.items())
    status, _, text = ask(server, f"/{server.token}/data?{query}")
    found: dict[str, Any] = json.loads(text, parse_constant=pytest.fail)
    assert status == 200, found
    return found


def held(answer: dict[str, Any], alarms: int, events: int = 0) -> dict[str, Any]:
    columns = {name: f"{answer[name]['width']}.{answer[name]['rows']}" for name in ("loss", "heat")}
    return columns | {"version": answer["version"], "alarms": alarms, "events": events}


def test_the_figures_of_a_run(server: Server, store: RunStore) -> None:
    store.add([row(101, math.nan, 1e-3, math.inf, -math.inf)])
    store.add(
        events=[
            Event(101, 0, 1.0, "first-wrong-value", {"sentence": "Here."}),
            Event(9, 0, 1.0, "x", {"a": "b", "all": [1]}),
        ]
    )
    now = figures_of(server)
    assert (now["state"], now["last_step"], now["model"]) == ("running", 101, HOSTILE)
    assert (now["quantity"], now["sites"]) == ("stream/rms", ["blocks.0", "blocks.1"])
    assert now["figures"]["loss"] == "nan"
    assert now["first_wrong_value"]["data"]["sentence"] == "Here."
    assert [(each["kind"], each["data"]) for each in now["events"]] == [("x", {"a": "b"})]
    assert now["alarms"][0]["message"] == "At step 50."
    loss, heat = now["loss"], now["heat"]
    assert (loss["first"], loss["last"]) == ([*range(1, 102)], [*range(1, 102)])
    assert (loss["low"][0][0], loss["low"][0][100]) == (4.99999, None)
    assert loss["broken"] == [[100, 0, "nan", 101]]
    assert heat["broken"] == [[100, 0, "inf", 101], [100, 1, "-inf", 101]]
    assert heat["low"][1][:2] == [1.0, 2.0]


def test_only_what_is_new_is_sent(server: Server, store: RunStore) -> None:
    first = figures_of(server)
    nothing = figures_of(server, **held(first, 1))
    assert nothing["version"] == first["version"]
    assert (nothing["loss"]["start"], nothing["loss"]["first"], nothing["alarms"]) == (100, [], [])
    store.add(rows(101, 103), [alarm(102)])
    more = figures_of(server, **held(first, 1))
    assert (more["heat"]["start"], more["heat"]["first"]) == (100, [101, 102, 103])
    assert [each["step"] for each in more["alarms"]] == [102]
    assert more["first_alarm"] == 1


def test_all_is_sent_again_when_what_was_sent_no_longer_holds(
    server: Server, store: RunStore, path: Path
) -> None:
    store.declare("sites", (("stream/max", "blocks.0"),))
    store.add([Row(10, 0, 1.0, "sites", np.ones(1))])
    with RunStore(path, resume=True) as resumed:
        first = figures_of(server)
        for layout in (STEP, (*STEP, ("stream/rms", "blocks.2"))):
            resumed.declare("step", layout)
            resumed.add([Row(90, 0, 1.0, "step", np.ones(len(layout)))])
            again = figures_of(server, **held(first, 1))
            assert again["version"] != first["version"]
            assert (again["loss"]["start"], again["heat"]["start"], again["first_alarm"]) == (0, 0, 0)
            first = again
    other = figures_of(server, **held(first, 1) | {"quantity": "stream/max"})
    assert (other["quantity"], other["heat"]["start"], other["heat"]["first"]) == ("stream/max", 0, [10])


@pytest.mark.parametrize(
    "asked",
    [
        {"loss": "x", "heat": "1.2.3", "alarms": "-1"},
        {"loss": "1.99999", "heat": "0.0", "alarms": "9" * 30, "rank": "-1"},
        {"loss": "", "heat": ".", "events": "1e9", "rank": "x"},
    ],
)
def test_an_odd_question_gets_all(server: Server, asked: dict[str, str]) -> None:
    now = figures_of(server, **{"version": figures_of(server)["version"]} | asked)
    assert (now["loss"]["start"], now["heat"]["start"]) == (0, 0)


def test_a_store_that_goes_and_comes_back(server: Server, store: RunStore, path: Path) -> None:
    store.close()
    before = figures_of(server)
    for file in path.parent.iterdir():
        file.unlink()
    status, _, text = ask(server, f"/{server.token}/data")
    assert status == 503
    assert "not found" in json.loads(text)["error"]
    path.write_text("no store " * 1000)
    assert ask(server, f"/{server.token}/data")[0] == 503
    path.unlink()
    with RunStore(path) as other:
        other.declare("step", STEP)
        other.add(rows(1, 3))
    after = figures_of(server, **held(before, 1))
    assert (after["last_step"], after["loss"]["first"]) == (3, [1, 2, 3])


def test_a_quantity_or_rank_that_is_not_there_is_said(server: Server) -> None:
    for asked in ("quantity=stream/rns", "rank=7"):
        status, _, text = ask(server, f"/{server.token}/data?{asked}")
        assert status == 503
        assert "expected one of" in json.loads(text)["error"]


def test_nothing_is_kept_for_a_rank_that_is_not_there(store: RunStore, path: Path) -> None:
    figures = Figures(path)
    for rank in range(5, 15):
        with pytest.raises(UsageError, match="expected one of"):
            figures.answer({"rank": str(rank)})
    figures.answer({"rank": "0"})
    assert list(figures._watchers) == [0]


def test_the_other_run_comes_in_increments_too(store: RunStore, path: Path) -> None:
    good = path.with_name("good.db")
    with RunStore(good) as other:
        other.declare("step", STEP)
        other.add(rows(1, 100))
        figures = Figures(path, against=good)
        first = figures.answer({})["against"]
        assert (first["name"], first["last_step"], first["parting"]["state"]) == ("good.db", 100, "together")
        assert (first["sites"], first["heat"]["low"]) == (["blocks.0", "blocks.1"], [[0.0] * 100] * 2)
        version = figures.answer({})["version"]
        other.add(rows(101, 110))
        store.add(rows(101, 105))
        more = figures.answer({"version": version, "good": "1.100", "ratio": "1.100"})["against"]
        assert (more["loss"]["first"], more["heat"]["first"]) == ([*range(101, 111)], [*range(101, 106)])
    with RunStore(good, resume=True) as again:
        again.declare("step", STEP)
        version = figures.answer({})["version"]
        again.add(rows(50, 50))
        assert figures.answer({})["version"] != version


def test_a_run_without_rows_has_figures(path: Path) -> None:
    with RunStore(path):
        now = Figures(path).answer({})
    assert (now["loss"], now["heat"], now["last_step"]) == (None, None, None)


# Columns ------------------------------------------------------------------------------------------------


def grid_of(values: np.ndarray, every: int = 1) -> Grid:
    steps = np.arange(1, len(values) + 1) * every
    return Grid(steps, tuple(f"s{i}" for i in range(values.shape[1])), values, np.ones(values.shape, bool))


@pytest.mark.parametrize("count", [1, 2, MOST, MOST + 1, 50_000])
def test_no_extreme_and_no_broken_value_is_lost(count: int) -> None:
    rng = np.random.default_rng(count)
    values = rng.normal(size=(count, 5))
    places = rng.choice(count, min(count, 4), replace=False)
    values[places, 2] = [math.nan, 1e30, -1e30, math.inf][: len(places)]
    found = condense(grid_of(values))
    assert len(found.first) <= MOST
    assert found.width == 2 ** math.ceil(math.log2(max(1, count / MOST)))
    for i in range(count):
        column = i // found.width
        assert found.first[column] <= i + 1 <= found.last[column]
    for site in range(5):
        finite = values[np.isfinite(values[:, site]), site]
        low, high = (each[site][~np.isnan(each[site])] for each in (found.low, found.high))
        assert (len(low) > 0) == (len(finite) > 0)
        if len(low):
            assert (low.min(), high.max()) == (finite.min(), finite.max())
    wrong = {int(i) for i in places if not math.isfinite(values[i, 2])}
    assert {step - 1 for _, site, _, step in found.broken if site == 2} == wrong
    assert {column for column, *_ in found.broken} == {i // found.width for i in wrong}


def test_a_column_holds_its_rows_and_no_others() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3000, 3))
    values[rng.random(values.shape) < 0.01] = math.nan
    grid = grid_of(values)
    grid.present[100:140, 1] = False
    found = condense(grid)
    for column, (first, last) in enumerate(zip(found.first - 1, found.last, strict=True)):
        for site in range(3):
            part = values[first:last, site][grid.present[first:last, site]]
            finite = part[np.isfinite(part)]
            low, high = (finite.min(), finite.max()) if len(finite) else (math.nan, math.nan)
            np.testing.assert_array_equal([found.low[site, column], found.high[site, column]], [low, high])
            assert ((column, site) in {each[:2] for each in found.broken}) == (len(finite) < len(part))


@pytest.mark.parametrize("first", [0, 1, 599, 600, 601, 1200, 1999])
def test_increments_make_the_same_columns_as_all_at_once(first: int) -> None:
    values = np.random.default_rng(1).normal(size=(2000, 2))
    values[::37, 1] = math.nan
    whole = condense(grid_of(values))
    before = condense(grid_of(values[:first]))
    after = condense(grid_of(values), Held(before.width, before.rows))
    start = after.start
    assert start == (first // whole.width if before.width == whole.width else 0)
    for name in ("first", "last"):
        joined = np.concatenate([getattr(before, name)[:start], getattr(after, name)])
        np.testing.assert_array_equal(joined, getattr(whole, name))
    for name in ("low", "high"):
        joined = np.concatenate([getattr(before, name)[:, :start], getattr(after, name)], axis=1)
        np.testing.assert_array_equal(joined, getattr(whole, name))
    assert repr([each for each in before.broken if each[0] < start] + after.broken) == repr(whole.broken)


def test_the_largest_numbers_stay_numbers() -> None:
    found = condense(grid_of(np.array([[1.7976931348623157e308], [-5e-324]]))).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False))["low"] == [[1.79769e308, -5e-324]]


def test_a_long_run_is_answered_fast(path: Path) -> None:
    with RunStore(path) as store:
        store.declare("step", STEP)
        store.add(rows(1, 50_000))
        figures = Figures(path)
        first = figures.answer({})
        store.add(rows(50_001, 50_010))
        begun = time.process_time()
        more = figures.answer({name: str(value) for name, value in held(first, 0).items()})
        seconds = time.process_time() - begun
    assert first["loss"]["width"] == 128
    assert len(first["loss"]["first"]) <= MOST
    assert len(more["heat"]["first"]) <= 2
    assert len(json.dumps(more)) < 5000
    assert seconds < 1.0


# In a browser -------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_the_run(server: Server, store: RunStore, path: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    wrong = Event(101, 0, 1.0, "first-wrong-value", {"sentence": f"Here: {HOSTILE}", "module": "blocks.1"})
    store.add([row(101, math.nan, 1e-3, math.inf, 1.0)], [alarm(101)], [wrong])
    store.end()
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--virtual-time-budget=4000", "--dump-dom", server.url]
    done = subprocess.run([CHROMIUM, *words], capture_output=True, text=True, timeout=120, check=False)
    shown = html.unescape(re.sub(r"<script>.*?</script>", "", done.stdout, flags=re.DOTALL))
    if done.returncode or not shown:
        pytest.skip("Chromium does not run here")
    assert "<title>step 101 · Ended · run.db" in shown
    assert f"Here: {HOSTILE}" in shown
    assert "At step 101." in shown
    assert "first at step 101" in shown
    assert "alert(1)" not in re.findall(r"<script>(.*?)</script>", done.stdout, re.DOTALL)[0]
    assert done.stdout.count("<script>") == 1
    assert '<p class="alert" id="trouble" role="alert" hidden' in done.stdout


# The command --------------------------------------------------------------------------------------------


def started(path: Path, *words: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "normscope", "watch", str(path), "--page", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def asked_at(url: str) -> dict[str, Any]:
    host, _, place = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=20)
    connection.request("GET", f"/{place}data")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def test_the_command_prints_the_address_and_ends_by_ctrl_c(store: RunStore, path: Path) -> None:
    process, url = started(path)
    assert asked_at(url)["last_step"] == 100
    store.add(rows(101, 101))
    assert asked_at(url)["last_step"] == 101
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err
    assert url.split("/")[3] not in err


def test_a_watcher_that_is_killed_leaves_the_run_alone(store: RunStore, path: Path) -> None:
    """Killed in the middle of answers, while the run writes: the run goes on, and its store opens."""
    process, url = started(path)
    stop = threading.Event()

    def hurry() -> None:
        while not stop.is_set():
            try:
                asked_at(url)
            except (OSError, http.client.HTTPException, ValueError):
                return

    threads = [threading.Thread(target=hurry) for _ in range(2)]
    for thread in threads:
        thread.start()
    last = 100
    rng = np.random.default_rng(os.getpid())
    for number in range(int(rng.integers(5, 60)) + 20):
        store.add(rows(last + 1, last + 10))
        last += 10
        if number == 19:
            process.kill()
    stop.set()
    process.wait(60)
    process.communicate()
    for thread in threads:
        thread.join(60)
    with RunReader(path) as reader:
        assert reader.last_step == last
        assert len(reader.series("loss")[0]) == last
    assert Figures(path).answer({})["last_step"] == last


def test_a_wrong_call_is_one_line(
    store: RunStore, path: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["none.db", "--page"], "not found"),
        (["run.db", "--page", "--quantity", "stream/rns"], "expected one of stream/rms"),
        (["run.db", "--page", "--port", str(server.server_port)], "(in use): expected a free port"),
        (["run.db", "--page", "--once"], "--once with --page"),
        (["run.db", "--page", "--format", "json"], "--format with --page"),
        (["run.db", "--port", "0"], "--port without --page"),
        (["run.db", "--open"], "--open without --page"),
    ):
        assert run(["watch", str(path.with_name(words[0])), *words[1:]]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert said in err
    with pytest.raises(UsageError, match=r"--port \d+ \(in use\)"):
        Server(document("x"), Figures(path), server.server_port)
