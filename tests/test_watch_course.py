"""A watch that sees the course of a training: what it finds, tells and keeps."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from page_support import unpacked
from watch_support import Stack, lively, randn

import levelhead.torch
from levelhead._health import Fact, Finding
from levelhead._records import INFERENCE, Alert, StepRecord
from levelhead.lab._sweep import Model
from levelhead.lab._tasks import TASKS
from levelhead.lab._threads import one_thread
from levelhead.lab._transformer import Shape
from levelhead.report._run_page import run_data
from levelhead.scaling import in_use
from levelhead.store import Run, Store, read_run

TASK = TASKS["recall"]
X = randn(2, 16, 32)


def train(steps, log=lambda seen, step, loss: seen.log(loss=loss), watched=None, **shape):
    """A small model while a watch looks at it."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = Model(TASK, Shape(**{"width": 32, "heads": 2, "d_k": 64, "weights": "unit"} | shape))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with one_thread(), levelhead.torch.watch(model, **watched or {}) as seen:
        for step in range(steps):
            tokens, answers = map(torch.from_numpy, TASK.draw(rng, 8))
            loss = F.cross_entropy(model(tokens).flatten(0, 1), answers.flatten(), ignore_index=-1)
            log(seen, step, loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return seen


# ---------------------------------------------------------------- sick and healthy runs


def test_a_model_without_its_scale_that_does_not_learn(tmp_path):
    seen = train(120, rule="none", d_k=256, watched={"store": tmp_path / "run.db"})
    (alert,) = seen.alerts
    assert (alert.verdict, alert.level, alert.scope) == ("saturated", "warning", "model")
    # Sound runs of the task leave it behind at about step 130.
    assert 20 <= alert.step <= 115 and 10 <= alert.since <= alert.step - 10 and alert.heads >= 2
    assert str(alert).startswith(f"steps {alert.since} to {alert.step}, the model: saturated")
    names = {(each.name, each.scope): each for each in seen.findings()}
    scale = names["scale", "model"]
    assert (
        scale.level == "warning" and "no layer scales the scores, which is 16 times" in scale.reason
    )
    assert names["saturated", "model"].since == alert.since
    # Heads that would be excused in a sound run are not.
    assert ("saturated", "head") in names and names["saturated", "head"].level == "warning"
    assert f"saturated: {names['saturated', 'model'].reason}." in seen.summary()
    # The page of the file and that of the memory say the same.
    pages = [run_data(run) for run in (read_run(tmp_path / "run.db"), seen._run())]
    for page in pages:
        assert page["headline"] == f"At step 119: saturated: {names['saturated', 'model'].reason}."
        assert [page["told"][which] for which in page["said"][-1]] == [
            {"mark": "saturated", "level": "warning", "text": str(names["saturated", "model"])},
            {"mark": "saturated", "level": "warning", "text": str(scale)},
        ]
    levels, held = ([layer["levels"] for layer in unpacked(page)] for page in pages)
    assert levels == held
    marks = "".join(levels[0])
    assert "!" in marks and "!" not in marks[: alert.step]


def test_a_sound_model_raises_no_alarm():
    seen = train(60)
    assert seen.alerts == [] and not [each for each in seen.findings() if each.is_loud]


def test_a_watch_before_its_first_call_has_nothing_to_say():
    assert levelhead.torch.watch(Stack()).findings() == []


ODD = {
    "nan": lambda seen, step, loss: seen.log(loss=math.nan),
    "infinite": lambda seen, step, loss: seen.log(loss=math.inf if step % 2 else -math.inf),
    "negative": lambda seen, step, loss: seen.log(loss=-5.0 - step),
    "sometimes": lambda seen, step, loss: seen.log(loss=loss) if step % 3 == 0 else None,
    "twice": lambda seen, step, loss: (seen.log(loss=loss), seen.log(loss=loss)),
    "tensor": lambda seen, step, loss: seen.log(loss=loss.detach().reshape(1, 1).double()),
    "text": lambda seen, step, loss: seen.log(loss="low"),
    "many": lambda seen, step, loss: seen.log(loss=torch.ones(3)),
    "huge": lambda seen, step, loss: seen.log(loss=1e308 if step % 2 else -1e308),
    "zero": lambda seen, step, loss: seen.log(loss=0.0),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("log", ODD.values(), ids=ODD)
def test_no_loss_stops_a_training(log):
    """Nor does it hide that a model without its scale is sharp from the start."""
    seen = train(130, log, rule="none")
    falls_or_is_gone = [ODD[name] for name in ("negative", "huge", "zero")]
    wanted = set() if log in falls_or_is_gone else {"saturated"}
    assert {alert.verdict for alert in seen.alerts} >= wanted
    seen.summary()


def test_thresholds_of_ones_own_reach_alerts_findings_and_the_page(tmp_path):
    model, path = lively(Stack(), size=0.2), tmp_path / "run.db"
    with levelhead.torch.watch(model, store=path, thresholds={"exploding": 2}) as seen:
        model(X).sum().backward()
    (alert,) = seen.alerts
    found = [each for each in seen.findings() if each.name == "exploding"]
    assert (alert.verdict, alert.level, alert.heads) == ("exploding", "error", len(found))
    page = run_data(read_run(path))
    assert f"{alert.heads} of 8 heads need attention: {alert.heads} exploding." in page["headline"]
    (group,) = page["alerts"]
    assert [(each["step"], each["reason"]) for each in group["alerts"]] == [(0, alert.reason)]
    assert {str(each) for each in read_run(path).findings()} == {str(f) for f in seen.findings()}


def test_the_memory_of_a_sick_run_holds_no_findings_per_step():
    model, records = lively(Stack(1), size=6.0), []
    with levelhead.torch.watch(model, sinks=[records.append]), torch.no_grad():
        for _ in range(5):
            model(X)
    first, *_, last = (record.course for record in records)
    assert len(first) == 4 and all(a is b for a, b in zip(first, last, strict=True))


# ---------------------------------------------------------------- in a store

SHARP = Finding("model", "saturated", "warning", "4 of 4 heads are sharp", "mend it",
                evidence=(Fact("sharp heads", 1.0, high=0.5, form=".0%"),), layer="a", head=1,
                heads=4, since=3)  # fmt: skip
LOUD = Finding("head", "exploding", "error", "it is 2,000", "tame it", layer="a", head=0, since=2)


def record(step, course, **more):
    model = levelhead.reference(*np.ones((3, 2, 16, 8)), return_health=True)
    return StepRecord(step, 0.0, {"a": model.health}, course=course, **more)


def test_a_course_is_written_where_it_changes(tmp_path):
    path = tmp_path / "run.db"
    worse = replace(SHARP, reason="now 3 of 4")
    courses = [None, (), (), (SHARP,), (SHARP,), (worse,), (worse, LOUD), (), ()]
    louder = replace(LOUD, reason="it is 3,000")  # its numbers are those of its head
    courses.insert(7, (worse, louder))
    with Store(path) as store:
        for step, course in enumerate(courses):
            store(record(step, course))
        run = read_run(path)
    assert [step for step, _ in run.courses] == [1, 3, 5, 6, 8]
    courses[7] = courses[6]
    assert [run.course_at(step) for step in range(10)] == courses
    assert run.latest()[0].course == ()


@pytest.mark.parametrize("place", ["memory", "file"])
def test_the_newest_record_says_how_things_are_also_after_going_back(tmp_path, place):
    courses = {0: (), 50: (SHARP,), 20: (SHARP,), 30: (SHARP,)}
    records = [record(step, course) for step, course in courses.items()]
    run = Run.from_records(records)
    if place == "file":
        with Store(tmp_path / "run.db") as store:
            for each in records:
                store(each)
        run = read_run(tmp_path / "run.db")
    assert run.latest()[0].course == (SHARP,) and SHARP in run.findings()
    assert [run.together([at]).course for at in range(4)] == list(courses.values())
    assert [run.course_at(step) for step in (0, 19, 25, 40, 60)] == [(), (), *[(SHARP,)] * 3]
    assert run.courses == [(0, ()), (50, (SHARP,))]


def test_scales_and_alerts_come_back(tmp_path):
    path, scale = tmp_path / "run.db", in_use(1.0, 8, 16)
    alert = Alert(5, "a", 1, "saturated", "warning", "", 1.0, "so", "mend it", scope="model",
                  heads=4, since=3)  # fmt: skip
    over = replace(alert, step=9, level="ok", previous="warning", hint="")
    with Store(path) as store:
        store(record(5, (SHARP,), alerts=(alert,), scales={"a": scale}))
        store(record(9, (), alerts=(over,), scales={"a": scale}))
    run = read_run(path)
    assert run.alerts == [alert, over] and run.scales == {"a": scale}
    assert [each.reason for each in run.findings() if each.name == "scale"]
    page = run_data(run)
    (group,) = page["alerts"]
    assert (group["mark"], group["hint"], group["level"]) == ("saturated", "mend it", "warning")
    assert [(each["step"], each["level"]) for each in group["alerts"]] == [
        (9, "ok"),
        (5, "warning"),
    ]
    json.dumps(page, allow_nan=False)


def test_the_scale_of_a_layer_is_the_one_in_use_last(tmp_path):
    path, scales = tmp_path / "run.db", [in_use(scale, 64) for scale in (1.0, 0.5, 1 / 8)]
    records = [record(step, (), scales={"a": scale}) for step, scale in enumerate(scales)]
    with Store(path, name="it") as store:
        for step, scale in enumerate(scales[:2]):
            store(records[step])
            assert read_run(path).scales == {"a": scale}
    with Store(path, name="it", start_step=2) as store:
        store(record(2, ()))  # nothing is known of it: it stays
        assert read_run(path).scales == {"a": scales[1]}
        store(records[2])
    assert read_run(path).scales == {"a": scales[2]} == Run.from_records(records).scales
    assert not [each for each in read_run(path).findings() if each.name == "scale"]


def test_a_scale_is_written_where_it_changes(tmp_path):
    with Store(tmp_path / "run.db") as store:
        written = []
        store._connection.set_trace_callback(written.append)
        for step, scale in enumerate((1.0, 1.0, 0.5, 0.5)):
            store(record(step, (), scales={"a": in_use(scale, 64), "b": in_use(scale, 64)}))
    assert len([each for each in written if each.startswith("UPDATE layers")]) == 2


def test_before_training_everything_is_numbered_back(tmp_path):
    path = tmp_path / "run.db"
    alert = Alert(2, "a", 0, "exploding", "error", "", 2e3, "so", "tame", phase=INFERENCE, since=2)
    with Store(path) as store:
        for step in range(4):
            told = step >= 2
            course, alerts = ((LOUD,), (alert,)) if told else ((), ())
            store(record(step, course, alerts=alerts if step == 2 else (), phase=INFERENCE))
        store(record(0, ()))
    before = read_run(path, phase="before training")
    assert before.steps == [-4, -3, -2, -1]
    (told,) = before.alerts
    assert (told.step, told.since) == (-2, -2)
    assert before.course_at(-1)[0].since == -2 and read_run(path).courses == [(0, ())]


def test_a_watch_numbers_back_what_was_before_training():
    model = lively(Stack(1), size=6.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with levelhead.torch.watch(model) as seen:
        with torch.no_grad():
            for _ in range(3):
                model(X)
        model(X).mean().backward()
        optimizer.step()
    (alert,) = seen.before_training.alerts
    assert (alert.step, alert.since) == (-3, -3)
