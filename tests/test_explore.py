"""The explorer without a browser: what it writes, and that it is always the same."""

import json
import re
import webbrowser
from importlib.resources import files
from pathlib import Path

import pytest

from levelhead import cli, lab
from levelhead.explore import explorer_page, write_explorer
from levelhead.lab.claims.pronoun import NOUNS
from levelhead.lab.claims.training import RULES

PUBLISHED = Path(__file__).parents[1] / "docs" / "explore.html"


@pytest.fixture(scope="module")
def page():
    return explorer_page()


def data(name):
    return json.loads((files("levelhead.explore") / "data" / f"{name}.json").read_text("utf-8"))


def test_the_published_page_is_what_the_command_writes(page):
    assert PUBLISHED.read_text("utf-8") == page, (
        "run: levelhead explore --out docs/explore.html --no-open"
    )


def test_it_is_the_same_every_time(page, tmp_path):
    write_explorer(tmp_path / "a.html")
    write_explorer(str(tmp_path / "b.html"))
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert (tmp_path / "a.html").read_text("utf-8") == page


def test_it_is_small_and_needs_no_network(page):
    assert len(page.encode()) < 600_000
    assert "Plotly.newPlot=" not in page and "plotly.js v" not in page
    addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"']*", page))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which is never fetched
    assert not re.search(r"<(?:link|img|iframe)\b|\b(?:src|@import|url)\s*[=(]", page)
    assert "default-src 'none'" in page


@pytest.mark.parametrize("name", ["dk", "rule", "keys", "score-variance", "top-weight"])
def test_what_tests_look_for_is_there(page, name):
    assert page.count(f'data-testid="{name}"') == 1


def test_every_script_finds_its_elements_once(page):
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    wanted = set(re.findall(r'\bby\("([^"]+)"\)', page)) | set(
        re.findall(r'\b(?:say|tell|chart|bars|LH\.choice|LH\.fill)\("([\w-]+)"', page)
    )
    assert len(wanted) > 40 and wanted - set(ids) == set()


def test_every_part_names_the_claim_that_measured_it(page):
    sections, every = re.findall(r"<section id=.*?</section>", page, re.DOTALL), lab.experiments()
    assert len(sections) == 7
    for section in sections:
        assert 'class="look"' in section
        measured = re.findall(
            r"Measured as claims? ([\d, and]+) of the lab: <code>levelhead lab ([\w ]+)", section
        )
        assert measured
        for numbers, names in measured:
            claims = [str(every[name].claim) for name in names.split()]
            assert re.findall(r"\d+", numbers) == claims


def test_every_control_has_a_label(page):
    for control in re.findall(r"<(?:input|select)\b[^>]*>", page.partition("<script")[0]):
        before = page[: page.index(control)]
        assert before.rfind("<label") > before.rfind("</label>"), control


def test_the_recorded_runs_are_complete():
    given = data("training")
    assert tuple(given["rules"]) == RULES
    settings = {(run["d_k"], run["rate"], run["rule"]) for run in given["runs"]}
    assert len(settings) == len(given["runs"])
    assert len(settings) == len(given["d_k"]) * len(given["rates"]) * len(RULES) >= 36
    looks = given["steps"] // given["every"]
    for run in given["runs"]:
        assert len(run["answers"]) == looks
        for statistic in ("score_std", "saturated", "survival"):
            assert [len(head) for head in run[statistic]] == [looks] * 4
        assert all(0 <= share <= 1 for head in run["saturated"] for share in head)
    folder = files("levelhead.explore") / "data"
    assert sum(len(file.read_bytes()) for file in folder.iterdir()) < 400_000


def test_the_recorded_scores_are_those_of_every_head():
    given = data("pronoun")
    assert given["nouns"] == NOUNS
    for sentence in given["sentences"]:
        tokens = sentence["tokens"]
        assert [tokens[place] for place in NOUNS.values()] == list(NOUNS)
        assert [len(layer) for layer in sentence["scores"]] == [12] * 6
        assert {len(row) for layer in sentence["scores"] for row in layer} == {len(tokens)}


# ---------------------------------------------------------------- the command


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """Runs the command in an empty folder: (exit code, stderr, addresses that were opened)."""
    monkeypatch.chdir(tmp_path)
    opened = []

    def command(*arguments, browser=True):
        monkeypatch.setattr(webbrowser, "open", lambda url: (opened.append(url), browser)[1])
        with pytest.raises(SystemExit) as left:
            cli.app(["explore", *map(str, arguments)])
        return left.value.code or 0, capsys.readouterr().err, opened

    return command


def test_the_command_writes_and_opens(run, tmp_path, page):
    assert run() == (
        0,
        "levelhead: wrote explore.html\n",
        [(tmp_path / "explore.html").resolve().as_uri()],
    )
    assert (tmp_path / "explore.html").read_text("utf-8") == page


def test_the_command_only_writes(run, tmp_path):
    code, err, opened = run("--out", "here.html", "--no-open")
    assert (code, err, opened) == (0, "levelhead: wrote here.html\n", [])
    assert [path.name for path in tmp_path.iterdir()] == ["here.html"]


def test_without_a_browser_it_says_what_to_do(run):
    code, err, _ = run(browser=False)
    assert code == 0
    assert err.endswith("found no browser to show it in; open explore.html in yours\n")


def test_a_place_that_cannot_be_written_is_told(run, tmp_path):
    code, err, opened = run("--out", tmp_path / "none" / "page.html")
    assert (code, opened) == (2, [])
    assert f"there is no folder {tmp_path / 'none'}; create it first" in err
    code, err, _ = run("--out", tmp_path)
    assert code == 2 and "it is a folder; name a file in it" in err
