"""Progress: a bar on a terminal, one line per long part in a log."""

import io
import re
import time

import pytest
import rich.console

from levelhead import _progress, lab
from levelhead._progress import progress


@pytest.fixture
def terminal(monkeypatch):
    """stderr is a terminal of 80 columns; gives what is on it now, without escape codes."""
    file = io.StringIO()
    shown = rich.console.Console(force_terminal=True, width=80, file=file, _environ={})
    monkeypatch.setattr(rich.console, "Console", lambda **_: shown)

    def line():
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", file.getvalue()).split("\r")[-1].rstrip()

    return line


def test_a_log_names_a_long_part_once_and_a_short_one_never(monkeypatch, capsys):
    monkeypatch.setattr(_progress, "PATIENCE", 0.05)
    with progress() as tell:
        tell("never seen")
        for done in range(3):
            tell("slow work", f"step {done}", done=done, total=3, left=9.0)
            time.sleep(0.1)
        tell("[b]other work[/b]")
        time.sleep(0.1)
    assert capsys.readouterr().err == "slow work …\n[b]other work[/b] …\n"
    with progress() as tell:
        tell("quick work")
    time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_part_and_detail_how_far_and_the_time_left(terminal):
    with progress() as tell:
        tell("[b]loading[/b]")
        assert terminal().startswith("[b]loading[/b] ")
        tell("reading", "seed 3", done=2.5, total=7, left=125.4)
        line = terminal()
        assert line.startswith("reading, seed 3 ") and line.endswith(" 2 of 7, about 2:05 left")
        tell("writing")  # a part without a total, after one that had it
        line = terminal()
        assert line.startswith("writing ") and " of " not in line and "left" not in line


def test_the_lab_shows_its_experiment_seed_and_time_left(terminal):
    with lab.progress_bar() as show:
        show(lab.Progress("variance", 3, done=4.5, total=20, elapsed=10.0, left=61.4))
        line = terminal()
        assert line.startswith("variance, seed 3 ") and line.endswith("4 of 20, about 1:01 left")
        show(lab.Progress("", -1, done=20, total=20, elapsed=70.0, left=0.0))
        assert terminal().startswith("Writing ")
