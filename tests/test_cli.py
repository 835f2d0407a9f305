"""The command line: exit codes, what is said and where, what is left on disk."""

import io
import json
import re
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import levelhead as lh
from levelhead import cli
from levelhead._health.verdicts import failable
from levelhead._records import StepRecord
from levelhead.checkup import TargetError
from levelhead.lab import experiments
from levelhead.store import Store

MODELS = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self, grow=1.0):
        super().__init__()
        self.attn = nn.MultiheadAttention(32, 2, batch_first=True)
        self.grow = grow

    def forward(self, x):
        x = self.grow * x
        return self.attn(x, x, x)[0]

def well():
    torch.manual_seed(0)
    return Layer(), torch.randn(1, 16, 32)

def ill():
    torch.manual_seed(0)
    return Layer(100.0), torch.randn(1, 16, 32)

def plain():
    return nn.Linear(4, 4), torch.randn(2, 4)

def wrong_shape():
    return Layer(), torch.randn(1, 16, 31)

def raises():
    raise ValueError("no such checkpoint")
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "cli_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield tmp_path
    sys.modules.pop("cli_models", None)


@pytest.fixture
def run(capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def command(*arguments):
        with pytest.raises(SystemExit) as left:
            cli.app(list(map(str, arguments)))
        return (left.value.code or 0, *capsys.readouterr())

    return command


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_checkup_prints_and_writes(run, here):
    code, out, err = run("checkup", "cli_models:well", "--html", "p.html", "--json", "r.json")
    assert code == 0
    assert "Layer (cli_models:well) · 1 layer · 2 heads · 1 input" in out
    assert "at other scales" in out
    assert err.splitlines()[-2:] == ["levelhead: wrote p.html", "levelhead: wrote r.json"]
    data = json.loads((here / "r.json").read_text())
    (layer,) = data["layers"]
    assert layer["name"] == "attn"
    assert [head["head"] for head in layer["heads"]] == [0, 1]
    assert {"verdict", "reason", *lh.Health.FIELDS} <= set(layer["heads"][0])
    assert (here / "p.html").read_text(encoding="utf-8").endswith("</html>\n")
    assert left_in(here) == ["cli_models.py", "p.html", "r.json"]


def test_other_factors_are_compared(run, here):
    factors = ("--scale-factor", "2", "--scale-factor", "0.5")
    code, out, _ = run("checkup", "cli_models:well", "--json", "r.json", *factors)
    assert code == 0 and "2 times the scale" in out and "0.5 times the scale" in out
    scales = json.loads((here / "r.json").read_text())["scales"]
    assert {"as_trained", "x2", "x0.5"} <= {scale["rule"] for scale in scales}
    code, _, err = run("checkup", "cli_models:well", "--scale-factor", "-1")
    assert code == 2 and "--scale-factor" in err
    code, _, err = run("checkup", "cli_models:well", "--scale-factor", "inf")
    assert code == 2 and "a scale factor must be a number from 0 on, got inf" in err


@pytest.fixture
def read(monkeypatch):
    """What the demo model would read, without loading it."""
    texts = []
    monkeypatch.setattr("levelhead.checkup._target.demo_folder", Path)

    def stop(_, given):
        texts.extend(given)
        raise TargetError("stopped here")

    monkeypatch.setattr("levelhead.checkup._target.load_folder", stop)
    return texts


def test_a_text_is_a_sentence_a_file_or_what_comes_in(run, here, read, monkeypatch):
    (here / "a file").write_text("from a file\n\nof two lines\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    for given in ("it was fast", "a file", "-"):
        code, _, err = run("checkup", "--text", given)
        assert (code, "stopped here" in err) == (2, True)
    assert read == ["it was fast", "from a file", "of two lines", "from a pipe"]
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, err = run("checkup", "--text", "-")
    assert code == 2 and "the text on standard input is empty" in err
    code, _, err = run("checkup", "--text", "fast")
    assert "cannot read the text fast: No such file" in err and "has a space" in err


@pytest.mark.parametrize(("there", "said"), [(True, ""), (False, "found no browser to show it in")])
def test_a_page_is_opened_where_there_is_a_browser(run, here, monkeypatch, there, said):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)) or there)
    code, _, err = run("checkup", "cli_models:well", "--open")
    assert code == 0 and said in err
    assert opened == [(here / "checkup.html").as_uri()]
    run("checkup", "cli_models:well", "--html", "p.html")
    assert len(opened) == 1


def test_help_is_short_and_shells_complete(run, monkeypatch, capsys):
    assert "--fail-on VERDICT" in run("checkup", "-h")[1] == run("checkup", "--help")[1]
    assert "checkup" in run("-h")[1]
    assert "--install-completion" in run("-h")[1]
    monkeypatch.setenv("_LEVELHEAD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "levelhead checkup --fail-on sat")
    monkeypatch.setenv("COMP_CWORD", "3")
    with pytest.raises(SystemExit):
        cli.app([], prog_name="levelhead")
    assert capsys.readouterr().out.split() == ["saturated"]


def test_a_model_is_examined_against_another(run, here):
    arguments = ("checkup", "cli_models:ill", "--against", "cli_models:well")
    code, out, err = run(*arguments, "--json", "r.json", "--html", "p.html")
    assert code == 0
    assert "Against cli_models:well\n" in out and "Worse\n  2 heads: healthy → " in out
    data = json.loads((here / "r.json").read_text())
    assert data["model"] == "Layer (cli_models:ill)"
    against = data["against"]
    assert against["model"] == "Layer (cli_models:well)" and against["better"] == []
    assert against["worse"][0].startswith("2 heads: healthy → ")
    assert [head["verdict"] for head in against["layers"][0]["heads"]] == ["healthy"] * 2
    page = (here / "p.html").read_text(encoding="utf-8")
    assert "<title>Layer (cli_models:well) and Layer (cli_models:ill), compared" in page
    code, out, err = run("checkup", "cli_models:ill", "--against", "nowhere")
    assert (code, out) == (2, "") and "there is no folder nowhere" in err


def test_what_comes_in_is_read_by_both_models(run, here, read, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("word\n"))
    (here / "other").mkdir()
    both = []
    monkeypatch.setattr(cli, "load", lambda target, text: both.append((target, text)))
    monkeypatch.setattr(cli, "examine", lambda *_, **__: {"model": "", "inputs": [], "layers": []})
    run("checkup", "--text", "-", "--against", "other")
    assert both == [(None, "word\n\n"), ("other", "word\n\n")]


def test_fail_on_answers_no(run):
    assert run("checkup", "cli_models:well", "--fail-on", "collapsed")[0] == 0
    code, out, err = run("checkup", "cli_models:ill", "--fail-on", "collapsed")
    assert code == 1
    assert "need attention" in out
    assert "levelhead: --fail-on collapsed: 2 heads (" in err
    code, out, err = run("checkup", "cli_models:ill", "--fail-on", "saturatd")
    assert (code, out) == (2, "")
    assert "--fail-on saturatd is unknown; did you mean saturated? there are: nonfinite, " in err


def test_a_head_that_is_sharp_for_a_good_reason_fails_nothing(run):
    # One of the demo's heads is saturated: it looks at the word before.
    assert run("checkup", "--fail-on", "saturated")[0] == 0
    code, _, err = run("checkup", "--fail-on", "sink")  # whoever asks for information gets it
    assert code == 1 and "sink" in err and "1 saturated" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no folder nowhere; a target is a model folder, or module:function"),
        (["cli_models:nothing"], "cli_models has no function nothing"),
        (["cli_models:raises"], "cli_models:raises raised ValueError: no such checkpoint"),
        (["cli_models:wrong_shape"], "when it was called; --debug shows where"),
        (["cli_models:plain"], "Linear (cli_models:plain) made no attention call"),
        (["."], "has no config.json, so it is no Hugging Face model folder"),
        (["--text", "nowhere"], "cannot read the text nowhere: No such file"),
        (["cli_models:well", "--html", "no/p.html"], "there is no folder no; create it first"),
        (["cli_models:well", "--json", "."], "it is a folder; name a file in it"),
        (["cli_models:well", "--json", "x", "--html", "x"], "x is named twice"),
    ],
)
def test_bad_calls_are_one_sentence(run, here, arguments, said):
    code, out, err = run("checkup", "--json", "left.json", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.startswith("levelhead: ")
    assert len(err.splitlines()) == 1
    assert left_in(here) == ["cli_models.py"]


def test_outputs_are_checked_before_any_work(run, monkeypatch):
    monkeypatch.setattr(cli, "load", lambda *_: pytest.fail("worked"))
    assert run("checkup", "cli_models:well", "--html", "no/p.html")[0] == 2


def test_what_is_read_is_not_overwritten(run, here):
    (here / "text").write_text("hello there")
    code, _, err = run("checkup", "--text", "text", "--html", "text")
    assert code == 2
    assert "text is what is read; name another file" in err
    assert (here / "text").read_text() == "hello there"


def test_debug_shows_the_traceback(run):
    for debug, shown in (([], False), (["--debug"], True)):
        code, _, err = run("checkup", "cli_models:raises", *debug)
        assert code == 2
        assert ("Traceback" in err) is shown
        assert ('raise ValueError("no such checkpoint")' in err) is shown


def test_surprises_are_a_sentence_too(run, monkeypatch):
    def broken(*_):
        raise RuntimeError("oh")

    monkeypatch.setattr(cli, "load", broken)
    code, _, err = run("checkup")
    assert code == 2
    assert err == "levelhead: this should not happen (RuntimeError: oh); --debug shows where\n"


def test_an_interrupt_leaves_nothing(run, here, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "examine", interrupted)
    code, _, err = run("checkup", "cli_models:well", "--json", "r.json")
    assert (code, err) == (130, "levelhead: interrupted\n")
    assert left_in(here) == ["cli_models.py"]


# ---------------------------------------------------------------- report


@pytest.fixture
def store(here):
    q, k, v = np.random.default_rng(0).standard_normal((3, 2, 16, 8))
    health = lh.attention(q, k, v, return_health=True).health
    for name in ("first", "second"):
        store = Store(here / "run.db", name=name)
        store(StepRecord(7, time.time(), {"attn": health}))
    yield store
    store.close()


def test_a_report_is_a_page_beside_the_run(run, here, store):
    code, out, err = run("report", "run.db")  # the second run still goes on
    assert (code, out, err) == (0, "", "levelhead: wrote run.html\n")
    assert "second · 1 step recorded" in (here / "run.html").read_text(encoding="utf-8").replace(
        "\\u00b7", "·"
    )


@pytest.mark.parametrize("chosen", ["1", "first"])
def test_a_run_is_chosen_by_number_or_name(run, here, store, chosen):
    assert run("report", "run.db", "--run", chosen, "--html", "p.html")[0] == 0
    assert "Run first</title>" in (here / "p.html").read_text(encoding="utf-8")


def test_a_page_is_opened_if_that_is_wanted(run, here, store, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert run("report", "run.db")[0] == 0 and opened == []
    assert run("report", "run.db", "--open")[0] == 0
    assert opened == [(here / "run.html").as_uri()]


def test_two_runs_are_compared(run, here, store):
    code, out, err = run("report", "run.db", "--compare", "first", "2")
    assert (code, err) == (0, "levelhead: wrote run-compare.html\n")
    assert out.startswith("Much the same: none of 2 heads need attention in second")
    page = (here / "run-compare.html").read_text(encoding="utf-8")
    assert "first and second, compared</title>" in page
    code, out, err = run("report", "run.db", "--compare", "first", "third", "--html", "p.html")
    assert (code, out) == (2, "") and "holds no run 'third'; its runs are: 1 (first)" in err
    assert not (here / "p.html").exists()


def test_the_runs_of_a_store_are_listed(run, here, store):
    code, out, err = run("report", "run.db", "--list")
    assert (code, err) == (0, "")
    assert [line.split()[:2] for line in out.splitlines()] == [
        ["run", "name"],
        ["1", "first"],
        ["2", "second"],
    ]
    assert not (here / "run.html").exists()


def test_bad_stores_are_one_sentence(run, here, store):
    (here / "text.db").write_text("no database at all, but long enough to look at" * 9)
    newer = sqlite3.connect(here / "newer.db")
    store.close()
    old = sqlite3.connect(here / "run.db")
    old.backup(newer)
    newer.execute("PRAGMA user_version = 99")
    newer.commit()
    newer.close()
    old.close()
    before = set(left_in(here))
    for arguments, said in (
        (["nowhere.db"], "there is no store at nowhere.db"),
        (["text.db"], "not a database"),
        (["newer.db"], "was written by a newer levelhead (schema 99"),
        (["newer.db", "--list"], "upgrade levelhead, or choose another file"),
        (["nowhere.db", "--list"], "there is no store at nowhere.db"),
        (["run.db", "--run", "9"], "holds no run 9; its runs are: 1 (first), 2 (second)"),
        (["run.db", "--html", "run.db"], "run.db is what is read"),
        (["nowhere.db", "--html", "no/p.html"], "there is no folder no"),
        (["."], "is a folder"),
    ):
        code, out, err = run("report", *arguments)
        assert (code, out) == (2, "")
        assert said in err
        assert len(err.splitlines()) == 1
    assert {name for name in left_in(here) if not name.endswith(("-wal", "-shm"))} <= before


# ---------------------------------------------------------------- the lab


def test_in_a_file_the_lab_writes_a_line_per_claim_with_its_time(run, here, monkeypatch):
    monkeypatch.setattr("levelhead._progress.PATIENCE", 600.0)  # on a busy machine, too
    code, out, err = run("lab", "--quick", "five-steps", "11")
    assert (code, err) == (0, "levelhead: wrote lab/index.html\n")
    first, second = out.splitlines()
    assert re.fullmatch(r" 1  five_steps       holds, \d+\.\d s", first)
    assert re.fullmatch(r"11  cosine           partly true, \d+\.\d s", second)
    results = json.loads((here / "lab" / "results.json").read_text(encoding="utf-8"))
    assert [one["verdict"] for one in results] == ["holds", "holds partly"]
    # What is there already takes no time, whether it was asked for or not.
    assert (
        run("lab", "--quick", "11")[1]
        == "11  cosine           partly true\n 1  five_steps       holds\n"
    )


def test_on_a_terminal_the_lab_prints_a_verdict_per_claim_and_nothing_else(run, here, monkeypatch):
    monkeypatch.setattr("levelhead._progress.PATIENCE", 600.0)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    code, out, err = run("lab", "--quick", "five-steps", "11")
    assert (code, err) == (0, "levelhead: wrote lab/index.html\n")
    assert out == " 1  five_steps       holds\n11  cosine           partly true\n"


def test_a_log_of_the_lab_can_be_followed_while_it_runs(here):
    """Each line is in the file when the experiment is over, not when the command is."""
    code = """
import sys, time
from levelhead import cli, lab
def slow(*_):
    print("SLOW", file=sys.stderr, flush=True)
    time.sleep(60)
object.__setattr__(lab.experiments()["cosine"], "measure", slow)
cli.app(["lab", "--quick", "five_steps", "cosine"])
"""
    log = here / "log.txt"
    with log.open("w") as file:
        going = subprocess.Popen(
            [sys.executable, "-c", code], stdout=file, stderr=subprocess.PIPE, text=True, cwd=here
        )
        try:
            while "SLOW" not in going.stderr.readline():
                assert going.poll() is None
            assert log.read_text().startswith(" 1  five_steps       holds, ")
        finally:
            going.kill()
            going.communicate()


def test_a_lab_that_cannot_write_says_so(run, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    code, out, err = run("lab", "--quick", "five_steps")
    assert (code, out) == (2, "")
    assert err == (
        "levelhead: cannot write lab/runs/quick/five_steps-0.json: No space left on device\n"
    )


# ---------------------------------------------------------------- the others


def test_the_benchmark_is_of_the_checkout(run, here):
    code, _, err = run("bench", "--quick")
    assert code == 2
    assert "get a checkout of levelhead" in err
    (here / "benchmarks").mkdir()
    (here / "benchmarks" / "__main__.py").write_text(
        "import sys; sys.exit(1 if sys.argv[1:] == ['--quick', '--case', 'x'] else 0)"
    )
    assert run("bench", "--quick", "--case", "x")[0] == 1
    assert run("bench")[0] == 0


def test_help_and_version(run):
    code, out, _ = run("--version")
    assert (code, out) == (0, f"levelhead {lh.__version__}\n")
    code, out, _ = run("--help")
    assert code == 0
    assert {"checkup", "report", "bench"} <= set(out.split())
    assert "checkup" in "".join(run()[1:])
    assert run("chekup")[0] == 2


def test_every_command_has_a_short_help(run):
    code, out, _ = run("-h")
    assert code == 0 and out == run("--help")[1]
    commands = re.findall(r"^  ([a-z]+)  ", out.partition("Commands:")[2], re.MULTILINE)
    assert {"checkup", "report", "lab", "explore", "bench"} <= set(commands)
    for command in commands:
        code, out, _ = run(command, "-h")
        assert code == 0 and "-h, --help" in out
        assert re.match(rf"Usage: .+ {command} ", out) and out == run(command, "--help")[1]


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("levelhead che", ["checkup"]),
        ("levelhead checkup --fail-on s", ["saturated", "sink", "sharp"]),
        ("levelhead checkup --fail-on ", list(failable())),
        ("levelhead lab five_steps grad", ["gradients"]),
        ("levelhead lab ", list(experiments())),
        ("levelhead report ", []),  # files: the shell knows them
    ],
)
def test_shells_complete_names(capsys, monkeypatch, typed, completed):
    monkeypatch.setenv("_LEVELHEAD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split(" ")) - 1))
    with pytest.raises(SystemExit):
        cli.app([], prog_name="levelhead")
    assert capsys.readouterr().out.split() == completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_can_be_shown_for_any_shell(capsys, monkeypatch, shell):
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    with pytest.raises(SystemExit) as left:
        cli.app(["--show-completion", shell], prog_name="levelhead")
    assert not left.value.code
    assert "_LEVELHEAD_COMPLETE" in capsys.readouterr().out


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "levelhead", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"levelhead {lh.__version__}\n"


def test_the_command_line_starts_without_frameworks():
    code = (
        "import sys, levelhead.cli; "
        "print([name for name in ('torch', 'transformers', 'plotly') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
