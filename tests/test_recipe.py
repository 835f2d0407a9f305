"""The recipe: what is added to the tables of statistics and verdicts arrives everywhere.

`made_up_share` is a made-up statistic, the weight on the last key. `fixated` is a made-up verdict
that rests on it. Beside the two tables they need one line of mathematics in the specification and
one in plain torch; the engine, which would have to be compiled, is left out. CONTRIBUTING.md says
the same in words.
"""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from checkup_support import make_call, make_result
from page_support import unpacked
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import levelhead as lh
import levelhead.torch
from levelhead._health.statistics import ForwardStatistics, Mean
from levelhead._health.verdicts import VERDICTS, Case, Colour, Limit, Rule
from levelhead._reference import health as reference_health
from levelhead.report import checkup_json, checkup_page, checkup_text, failing, run_page
from levelhead.report._checkup_page import page_data
from levelhead.report._run_page import run_data
from levelhead.store import JsonLines, TensorBoard, read_run
from levelhead.torch import _row_statistics, _tiled_health
from levelhead.torch._attention import normalise

L, D = 12, 16
COLUMNS = len(lh.Health.COLUMNS)  # before anything is added
LAYER = "attention"


@pytest.fixture(autouse=True)
def recipe(monkeypatch):
    # src/levelhead/_health/statistics.py
    statistic = Mean(
        label="made-up share",
        meaning="The weight on the last key.",
        definition="weight on the last key",
        bad="high",
        heading="share",
        tracked=True,
        compared="mean",
        over="choice_rows",
    )
    monkeypatch.setattr(ForwardStatistics, "made_up_share", statistic, raising=False)
    statistic.__set_name__(ForwardStatistics, "made_up_share")  # as in the body of a class
    # src/levelhead/_health/verdicts.py
    rule = Rule(
        cases=(
            Case("error", (Limit("made_up_share", ">", 0.8),)),
            Case("info", (Limit("made_up_share", ">", 0.5),)),
        ),
        letter="F",
        colour=Colour(light=("#123456", "#ffffff"), dark=("#654321", "#000000")),
        meaning="looks at the last key and nothing else",
        reason="{made_up_share:.0%} of the weight goes to the last key ({level} from {limit})",
        hint="show it the others",
    )
    monkeypatch.setitem(VERDICTS, "fixated", rule)
    # src/levelhead/_reference/health.py and src/levelhead/torch/_row_statistics.py
    last = lambda row: row.p[..., -2]  # noqa: E731 (the very last outcome is a learned sink)
    monkeypatch.setitem(reference_health.DEFINITIONS, "made_up_share", last)
    monkeypatch.setitem(
        _row_statistics.FORMULAS, "made_up_share", lambda row: row.exps[..., -1] / row.total
    )


class Attention(nn.Module):
    """Two heads of attention by hand; the second one's queries look at the last key."""

    def __init__(self):
        super().__init__()
        self.pull = nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        scores = x @ x.mT / D**0.5
        last = torch.zeros(2, 1, L)
        last[1, 0, -1] = 1.0
        return (scores + self.pull * last * (x @ x.mT)[..., -1:, -1:]).softmax(-1) @ x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return self.attention(x)


def watched(**options):
    """A run of three steps, in the last of which the second head is fixated."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(1, 2, L, D)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with levelhead.torch.watch(model, **options) as seen:
        for pull in (0.0, 0.0, 1.0):
            with torch.no_grad():
                model.attention.pull.fill_(pull)
            model(x).sum().backward()
            optimizer.step()
    return seen, model, x


def fixed_call():
    """A call whose second head looks at the last key, with health from the specification."""
    call = make_call(LAYER, heads=2, length=L)
    call.query[:, 1] = 20 * call.key[:, 1, -1:]
    return call


# ---------------------------------------------------------------- computed


def test_it_is_a_field_and_a_column():
    assert lh.Health.FIELDS[-1] == lh.Health.COLUMNS[-1] == "made_up_share"
    health = fixed_call().health
    assert health.shape == (1, 2) and health.sums.shape[-1] == COLUMNS + 1
    weights = fixed_call()._run(1.0).weights
    np.testing.assert_allclose(health.made_up_share, weights[..., -1].mean(-1))
    np.testing.assert_allclose(health.merge(health).made_up_share, health.made_up_share)
    assert health.to_dict()["made_up_share"] == health.made_up_share.tolist()


def test_tiled_health_has_it():
    call = fixed_call()
    q, k = (torch.from_numpy(x) for x in (call.query, call.key))
    sums = _tiled_health.tiled_health(normalise(q, k, k))
    np.testing.assert_allclose(lh.Health(sums.numpy()).made_up_share, call.health.made_up_share)


def test_it_is_watched():
    seen, model, x = watched()
    assert seen.health[LAYER].shape == (2,)
    q = x[0].double()
    plain = (q @ q.mT / D**0.5).softmax(-1)[..., -1].mean(-1).numpy()
    with torch.no_grad(), levelhead.torch.watch(model) as again:
        model.attention.pull.fill_(0.0)
        model(x)
    np.testing.assert_allclose(again.health[LAYER].made_up_share, plain, rtol=1e-5)
    # 0 and 0 and nearly 1, as a mean over all steps.
    assert seen.health[LAYER].made_up_share[1] == pytest.approx((2 * plain[1] + 1) / 3, abs=0.05)


# ---------------------------------------------------------------- judged and said


def test_alerts_and_summary():
    alerts = []
    seen, _, _ = watched(on_alert=alerts.append)
    (alert,) = alerts
    assert (alert.step, alert.layer, alert.head) == (2, LAYER, 1)
    assert (alert.verdict, alert.level, alert.hint) == ("fixated", "error", "show it the others")
    assert 0.8 < alert.value <= 1
    assert alert.reason == f"{alert.value:.0%} of the weight goes to the last key (error from 0.8)"
    summary = seen.summary().splitlines()
    assert any("head 1: fixated, gradient survival" in line for line in summary)
    assert "At step 2: 1 of 2 heads needs attention: 1 fixated." in summary
    assert "  What to do: show it the others" in summary


def test_a_printed_health_has_its_column():
    health = fixed_call().health
    heading, worst = str(health).splitlines()[1:3]
    assert heading.endswith(" share")
    assert "fixated (error)" in worst and worst.endswith(f"{health.made_up_share[0, 1]:.3g}")
    verdict = health.verdicts()[0]
    assert (verdict.head, verdict.verdict, verdict.level) == (1, "fixated", "error")


# ---------------------------------------------------------------- stored


def test_a_store_has_its_column_and_its_view(tmp_path):
    path = tmp_path / "run.db"
    seen, _, _ = watched(store=path)
    run = read_run(path)
    steps, values = run.series(LAYER, "made_up_share")
    assert steps.tolist() == [0, 1, 2] and values[2, 1] > 0.8 > values[1, 1]
    assert run.total() == seen.health
    with closing(sqlite3.connect(path)) as connection:
        rows = connection.execute(
            "SELECT verdict, level, made_up_share FROM heads WHERE step = 2 AND head = 1"
        ).fetchall()
    assert rows == [("fixated", "error", pytest.approx(values[2, 1]))]


def test_an_older_store_is_read_and_takes_new_runs(tmp_path):
    old = Path(__file__).parent / "data" / "run-0.1.db"
    path = Path(shutil.copy(old, tmp_path / "run.db"))
    before = read_run(path)
    _, values = before.series("layers.1", "made_up_share")
    assert values.shape == (3, 2) and np.isnan(values).all()  # not known, and said so
    assert "exploding" in before.total()["layers.1"].verdicts()[0].verdict
    assert "made_up_share" not in run_data(before)["packed"]
    watched(store=path)  # which adds the column
    assert read_run(path).series(LAYER, "made_up_share")[1][2, 1] > 0.8
    after = read_run(path, 1)
    assert after.health("layers.1") == before.health("layers.1")
    with closing(sqlite3.connect(path)) as connection:
        known = "SELECT count(made_up_share), count(entropy) FROM heads WHERE run = ?"
        assert connection.execute(known, (1,)).fetchone() == (0, 12)
        assert connection.execute(known, (2,)).fetchone() == (6, 6)


# ---------------------------------------------------------------- sinks


def test_json_lines(tmp_path):
    with JsonLines(tmp_path / "run.jsonl") as sink:
        watched(sinks=[sink])
    last = json.loads((tmp_path / "run.jsonl").read_text().splitlines()[-1])
    head = last["layers"][0]["heads"][1]
    assert (head["verdict"], head["level"]) == ("fixated", "error")
    assert head["made_up_share"] == last["alerts"][0]["value"] > 0.8


def test_tensorboard(tmp_path):
    with TensorBoard(tmp_path) as sink:
        assert "made_up_share" in sink.statistics
        watched(sinks=[sink])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    values = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}
    assert (
        values[f"made_up_share/{LAYER}"] > 0.8 > values[f"made_up_share_mean/{LAYER}"]
    )  # high is bad
    assert values[f"worst_head/{LAYER}"] == 1 and values["heads/error"] == 1


# ---------------------------------------------------------------- pages


def test_the_page_of_a_run(tmp_path):
    path = tmp_path / "run.db"
    seen, _, _ = watched(store=path)
    for run in (read_run(path), seen._run()):
        data = run_data(run)
        assert data["headline"] == "At step 2: 1 of 2 heads needs attention: 1 fixated."
        assert data["statistic"] == "made_up_share"
        assert [guide["at"] for guide in data["guides"]["made_up_share"]] == [0.8, 0.5]
        assert data["fields"]["made_up_share"]["label"] == "made-up share"
        (layer,) = unpacked(data)
        assert layer["verdicts"][1][-1] == "F" and layer["levels"][1][-1] == "E"
        assert layer["series"]["made_up_share"][1][2] > 0.8
    html = run_page(seen._run())
    assert ".fixated { --of: var(--fixated); --on: var(--on-fixated); }" in html
    assert "--fixated: #123456;" in html and "--fixated: #654321;" in html


def test_notebooks():
    seen, _, _ = watched()
    html = seen._repr_html_()
    assert "At step 2: 1 of 2 heads needs attention: 1 fixated." in html
    assert 'style="background-color:#123456;' in html and "light-dark(#123456, #654321)" in html
    column = lh.Health.made_up_share.heading
    assert f">{column}</th>" in html


def test_the_page_the_json_and_the_text_of_a_checkup():
    result = make_result(fixed_call())
    data = page_data(result)
    assert data["headline"] == "1 of 2 heads needs attention: 1 fixated."
    assert data["legend"]["fixated"] == {
        "letter": "F",
        "meaning": "looks at the last key and nothing else",
    }
    assert data["fields"]["made_up_share"] == data["main"]["made_up_share"]
    assert data["compared"]["made_up_share"] == "made-up share"
    assert data["scales"][0]["made_up_share"] > 0.4  # the mean of both heads
    assert ".fixated {" in checkup_page(result)
    head = json.loads(checkup_json(result))["layers"][0]["heads"][1]
    assert (head["verdict"], head["level"]) == ("fixated", "error") and head["made_up_share"] > 0.8
    console = Console(width=140)
    with console.capture() as captured:
        console.print(checkup_text(result, console.width))
    text = captured.get()
    assert " F  fixated: looks at the last key and nothing else" in text
    assert "made-up share" in text.split("at other scales")[1]
    assert failing(result, "fixated") == "--fail-on fixated: 1 head (1 fixated)"
    assert failing(result, "exploding") is None
