"""When a head's verdict turns worse: once per change, with all that one needs to act."""

import logging

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from watch_support import Stack, lively, randn

import levelhead as lh
import levelhead.torch
from levelhead._health import LOUD
from levelhead._records import StepRecord
from levelhead.torch.watching._alerts import Changes

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
    return [(a.step, a.head, a.verdict, a.level, a.previous) for a in alerts]


def test_one_alert_per_change():
    alerts = history((1, 1), (1, 150), (1, 150), (2, 500), (1, 160), (1, 160))
    assert short(alerts) == [(1, 1, "exploding", "warning", "healthy")]


def test_each_level_is_told():
    alerts = history((1,), (150,), (1_500,), (15_000,), (15_000,))
    assert short(alerts) == [
        (1, 0, "exploding", "warning", "healthy"),
        (2, 0, "exploding", "error", "exploding, warning"),
        (3, 0, "exploding", "critical", "exploding, error"),
    ]
    np.testing.assert_allclose([alert.value for alert in alerts], [150, 1_500, 15_000], 1e-5)


def test_a_head_that_recovers_and_falls_ill_again_is_told_of_again():
    alerts = history((1,), (150,), (1,), (150,), (1_500,), (150,), (1_500,))
    assert [(alert.step, alert.level) for alert in alerts] == [
        (1, "warning"), (3, "warning"), (4, "error"), (6, "error"),
    ]  # fmt: skip


def test_the_same_level_by_a_worse_rule_is_worse():
    # 40 saturates a row of 16 keys, and is no large score.
    alerts = history((1,), (40,), (150,), (40,), (1,))
    assert short(alerts) == [
        (1, 0, "saturated", "warning", "healthy"),
        (2, 0, "exploding", "warning", "saturated"),
    ]
    assert alerts[0].value == pytest.approx(1.0)


def test_information_is_no_alert():
    assert history((1e-3,), (1,), (4,), (1,)) == []  # uniform, healthy, sharp


def test_the_first_step_may_be_bad_already():
    assert short(history((150, 1), (150, 1))) == [(0, 0, "exploding", "warning", "not seen before")]


def test_the_worst_comes_first():
    alerts = history((1, 1, 1), (150, 15_000, 40))
    assert [alert.head for alert in alerts] == [1, 0, 2]


def test_heads_that_cannot_be_judged_for_a_while_keep_their_verdict():
    class Short(Tuned):
        def forward(self, size, keys):
            q = (torch.eye(L) * size**0.5)[None, None, :keys]
            return F.scaled_dot_product_attention(q, q, q, scale=1.0)

    model = Short()
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        for size, keys in ((150, L), (150, 4), (150, L), (1, 4), (150, L), (1, L), (150, L)):
            model(size, keys)
    assert [alert.step for alert in seen.alerts] == [0, 6]


def test_not_a_number():
    model = Tuned()
    with levelhead.torch.watch(model) as seen, torch.no_grad():
        model(1.0, 1.0)
        model(1.0, float("nan"))
    (alert,) = seen.alerts
    assert (alert.verdict, alert.level, alert.head, alert.value) == ("nonfinite", "critical", 1, L)


def test_what_an_alert_says(caplog):
    model = lively(Stack(), size=0.05)
    with torch.no_grad():
        model.layers[1].qkv.weight[:8] *= 500  # queries of the first head
        model.layers[1].qkv.bias[:8] *= 500
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
    assert alert.value == max(abs(health.score_max[0]), abs(health.score_min[0])) > 100
    verdict = next(verdict for verdict in health.verdicts() if verdict.head == 0)
    assert (alert.reason, alert.hint) == (verdict.reason, verdict.hint)
    assert [record.getMessage() for record in caplog.records] == [str(alert)]
    for part in ("step 0", "layers.1", "head 0", f"{alert.value:.4g}"[:3], verdict.hint):
        assert part in str(alert)


def test_alerts_go_to_the_sinks_with_their_step():
    records = []
    history((1,), (150,), sinks=[records.append])
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
        model(150.0)
        pytest.fail("it went on")
    assert len(seen.alerts) == 1 and len(records) == 2
    assert torch._C._len_torch_function_stack() == 0
    assert (seen.health[""].rows == 2 * L).all()


def test_a_callback_that_fails_at_the_end_leaves_nothing_behind():
    def fail(alert):
        raise SystemError("mine")

    model = Tuned()
    with pytest.raises(SystemError), levelhead.torch.watch(model, on_alert=fail):
        model(150.0)  # with gradients: the step ends with the watch
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
    strict = history((1,), (5,), thresholds={"exploding_warning": 4.0})
    assert [alert.step for alert in strict] == [1]
    assert "warning from 4" in strict[0].reason


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
        (verdict,) = health.verdicts()
        is_loud = verdict.level in LOUD
        assert len(Changes().alerts(StepRecord(0, 0.0, {"a": health}))) == is_loud
        loud, quiet = loud + is_loud, quiet + (not is_loud)
    assert min(loud, quiet) > 50
