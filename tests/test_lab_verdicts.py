"""The study of the verdicts: tasks, outcomes, what counts as an alarm, and its own verdict."""

import copy
import json
import math
import os

import numpy as np
import pytest
import torch

from levelhead import lab
from levelhead.lab import _outcomes
from levelhead.lab._figures import plain
from levelhead.lab._outcomes import HealthyPath, by_gradient_norm, ending
from levelhead.lab._sweep import FAULTS, REFERENCES, Model, Setting, mended, settings, train
from levelhead.lab._tasks import HELD_OUT, TASKS
from levelhead.lab._threads import in_a_process, side_by_side
from levelhead.lab._transformer import Attention, Shape, distances
from levelhead.lab.claims import verdicts


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    out = tmp_path_factory.mktemp("lab")
    run = lab.run(["verdicts"], out=out, size="tiny", seeds=1)
    figures = json.loads((out / "runs" / "tiny" / "verdicts-0.json").read_text())["figures"]
    return run.results[0], figures


# ---------------------------------------------------------------- trainings


@pytest.mark.parametrize("name", TASKS)
def test_a_task_draws_what_it_says(name):
    task = TASKS[name]
    tokens, answers = task.draw(np.random.default_rng(0), 4)
    again = task.draw(np.random.default_rng(0), 4)
    assert (tokens == again.tokens).all() and (answers == again.answers).all()
    assert tokens.shape == (4, answers.shape[1], len(task.tokens))
    assert answers.shape[1] <= task.length
    assert (tokens >= 0).all() and (tokens < np.array(task.tokens)).all()
    assert answers.min() >= -1 and answers.max() < task.answers and (answers >= 0).any()


def test_settings_follow_the_seed_and_begin_with_sound_ones():
    first, again, other = (settings("copy", 30, seed) for seed in (7, 7, 8))
    assert first == again != other and len({repr(each) for each in first}) == 30
    for sound in first[:REFERENCES]:
        assert not sound.fault and "rule" not in dict(sound.shape)
    rest = first[REFERENCES:]
    assert {dict(each.shape)["rule"] for each in rest} >= {"none", "sqrt_dk"}
    assert {each.fault for each in rest} <= {"", *FAULTS}


def test_a_cure_is_the_right_scale_then_qk_norm():
    sick = Setting("copy").shaped(rule="none", d_k=8)
    right, normed = mended(sick)
    assert dict(right.shape) == {"rule": "sqrt_dk", "factor": 1.0, "d_k": 8}
    assert dict(normed.shape) == dict(right.shape) | {"qk_norm": True}
    assert mended(right) == [normed]


def test_tasks_that_were_tuned_on_are_not_held_out():
    all_parts = [*verdicts.TUNED, *verdicts.TUNED_LATER, *verdicts.TUNED_LAST, *HELD_OUT]
    assert sorted(all_parts) == sorted(TASKS) and not {*verdicts.NEW_NORMS} & {*verdicts.NORMS}


@pytest.mark.parametrize("norm", [*verdicts.NORMS, *verdicts.NEW_NORMS])
def test_every_architecture_learns_and_is_recorded(norm):
    trace = train(Setting("copy", steps=20).shaped(norm=norm))
    assert trace.loss[-5:].mean() < trace.loss[:5].mean() and np.isfinite(trace.sums).all()
    assert [heads for _, heads in trace.layers] == [4, 4]


def test_the_heads_of_palm_share_their_keys_and_values():
    attention = Attention(Shape(norm="palm", heads=4, d_k=8, width=32))
    assert [len(each.weight) for each in (attention.query, attention.key)] == [32, 8]
    assert len(attention.value.weight) == 8


def test_alibi_takes_from_the_scores_by_distance():
    torch.manual_seed(0)
    near, far = distances(4, 10)[:, 0, 1], distances(4, 10)[:, 0, 9]
    assert near[0] == -0.5 and near[-1] == -1 / 256 and torch.equal(far, 9 * near)
    plain, alibi = (
        Attention(Shape(norm=norm, heads=4, d_k=8, width=32)) for norm in ("pre", "alibi")
    )
    alibi.load_state_dict(plain.state_dict())
    x = torch.randn(2, 10, 32)
    assert not torch.allclose(plain(x)[:, 5:], alibi(x)[:, 5:], atol=1e-3)


def test_the_rate_of_queries_and_keys_rises():
    model = Model(TASKS["copy"], Shape(heads=2, d_k=8, width=16))
    rates = []
    for after in (0, 20, 40, 1000):
        groups = [{"params": [p], "lr": 1.0} for p in list(model.parameters())[:2]]
        optimiser = torch.optim.SGD(groups)
        FAULTS["scores learn ever faster"](model, optimiser, None, after)
        rates.append([group["lr"] for group in optimiser.param_groups])
    assert rates == [[1, 1], [1, 2], [1, 4], [1, 64]]


def test_trainings_side_by_side_run_in_processes_of_their_own_and_keep_their_order():
    with side_by_side(2) as each_of:
        found = list(each_of(lambda n: in_a_process(math.sqrt, n), [1, 4, 9, 16]))
        assert in_a_process(os.getpid) != os.getpid()
    assert found == [1, 2, 3, 4] and in_a_process(os.getpid) == os.getpid()
    with side_by_side(1) as each_of:
        assert list(each_of(lambda _: in_a_process(os.getpid), [0])) == [os.getpid()]


# ---------------------------------------------------------------- outcomes

STEPS = 100
SOUND = 4.0 - 3.0 * np.minimum(np.arange(STEPS) / 50, 1.0)
PATH = HealthyPath.of([SOUND] * REFERENCES)


def ends_at(loss):
    return np.full(STEPS, loss)


@pytest.mark.parametrize(
    ("loss", "longer", "cured", "expected"),
    [
        (1.1, None, None, ("healthy", "")),
        (1.3, None, None, ("between", "")),
        (2.0, 1.0, None, ("slow", "")),
        (2.0, 2.0, 1.0, ("failed", "attention")),
        (2.0, 2.0, 2.0, ("failed", "other")),
    ],
)
def test_how_a_run_ended_and_why(loss, longer, cured, expected):
    def again(setting):
        return {"loss": ends_at(longer if setting.more else cured)}

    setting = Setting("copy", steps=STEPS).shaped(rule="none", norm="pre")
    assert ending(setting, ends_at(loss), PATH, again) == expected


def test_when_a_loss_left_the_healthy_path():
    loss = SOUND.copy()
    assert PATH.left_at(loss) is None
    loss[60:] = 4.0
    assert 60 <= PATH.left_at(loss) <= 60 + _outcomes.WINDOW
    loss[80:] = 1.0  # not for good
    assert PATH.left_at(loss) is None


def test_a_gradient_that_jumps():
    norms = np.ones(100)
    norms[70] = 4.0
    assert by_gradient_norm({"grad_norm": norms}, (2.0, 5.0)) == [(70, "gradient norm"), (None, "")]


# ---------------------------------------------------------------- the experiment


def test_text_and_pictures(done):
    result, figures = done
    one = lab.experiments()["verdicts"]
    assert one.claim == 16 and result["why"].endswith(".")
    assert "{" not in result["text"] and "nan" not in result["text"]
    pictures = one.plot([figures])
    json.dumps(pictures, allow_nan=False)
    assert [each["layout"]["title"]["text"] for each in pictures][:2] == [
        "False alarms against runs caught", "How long before the loss the alarm came",
    ]  # fmt: skip
    runs = figures["runs"]
    assert {*runs["part"]} == {"tuned", "held out"} and len(runs["part"]) == 18
    assert {*runs["ended"]} <= {"healthy", "between", "slow", "failed"}


def test_the_same_seed_gives_the_same_figures(done):
    assert plain(verdicts.measure("tiny", 0)) == done[1]


def study(figures, false=0, missed=0, lead=50):
    """The figures of 40 held-out runs that ended well and 40 that attention made fail."""
    figures = copy.deepcopy(figures)
    row = {name: column[0] for name, column in figures["runs"].items()}
    row |= {"part": "held out", "fault": ""}
    well = [row | {"ended": "healthy", "cause": "", "alarm": 9 if n < false else None}
            for n in range(40)]  # fmt: skip
    sick = [row | {"ended": "failed", "cause": "attention", "left": 9 + lead,
                   "alarm": None if n < missed else 9} for n in range(40)]  # fmt: skip
    figures["runs"] = {name: [each[name] for each in well + sick] for name in row}
    return figures


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "holds"),
        ({"false": 2, "missed": 4, "lead": 30}, "holds"),
        ({"false": 3}, "holds partly"),
        ({"missed": 5}, "holds partly"),
        ({"lead": 29}, "holds partly"),
        ({"false": 3, "missed": 5, "lead": 29}, "does not hold"),
        ({"missed": 40}, "holds partly"),
    ],
)
def test_altered_figures_alter_the_verdict(done, changes, expected):
    name, why = verdicts.verdict([study(done[1], **changes)])
    assert name == expected and "nan" not in why


def test_without_runs_to_judge_by_it_does_not_hold(done):
    figures = study(done[1])
    figures["runs"]["cause"] = ["other"] * 80
    assert verdicts.verdict([figures])[0] == "does not hold"


def test_what_the_text_counts(done):
    found = verdicts.numbers([study(done[1], false=4, missed=10)])
    assert (found["held_false"], found["held_well"]) == (4, 40)
    assert (found["held_caught"], found["held_sick"]) == (30, 40)
    assert found["held_false_low"] < 0.1 < found["held_false_high"]
    assert found["held_recall_low"] < 0.75 < found["held_recall_high"]
    assert math.isnan(found["tuned_lead"]) and f"{found['tuned_lead']:.0f}" == "-"
