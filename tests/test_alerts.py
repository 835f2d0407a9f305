"""What turns bad, together and once, with all that one needs to act; and when it is over."""

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_history import AT, CALM, SHARP, heads
from torch import nn
from watch_support import Stack, lively, randn

import levelhead as lh
import levelhead.torch
from levelhead._health import LOUD
from levelhead._records import StepRecord
from levelhead.torch.watching._alerts import Alerts

L = 16


class Tuned(nn.Module):
    """Two heads whose scores are as large as one wants."""

    def forward(self, *sizes):
        eye = torch.eye(L).expand(1, len(sizes), L, L)
        roots = torch.tensor([max(size, 1e-3) ** 0.5 for size in sizes])[:, None, None]
        q = eye * roots
        return F.scaled_dot_product_attention(q, q, q, scale=1.0)


def history(*steps, **options):
    """Alerts of steps, each given by the largest score of every head."""
    model = Tuned()
    with levelhead.torch.watch(model, **options) as seen, torch.no_grad():
        for sizes in steps:
            model(*sizes)
    return seen.alerts


def short(alerts):
    return [(a.step, a.head, a.verdict, a.level, a.previous, a.heads) for a in alerts]


def test_one_alert_per_change():
    alerts = history((1, 1), (1, 1_500), (1, 1_500), (2, 5_000), (1, 1_600), (1, 1_600))
    assert short(alerts) == [(1, 1, "exploding", "error", "", 1)]


def test_each_level_is_told():
    alerts = history((1,), (150,), (1_500,), (15_000,), (15_000,))
    assert short(alerts) == [
        (2, 0, "exploding", "error", "", 1),
        (3, 0, "exploding", "critical", "error", 1),
    ]
    np.testing.assert_allclose([alert.value for alert in alerts], [1_500, 15_000], 1e-5)


def test_heads_that_turn_bad_together_make_one_alert_and_the_worst_stands_for_them():
    alerts = history((1, 1, 1, 1), (1_200, 1, 5_000, 3_000))
    assert short(alerts) == [(1, 2, "exploding", "error", "", 3)]
    assert str(alerts[0]).startswith(
        "inference, step 1, 3 heads, the worst outside any submodule, head 2: exploding (error); "
        "the largest |score| is 5,000 (error from 1,000)."
    )


def test_it_is_told_again_when_twice_as_many_heads_are_concerned():
    sizes = [[1_500] * many + [1] * (8 - many) for many in (2, 3, 3, 4, 5, 7, 8, 8)]
    sizes[5][6] = 4_000
    alerts = history(*sizes)
    assert [(alert.step, alert.heads) for alert in alerts] == [(0, 2), (3, 4), (6, 8)]
    assert alerts[1].since == 0 == alerts[2].since
    assert "steps 0 to 3, 4 heads, the worst" in str(alerts[1])


def test_the_words_of_a_repeated_alert_are_those_of_its_step():
    alerts = history((1_500, 1), (1_600, 1), (1_700, 1_650))
    assert "1,700" in alerts[-1].reason and alerts[-1].value == pytest.approx(1_700)


def test_recovery_is_told_after_a_while_and_advice_only_once():
    well, ill = [(1,)] * 15, [(1_500,)] * 3
    alerts = history(*well, *ill, *well, *ill)
    assert [(alert.step, alert.level, alert.previous) for alert in alerts] == [
        (15, "error", ""), (27, "ok", "error"), (33, "error", ""),
    ]  # fmt: skip
    assert "QK-norm" in alerts[0].hint and alerts[1].hint == "" == alerts[2].hint
    assert "recovered" in str(alerts[1]) and "What to do" not in str(alerts[2])
    # Two heads recover when the last of them does.
    alerts = history((1_500, 1_500), (1, 1_500), *[(1, 1)] * 12)
    assert [(alert.step, alert.level, alert.heads) for alert in alerts] == [
        (0, "error", 2), (11, "ok", 2),
    ]  # fmt: skip


def test_what_comes_and_goes_is_told_once():
    assert len(history(*[(1_500,), (1,), (1,)] * 10)) == 1


def test_recovery_is_logged_more_quietly(caplog):
    with caplog.at_level(logging.INFO, logger="levelhead"):
        history((1_500,), *[(1,)] * 12)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_information_is_no_alert():
    # Uniform, healthy, sharp, saturated, large: a model that does not train is as it is.
    assert history((1e-3,), (1,), (4,), (40,), (150,), (900,), (1,)) == []


def test_the_first_step_may_be_bad_already():
    assert short(history((1_500, 1), (1_500, 1))) == [(0, 0, "exploding", "error", "", 1)]


def test_the_worst_comes_first():
    model = Tuned()
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        model(1.0, 1.0, 1.0)
        model(1_500.0, float("nan"), 40.0)
    assert [(alert.verdict, alert.head) for alert in seen.alerts] == [
        ("nonfinite", 1), ("exploding", 0),
    ]  # fmt: skip


def test_heads_that_cannot_be_judged_for_a_while_are_not_told_of_twice():
    class Short(Tuned):
        def forward(self, size, keys):
            q = (torch.eye(L) * size**0.5)[None, None, :keys]
            return F.scaled_dot_product_attention(q, q, q, scale=1.0)

    model = Short()
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        for size, keys in ((1_500, L), (1_500, 4), (1_500, L), (1, 4), (1_500, L)):
            model(size, keys)
    assert [alert.step for alert in seen.alerts] == [0]


def test_not_a_number():
    model = Tuned()
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        model(1.0, 1.0)
        model(1.0, float("nan"))
    (alert,) = seen.alerts
    assert (alert.verdict, alert.level, alert.head, alert.value) == ("nonfinite", "critical", 1, L)


def test_what_has_become_nan_has_not_recovered():
    nan = float("nan")
    alerts = history((1, 1_500), *[(nan, nan)] * 30, *[(1, 1)] * 30)
    assert [(alert.verdict, alert.level) for alert in alerts] == [
        ("exploding", "error"),
        ("nonfinite", "critical"),
        ("exploding", "ok"),
        ("nonfinite", "ok"),
    ]


@pytest.mark.parametrize(("stays", "told"), [(True, ["warning"]), (False, ["warning", "ok"])])
def test_what_goes_on_as_another_finding_of_its_kind_has_not_recovered(stays, told):
    """Heads turn sharp and the loss jumps; it comes back, and then stands still."""
    alerts, found = Alerts("training", AT), []
    for step in range(180):
        loss = 4.0 if step < 20 else 2.6 if step < 62 else 4.5 if step < 70 else 2.9
        # At step 142 the heads are collapsing no more, and the loss has not yet long stood still.
        is_sharp = step >= 60 and (stays or step < 142)
        evidence = heads(*[SHARP if is_sharp else CALM] * 4).evidence
        found += alerts.judge(StepRecord(step, 0.0, evidence.health), loss).alerts
    assert [alert.level for alert in found] == told
    assert {alert.verdict for alert in found} == {"collapsing"}
    assert [finding.name for finding in alerts.course] == ["saturated"] * stays


def test_what_an_alert_says(caplog):
    model = lively(Stack(), size=0.05)
    with torch.no_grad():
        model.layers[1].qkv.weight[:8] *= 5_000  # queries of the first head
        model.layers[1].qkv.bias[:8] *= 5_000
    called = []
    with (
        caplog.at_level(logging.WARNING, logger="levelhead"),
        levelhead.torch.watch(model, on_alert=called.append) as seen,
        torch.no_grad(),
    ):
        model(randn(2, L, 32))
    (alert,) = called
    assert seen.alerts == called
    assert (alert.layer, alert.head, alert.step) == ("layers.1", 0, 0)
    health = seen.health["layers.1"]
    assert alert.value == max(abs(health.score_max[0]), abs(health.score_min[0])) > 1_000
    verdict = next(verdict for verdict in health.verdicts() if verdict.head == 0)
    assert (alert.reason, alert.hint) == (verdict.reason, verdict.hint)
    assert [record.getMessage() for record in caplog.records] == [str(alert)]
    for part in ("step 0", "layers.1", "head 0", f"{alert.value:,.0f}", verdict.hint):
        assert part in str(alert)


def test_alerts_go_to_the_sinks_with_their_step():
    records = []
    history((1,), (1_500,), sinks=[records.append])
    assert [len(record.alerts) for record in records] == [0, 1]
    assert records[1].alerts[0].step == records[1].step == 1


def test_a_callback_may_stop_the_training():
    def stop(alert):
        raise SystemError(f"head {alert.head} explodes")

    model, records = Tuned(), []
    with (
        pytest.raises(SystemError, match="head 0 explodes"),
        levelhead.torch.watch(model, on_alert=stop, sinks=[records.append]) as seen,
        torch.no_grad(),
    ):
        model(1.0)
        model(1_500.0)
        pytest.fail("it went on")
    assert len(seen.alerts) == 1 and len(records) == 2
    assert torch._C._len_torch_function_stack() == 0
    assert (seen.health[""].rows == 2 * L).all()


def test_a_callback_that_fails_at_the_end_leaves_nothing_behind():
    def fail(alert):
        raise SystemError("mine")

    model = Tuned()
    with pytest.raises(SystemError), levelhead.torch.watch(model, on_alert=fail):
        model(1_500.0)  # with gradients: the step ends with the watch
    assert torch._C._len_torch_function_stack() == 0
    assert not model._forward_hooks


def test_a_sink_that_fails_is_told_once_and_stops_nothing(caplog):
    def fail(record):
        raise OSError("disk on fire")

    records, model = [], Tuned()
    with levelhead.torch.watch(model, sinks=[fail, records.append]), torch.no_grad():
        for _ in range(3):
            model(1.0)
    assert len(records) == 3
    told = [record for record in caplog.records if "failed at step" in record.getMessage()]
    assert len(told) == 1 and "the watch goes on" in told[0].getMessage()


def test_thresholds():
    strict = history((1,), (5,), thresholds={"exploding": 4.0})
    assert [alert.step for alert in strict] == [1]
    assert "error from 4" in strict[0].reason


def test_whoever_is_loud_is_reported():
    """Heads at random around every threshold."""
    rng = np.random.default_rng(0)
    columns = {name: place for place, name in enumerate(lh.Health.COLUMNS)}
    loud = quiet = 0
    for trial in range(600):
        sums = np.zeros((1, len(columns)))
        at = lambda name: (0, columns[name])  # noqa: E731
        rows = rng.integers(1, 50)
        for name in ("rows", "finite_rows", "choice_rows"):
            sums[at(name)] = rows
        sums[at("pairs")] = sums[at("score_count")] = rows * 16
        sums[at("widest_row")] = 16
        sums[at("nonfinite_rows")] = trial % 50 == 0
        near = [1 - 1e-12, 1.0, 1 + 1e-12, 0.5]
        score = rng.choice([1, 100, 1_000, 10_000]) * rng.choice(near)
        sums[at("score_max")], sums[at("score_min")] = (
            rng.choice([score, 1]),
            -rng.choice([score, 1]),
        )
        sums[at("saturated")] = 0.5 * rows * rng.choice([*near, 0])
        sums[at("entropy_ratio")] = 0.05 * rows * rng.choice([*near, 9])
        sums[at("entropy")] = sums[at("effective_keys")] = sums[at("signal")] = rows
        health = lh.Health.from_sums(sums)
        record = Alerts("inference", lh.Thresholds()).judge(StepRecord(0, 0.0, {"a": health}))
        (verdict,) = record.judged["a"]
        is_loud = verdict.level in LOUD
        assert len(record.alerts) == is_loud
        alone = health.verdicts()[0]  # a course in which nothing went wrong excuses sharp heads
        excused = alone.verdict in ("saturated", "collapsed")
        assert excused or (verdict.verdict, is_loud) == (alone.verdict, alone.level in LOUD)
        loud, quiet = loud + is_loud, quiet + (not is_loud)
    assert min(loud, quiet) > 50
