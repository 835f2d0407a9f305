"""The README's snippets run as they are pasted; links and commands on all pages lead somewhere."""

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from levelhead import cli
from levelhead._health.verdicts import Thresholds

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks/README.md",
]
BUILDS = ("make", "pip")  # these take minutes and change the machine; see the tests below


def fenced(language):
    """Every block of the README in that language, with the block of output that follows it."""
    block = rf"^```{language}\n(.*?)^```$(?:\n\n^```\n(.*?)^```$)?"
    return [match.groups() for match in re.finditer(block, README, re.MULTILINE | re.DOTALL)]


def commands():
    """Every line of the README's shell snippets, as the words that a shell makes of it."""
    return [
        shlex.split(line, comments=True)
        for script, _ in fenced("sh")
        for line in script.splitlines()
    ]


def run(*command, cwd):
    """What a command prints, in the environment of the tests; no browser is opened.

    One thread: on a busy machine two of PyTorch's mostly wait for each other (see conftest.py).
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "BROWSER": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("snippet", "output"), fenced("python"))
def test_a_python_snippet_runs_by_itself(snippet, output, tmp_path):
    printed = run(sys.executable, "-W", "error", "-c", snippet, cwd=tmp_path)
    assert printed if output is None else printed == output


@pytest.mark.parametrize("command", [c for c in commands() if c[0] not in BUILDS], ids=" ".join)
def test_a_shell_snippet_runs(command, tmp_path):
    run(*command, cwd=tmp_path)


def test_every_snippet_is_run_or_known_to_build():
    assert len(fenced("python")) == len(re.findall("^```python", README, re.MULTILINE)) >= 2
    assert {command[0] for command in commands()} == {"levelhead", *BUILDS}
    fences = re.findall(r"^```(\S*)$", README, re.MULTILINE)
    assert set(fences) == {"python", "sh", ""}
    assert not re.findall(r"^\n {4}\S", README, re.MULTILINE)  # code without a language


def recipe(target):
    """What make would do, without doing it."""
    dry = ["make", "--dry-run", "--always-make", target]
    return subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_make_has_what_is_said_of_it():
    targets = {command[1] for command in commands() if command[0] == "make"}
    targets |= set(re.findall(r"`make (\w+)`", README))
    assert targets >= {"checkup", "test", "wheel", "bench"}
    described = re.findall(r"^(\w+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets <= set(described)
    assert "checkup --html checkup.html" in recipe("checkup")
    assert "repair --wheel-dir dist " in recipe("wheel")
    assert ".ci/check_wheel.py dist/" in recipe("wheel")


def test_pip_installs_what_make_wheel_built_with_extras_that_exist():
    (install,) = [command for command in commands() if command[0] == "pip"]
    assert install[:2] == ["pip", "install"]
    file, extra = re.fullmatch(r"\$\(ls (dist/levelhead-\*\.whl)\)\[(\w+)\]", install[2]).groups()
    package = importlib.metadata.metadata("levelhead")
    assert file.startswith(f"dist/{package['Name']}-")
    told = re.findall(r"^\| `\[(\w+)\]` \|", README, re.MULTILINE)
    assert extra in told
    assert set(told) <= set(package.get_all("Provides-Extra"))
    assert f"Python {package['Requires-Python'].removeprefix('>=')} or newer" in README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page):
    known = typer.main.get_command(cli.app).commands
    text = page.read_text(encoding="utf-8")
    for name, rest in re.findall(r"(?:`|^ {4})levelhead ([a-z]+)([^`\n#]*)", text, re.MULTILINE):
        assert name in known
        options = {o for one in known[name].params for o in (*one.opts, *one.secondary_opts)}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", rest)) <= options, name


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    targets += re.findall(r"""(?:href|src|srcset)="([^"]+)\"""", text)
    for target in targets:
        path, _, anchor = target.partition("#")
        if re.match(r"\w+:", path):
            continue  # not ours to look up in a test
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), target


def test_the_measured_rows_are_those_of_the_benchmark():
    page = (ROOT / "docs/benchmark.md").read_text(encoding="utf-8")
    section = README.partition("## Measured")[2]

    def rows(text):
        found = re.findall(r"^\| ([a-z]+-.+) \|$", text, re.MULTILINE)
        return [re.split(r"\s*\|\s*", row)[:7] for row in found]

    forward = page.partition("## Forward, float32")[2].partition("\n## ")[0]
    assert rows(section) and [row for row in rows(section) if row not in rows(forward)] == []
    mean = re.search(r"best peer, geometric mean +\| +([\d.]+)× .*?(\d+ cases)", page)
    assert f"geometric mean of {mean[2]} {mean[1]} times" in section
    assert "AMD EPYC with AVX-512 and BF16 (Zen 4), 2 cores" in page
    assert "2 cores of an AMD EPYC with AVX-512 (Zen 4)" in section


def test_the_words_are_explained_with_the_thresholds_in_use():
    words = dict(re.findall(r"^- \*\*(\w+)\*\*: (.+)$", README, re.MULTILINE))
    assert {"saturated", "signal", "survival", "sink"} <= set(words)
    assert f"more than {Thresholds().sink} of its weight on the first key" in words["sink"]
    assert Thresholds().saturated == 0.5 and "more than half of its rows" in words["saturated"]
    first = README.index("## Four words")
    assert not re.search(r"\b(signal|sink|survival|saturated)\b", README[:first])
