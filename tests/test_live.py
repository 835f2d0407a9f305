"""levelhead live: who may ask what, and how a run is followed while it is written."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from browser_support import until
from page_support import unpacked

import levelhead as lh
from levelhead._records import StepRecord
from levelhead.live import Follower, LiveError, Server, live
from levelhead.report import _points
from levelhead.store import Store, StoreError


def record(step, layers=2, grow=1.0, **more):
    q, k, v = np.random.default_rng(step).standard_normal((3, 3, 12, 8))
    q[1] *= grow
    health = lh.reference(q, k, v, return_health=True).health
    return StepRecord(step, time.time(), {f"h.{at}.attn": health for at in range(layers)}, **more)


# ---------------------------------------------------------------- following


def test_every_step_is_sent_once(tmp_path):
    follower, path = Follower(tmp_path / "run.db"), tmp_path / "run.db"
    with Store(path, name="first") as store:
        store(record(0))
        store(record(1, grow=1e4, scalars={"loss": 2.0}))
        first = follower.look()
        data = first["data"]
        assert (data["steps"], data["start"], data["title"]) == ([0, 1], 0, "first")
        known = {"generation": first["generation"], "have": "2", "stamp": first["stamp"]}
        assert follower.look(**known)["data"] is None  # nothing has changed
        store(record(2))
        more = follower.look(**known)["data"]
        assert (more["steps"], more["start"]) == ([0, 1, 2], 2)
        assert more["headlines"][1].startswith("At step 1: 2 of 6 heads need attention")
        assert unpacked(more)[0]["series"]["entropy"].shape == (3, 1)
        whole = follower.look()["data"]  # another page, which has nothing yet
        assert unpacked(whole)[0]["series"]["entropy"].shape == (3, 3)
        store.log(2, {"loss": 1.0})
        late = follower.look(generation=first["generation"], have="3", stamp=first["stamp"])["data"]
        assert late["scalars"][0]["values"] == [2.0, 1.0] and late["start"] == 3
    assert follower.look()["data"]["following"] == "ended"


def test_it_turns_to_a_new_run(tmp_path):
    path = tmp_path / "run.db"
    follower = Follower(path)
    with Store(path, name="first") as store:
        store(record(0))
    first = follower.look()
    with Store(path, name="second") as store:
        known = {"generation": first["generation"], "have": "1", "stamp": first["stamp"]}
        begun = follower.look(**known)
        assert begun["data"]["title"] == "second" and begun["data"]["steps"] == []
        assert begun["note"] == "The run has begun; no step is recorded yet."
        store(record(5))
        data = follower.look(**known)["data"]
        assert (data["steps"], data["start"]) == ([5], 0)
        assert data["run"] != first["data"]["run"]


def test_it_waits_for_a_file_and_survives_its_loss(tmp_path):
    path = tmp_path / "run.db"
    follower = Follower(path)
    assert follower.look()["note"] == "Waiting for run.db: it is not there yet."
    path.touch()
    assert follower.look()["note"] == "Waiting for the first run in run.db."
    with Store(path) as store:
        store(record(0))
    seen = follower.look()
    assert seen["data"]["steps"] == [0] and seen["note"] == ""
    path.unlink()
    gone = follower.look(stamp=seen["stamp"])
    assert gone["data"] is None and gone["note"].startswith("run.db is gone")
    path.write_bytes(b"SQLite format 3\x00 but no more of it")
    assert follower.look()["note"].startswith("run.db cannot be read at the moment")
    path.unlink()
    with Store(path) as store:
        store(record(7))
    assert follower.look()["data"]["steps"] == [7]


def test_steps_that_a_resumed_training_takes_again_are_replaced(tmp_path):
    path = tmp_path / "run.db"
    follower = Follower(path)
    with Store(path) as store:
        for step in range(3):
            store(record(step))
        before = follower.look()
        store._connection.execute("DELETE FROM head_stats WHERE step_id = 3")
        store._connection.execute("DELETE FROM steps WHERE id = 3")
        store(record(2))
        known = {"generation": before["generation"], "have": "3", "stamp": before["stamp"]}
        after = follower.look(**known)
        assert after["data"]["start"] == 0 and after["data"]["steps"] == [0, 1, 2]


def test_a_layer_that_comes_later_makes_pages_begin_anew(tmp_path):
    path = tmp_path / "run.db"
    follower = Follower(path)
    with Store(path) as store:
        store(record(0, layers=1))
        first = follower.look()
        store(record(1, layers=2))
        data = follower.look(first["generation"], "1", first["stamp"])["data"]
        assert data["start"] == 0 and len(data["layers"]) == 2
        assert np.isnan(unpacked(data)[1]["series"]["entropy"][0, 0])


def test_a_long_run_is_thinned_as_it_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(_points, "MOST_POINTS", 8)
    path = tmp_path / "run.db"
    follower = Follower(path)
    with Store(path) as store:
        for step in range(30):
            store(record(step, layers=1))
            data = follower.look()["data"]
            assert len(data["steps"]) <= 12 and data["steps"][-1] == step
    assert data["steps"][0] == 0 and "of 30 steps are shown" in data["thinned"]


def test_a_writer_that_was_killed_is_told_of(tmp_path):
    path = tmp_path / "run.db"
    with Store(path) as store:
        quiet = record(0)
        store(StepRecord(0, time.time() - 600, quiet.health))
        assert Follower(path).look()["note"] == (
            "No new step for 10 minutes: the run may have been cut off."
        )


# ---------------------------------------------------------------- the server


@contextmanager
def serving(path):
    with Server(Follower(path)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def server(tmp_path):
    with Store(tmp_path / "run.db") as store:
        store(record(0))
    with serving(tmp_path / "run.db") as server:
        yield server


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_the_page_and_its_data(server):
    assert server.server_address[0] == "127.0.0.1"
    status, page, headers = ask(server, f"/{server.token}/")
    assert status == 200 and 'data-testid="headline"' in page
    assert headers["Cache-Control"] == "no-store"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "Access-Control-Allow-Origin" not in headers
    status, text, _ = ask(server, f"/{server.token}/data?have=x&generation=%00&stamp=&other=1")
    assert status == 200 and json.loads(text)["data"]["steps"] == [0]


@pytest.mark.parametrize(
    "path", ["/", "/data", "//", "/wrong/", "/wrong/data", "/%2e%2e/", "/?token=x", "*"]
)
def test_without_the_token_nothing_is_said(server, path):
    status, text, _ = ask(server, path)
    assert status == 403 and "run.db" not in text


@pytest.mark.parametrize(
    "path",
    ["run.db", "../run.db", "..%2frun.db", "%2e%2e/%2e%2e/etc/passwd", "/etc/passwd", "data/"],
)
def test_no_path_reaches_a_file(server, path):
    status, text, _ = ask(server, f"/{server.token}/{path}")
    assert (status, text) == (404, "there is nothing here")


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE", "XYZ"]
)
def test_only_get_is_answered(server, method):
    status, _, headers = ask(server, f"/{server.token}/", method)
    assert status == 405 and headers["Allow"] == "GET"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "0.0.0.0:1", ""])
def test_another_hosts_name_is_refused(server, host):
    assert ask(server, f"/{server.token}/", Host=host)[0] == 403
    assert ask(server, f"/{server.token}/", Host=f"localhost:{server.server_port}")[0] == 200


def test_tokens_are_long_and_new_every_time(tmp_path):
    with Server(Follower(tmp_path / "a.db")) as one, Server(Follower(tmp_path / "a.db")) as other:
        assert one.token != other.token and len(one.token) >= 32


# ---------------------------------------------------------------- the command


def test_what_can_never_be_a_store_is_refused(tmp_path):
    (tmp_path / "text.db").write_text("no database at all, but long enough to look at" * 9)
    for path, kind, said in (
        (tmp_path / "no" / "run.db", LiveError, "there is no folder"),
        (tmp_path / "text.db", StoreError, "not a database"),
        (tmp_path, StoreError, "is a folder"),
    ):
        with pytest.raises(kind, match=said):
            live(path, open_it=False)


def test_a_port_that_is_taken_is_one_sentence(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "levelhead", "live", str(tmp_path / "run.db")]
        command += ["--no-open", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"levelhead: port {port} cannot be used (")
    assert len(done.stderr.splitlines()) == 1


def test_the_address_comes_first_and_ctrl_c_is_quiet(tmp_path):
    program = """if True:
        import runpy, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
        runpy.run_module("levelhead", run_name="__main__")
    """
    command = [sys.executable, "-c", program, "live", str(tmp_path / "run.db"), "--no-open"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        address = process.stdout.readline()  # comes at once, although a pipe is buffered
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32,}/\n", address)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (0, "", "")


# ---------------------------------------------------------------- in a browser


def test_a_page_follows_a_run_without_reloading(browser, tmp_path):
    path, wrong = tmp_path / "run.db", []
    with serving(path) as server:
        tab = browser.new_page()
        tab.on("console", lambda note: wrong.append(note.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto(server.url)

        def says(name):
            return tab.get_by_test_id(name).inner_text()

        until(tab, lambda: "Waiting for run.db" in tab.locator("#note").inner_text())
        assert says("headline") == "No run is recorded yet."
        tab.evaluate("window.kept = 1")
        with Store(path, name="first") as store:
            for step in range(3):
                store(record(step))
            until(tab, lambda: says("step") == "2")
            tab.locator('[data-testid=cell][data-layer="1"][data-head="2"]').click()
            tab.locator("#slider").fill("1")
            store(record(3, grow=1e4))
            until(tab, lambda: says("step") == "3")
            assert says("headline").startswith("At step 1: ")  # what was chosen stays
            assert "h.1, head 2" in says("detail")
            tab.locator("#newest").click()
            store(record(4, grow=1e5))
            until(tab, lambda: says("headline").startswith("At step 4: 2 of 6 heads need"))
        with Store(path, name="second") as store:
            store(record(100))
            until(tab, lambda: says("step") == "100")
            assert tab.title() == "Live: second"
            assert says("headline").startswith("At step 100: ")
        path.unlink()
        until(tab, lambda: "is gone" in tab.locator("#note").inner_text())
        assert says("step") == "100"  # what was seen stays
        with Store(path, name="third") as store:
            store(record(9))
            until(tab, lambda: says("step") == "9")
        assert tab.evaluate("window.kept") == 1
        assert wrong == []
        tab.close()
