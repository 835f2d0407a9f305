"""What the course of a training says: the loss, trends, many heads at once."""

import math
import sys
from dataclasses import replace

import numpy as np
import pytest

from levelhead._health import Evidence, GradHealth, Health, History, Thresholds
from levelhead._health.judge import Heads, findings
from levelhead._health.statistics import statistics_of
from levelhead._health.trends import BEFORE, Loss, Trend
from levelhead.scaling import in_use

AT = Thresholds()
CALM = {"entropy_ratio": 0.8, "saturated": 0.0}
SHARP = {"entropy_ratio": 0.1, "saturated": 0.6}
COLUMNS = {each.column: each for each in statistics_of(Health).values() if each.column}


def head(**fields):
    """Sums of one head of 10 rows with 16 keys."""
    given = {"score_max": 3.0, "score_min": -3.0, "effective_keys": 7.0, "signal": 0.5} | fields
    given |= {"rows": 10, "finite_rows": 10, "choice_rows": 10, "widest_row": 16}
    given |= {"pairs": 160, "score_count": 160, "pattern_sequences": 1} | fields
    rows = {"choice_rows": 10, "finite_rows": 10}
    return [
        given.get(name, 0.0) * (rows.get(each.over, 1) if each.merge == "sum" else 1)
        for name, each in COLUMNS.items()
    ]


def heads(*many, **layers):
    layers = layers or {"a": many}
    health = {
        name: Health.from_sums([head(**one) for one in part]) for name, part in layers.items()
    }
    return Heads(Evidence(health, course=()), AT)


def course(history, steps, seen, loss=None):
    """What is found at each step; `seen` and `loss` may be functions of it."""
    found = []
    for step in steps:
        now = seen(step) if callable(seen) else seen
        history.observe(step, now, loss(step) if callable(loss) else loss)
        found.append([(each.scope, each.name, each.level) for each in history.findings])
    return found


def first(found):
    return next((place for place, now in enumerate(found) if now), None)


# ---------------------------------------------------------------- the loss


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_passed_over(bad):
    loss = Loss()
    loss.add(0, bad)
    assert not loss.is_known
    for step in range(1, 20):
        loss.add(step, bad if step % 3 else 2.0)
    assert loss.start == loss.now == loss.best == 2.0


def test_what_was_learned_and_lost_again():
    loss = Loss()
    for step in range(300):
        loss.add(step, 4.0 if step < 5 else 1.0)
    assert loss.start == 4.0 and loss.now == pytest.approx(1.0, abs=1e-3)
    assert loss.learned == pytest.approx(0.75, abs=1e-3)
    assert loss.lost == 0.0 and not loss.is_falling
    for step in range(300, 400):
        loss.add(step, 2.5)
    assert loss.lost == pytest.approx(0.5, abs=1e-3) and loss.best < 1.01
    assert loss.learned == pytest.approx(0.375, abs=1e-3)


def test_a_loss_that_falls_is_falling():
    loss = Loss()
    for step in range(50):
        loss.add(step, 4.0 - 0.02 * step)
    assert loss.is_falling and not loss.is_rising
    assert loss.falls == pytest.approx(10 * 0.02 / 4.0, rel=0.05)
    for step in range(50, 100):
        loss.add(step, 3.0 + 0.02 * (step - 50))
    assert loss.is_rising and not loss.is_falling


@pytest.mark.parametrize("every", [1, 10, 50])
def test_a_loss_that_has_long_been_the_same_is_settled(every):
    loss, settled = Loss(), {}
    for step in range(0, 1001, every):
        loss.add(step, 2.0 + 2.0 * 0.98**step)
        settled[step] = loss.is_settled
    assert not any(settled[step] for step in range(0, 101, every)) and settled[1000]
    for step in range(1001, 1101):
        loss.add(step, 1.0)
    assert not loss.is_settled


def test_a_loss_below_zero_is_learned_when_it_falls():
    loss = Loss()
    for step in range(100):
        loss.add(step, -1.0 if step < 5 else -3.0)
    assert loss.learned == pytest.approx(2.0, abs=1e-2) and loss.lost == 0.0


@pytest.mark.parametrize("every", [1, 7, 50])
def test_the_loss_is_averaged_over_steps_not_records(every):
    loss = Loss()
    for step in range(0, 351, every):
        loss.add(step, 4.0 if step < 5 else 1.0)
    assert loss.now == pytest.approx(1.0, abs=1e-3) and loss.start == 4.0


def test_the_start_of_the_loss_stays_when_steps_go_back():
    loss = Loss()
    for step in range(50):
        loss.add(step, 4.0 if step < 5 else 1.0)
    for step in range(50):
        loss.add(step, 1.0)
    assert loss.start == 4.0


@pytest.mark.parametrize("every", [1, 10, 500])
def test_a_loss_that_is_not_logged_any_more_is_not_known(every):
    loss, last = Loss(), (2001 // every) * every - 1
    for step in range(10_000):
        is_logged = step <= 2000 and step % every == every - 1
        loss.add(step, 4.0 - 0.001 * step if is_logged else None)
        assert loss.is_known == (every - 1 <= step <= last + max(100, 4 * every))
    assert loss.falls == 0.0


def test_what_is_lost_is_told_as_it_is_however_little_there_was():
    loss = Loss()
    for step in range(200):
        loss.add(step, 1.0 if step < 5 else 0.9)
    for step in range(200, 400):
        loss.add(step, 0.95)
    assert loss.lost == pytest.approx(0.05 / 0.25, abs=0.01)
    assert loss.lost_of_gain == pytest.approx(0.5, abs=0.01)


def test_a_run_that_goes_back_goes_on_by_its_own_clock():
    history = History(AT)
    steps = [*range(1000, 1050), *range(900, 1000)]
    for at, step in enumerate(steps):
        history.observe(step, heads(CALM), 4.0 - 0.005 * at)
        if at >= 20:
            assert history.loss.falls == pytest.approx(0.05 / 4.0, rel=0.05)


# ---------------------------------------------------------------- trends


@pytest.mark.parametrize("every", [1, 3, 10, 50])
@pytest.mark.parametrize("doubles", [20, 200])
def test_exponential_growth_is_foretold(every, doubles):
    trend, steps = Trend(2), range(0, 40 * every, every)
    for step in steps:
        trend.add(step, np.array([2 ** (step / doubles), 5.0]))
    growing, steady = trend.steps_until(1000.0)
    assert growing == pytest.approx(max(math.log2(1000) * doubles - steps[-1], 0.0), abs=2)
    assert steady > 1e9


def test_scores_that_scatter_more_than_they_grow_have_no_trend():
    rng, trend = np.random.default_rng(0), Trend(2)
    for step in range(60):
        noise = 2 ** rng.normal(size=2)
        trend.add(step, np.array([100.0, 2 ** (step / 5)]) * noise)
        scattering, growing = trend.steps_until(1000.0)
        assert scattering == math.inf
    assert growing < 1


def test_scores_that_are_not_there_do_not_bend_the_line():
    trend = Trend(1)
    for step in range(40):
        trend.add(step, np.array([math.nan if step % 4 == 1 else 2 ** (step / 10)]))
    assert trend.steps_until(1000.0)[0] == pytest.approx(10 * math.log2(1000) - 39, abs=2)


@pytest.mark.parametrize("grown", [lambda step: min(step / 30, 1.0), lambda step: step >= 30])
def test_scores_that_have_stopped_growing_are_soon_told_no_more(grown):
    trend = Trend(1)
    for step in range(120):
        trend.add(step, np.array([200 ** float(grown(step))]))
        steps = trend.steps_until(1000.0)[0]
        assert steps > 1 or step <= 33
    assert steps == math.inf


def test_a_few_records_make_no_trend():
    trend = Trend(1)
    for step in range(3):
        trend.add(step, np.array([100.0 * 2**step]))
        assert trend.steps_until(1e9)[0] == math.inf


def growing(step):
    return heads({"score_max": 10 * 2 ** (step / 10)}, {})


@pytest.mark.parametrize("every", [1, 5])
def test_growing_scores_are_told_before_they_explode(every):
    history, steps = History(AT), range(0, 65, every)
    found = course(history, steps, growing, loss=2.0)
    place = first(found)
    assert found[place] == [("head", "exploding", "warning")]
    # 100 is passed at step 33, 1,000 at step 66.
    assert 34 <= steps[place] <= 34 + every
    (finding,) = history.findings
    assert (finding.layer, finding.head) == ("a", 0)
    told = finding.forecast.removeprefix("At this rate 1,000 at about step ")
    assert int(told) == pytest.approx(66, abs=3)


def test_growing_scores_are_information_while_the_loss_is_fine():
    def falls(step):
        return 4.0 * 0.9**step

    history = History(AT)
    found = course(history, range(60), growing, falls)
    assert {each for now in found for each in now} == {("head", "exploding", "info")}
    assert history.findings[0].benign == "the loss has not suffered so far"


@pytest.mark.parametrize("harm", [3.0, math.nan, math.inf])
@pytest.mark.parametrize(("ends_at", "level"), [(0.02, "info"), (1.0, "info"), (2.5, "critical")])
def test_scores_may_explode_once_most_of_the_task_is_solved(ends_at, level, harm):
    def falls(step):
        return max(4.0 * 0.9**step, ends_at)

    history, exploding = History(AT), heads({"score_max": 2e4}, {})
    course(history, range(100), lambda step: exploding if step >= 80 else heads({}, {}), falls)
    (finding,) = history.findings
    assert (finding.name, finding.level) == ("exploding", level)
    assert ("most of the loss is gone" in finding.benign) == (level == "info")
    judged = findings(replace(exploding.evidence, course=history.findings))[0]
    assert (judged.level, judged.since) == (level, 80)
    course(history, range(100, 140), exploding, harm)
    assert history.findings[0].level == "critical"


def test_a_loss_that_is_no_number_any_more_is_lost():
    def loss(step):
        return learns(step) if step < 60 else math.nan

    history = History(AT)
    assert 60 <= first(course(history, range(100), turns, loss)) <= 60 + AT.patience
    assert history.findings[0].reason.endswith("the loss is no number any more")
    course(history, range(100, 130), turns, 0.5)
    assert not history.findings


@pytest.mark.parametrize(("bad", "is_broken"), [(1, False), (9, False), (11, True)])
def test_a_loss_may_skip_some_steps(bad, is_broken):
    loss = Loss()
    for step in range(100):
        loss.add(step, math.nan if step >= 100 - bad else 2.0)
    assert loss.is_broken == is_broken
    loss.add(100, 2.0)
    assert not loss.is_broken


def test_a_mean_over_many_steps_that_is_no_number_is_enough():
    loss = Loss()
    loss.add(0, 2.0)
    loss.add(50, math.inf)
    assert loss.is_broken


def test_large_and_steady_is_no_finding():
    assert first(course(History(AT), range(200), heads({"score_max": 900.0}), 2.0)) is None


def test_a_layer_that_takes_part_in_some_steps_has_a_trend_in_steps():
    def seen(step):
        return heads(a=[{}], b=[{"score_max": 10 * 2 ** (step / 10)}]) if step % 3 else heads({})

    history = History(AT)
    course(history, range(60), seen, 2.0)
    (finding,) = history.findings
    assert finding.layer == "b"
    assert int(finding.forecast.rpartition(" ")[2].replace(",", "")) == pytest.approx(66, abs=3)


# ---------------------------------------------------------------- many heads at once


@pytest.mark.parametrize("every", [1, 4, 25])
def test_sharp_before_learning_is_told_within_the_patience(every):
    history, steps = History(AT), range(0, 200, every)
    found = course(history, steps, heads(SHARP, SHARP, SHARP, CALM), 2.0)
    assert found[-1] == [("model", "saturated", "warning")]
    assert steps[first(found)] < AT.beginning + AT.patience + 2 * every
    (finding,) = history.findings
    assert AT.beginning <= finding.since < AT.beginning + every and finding.heads == 3
    assert finding.reason == "3 of 4 heads are sharp, and the loss has fallen by 0% only"


def learns(step):
    return 4.0 if step < 20 else 0.5


def turns(step):
    return heads(*[SHARP if step >= 60 else CALM] * 4)


def sharp(asked, let_through, like=SHARP):
    """Sharp heads whose gradients, on the weights and on the scores, change by a factor a step."""

    def seen(step):
        head = like(step) if callable(like) else like
        return with_gradients(asked**step, let_through**step, head)

    return seen


def with_gradients(asked, let_through, head=SHARP):
    base = heads(*[head] * 4).evidence
    sums = [[asked**2, let_through**2]] * 4  # the norms are kept as sums of squares
    return Heads(replace(base, gradients={"a": GradHealth.from_sums(sums)}), AT)


@pytest.mark.parametrize(
    ("asked", "let_through", "learned", "is_told"),
    [
        (1.0, 1.0, 0.0, False),  # it may be noise
        (1.02, 1.0, 0.0, True),  # it is not: other weights are asked for
        (1.0, 0.99, 0.1, True),  # something was learned, and then no more
        (1.0, 1.0, 0.1, False),  # perhaps it goes on soon
        (0.97, 0.99, 0.1, False),  # the model turns away from its attention
        (1.02, 1.02, 0.1, False),  # it is about to learn
        (1.0, 1.0, 0.3, False),  # perhaps that was all
        (1.02, 1.0, 0.3, True),  # it was not
    ],
)
def test_gradients_tell_a_model_that_is_stuck_from_one_with_nothing_to_learn(
    asked, let_through, learned, is_told
):
    def loss(step):
        return 2.0 if step < 10 else 2.0 - 2.0 * learned

    found = course(History(AT), range(120), sharp(asked, let_through), loss)
    assert bool(found[-1]) == is_told


def test_a_model_that_has_long_been_stuck_is_told_though_nothing_changes():
    found = course(History(AT), range(250), sharp(1.0, 1.0), lambda t: 2.0 if t < 10 else 1.8)
    assert 150 < first(found) < 200 and found[-1] == [("model", "saturated", "warning")]


@pytest.mark.parametrize("let_through", [1.0, 1.05])
def test_a_loss_that_is_being_mended_is_not_lost(let_through):
    def seen(step):
        return sharp(1.0, let_through, SHARP if step >= 60 else CALM)(max(step - 60, 0))

    def loss(step):
        return learns(step) if step < 60 else 1.5

    found = course(History(AT), range(100), seen, loss)
    assert (first(found) is None) == (let_through > 1)


def test_nothing_has_turned_before_there_is_a_before():
    def seen(step):
        return sharp(1.0, 0.99, SHARP if step >= 15 else CALM)(step)

    found = course(History(AT), range(39), seen, 2.0)
    assert first(found) is None  # it may be noise


@pytest.mark.parametrize(("left", "is_told"), [(0.3, True), (0.05, False)])
def test_a_model_that_has_learned_to_ignore_its_attention_is_not_stuck(left, is_told):
    def seen(step):
        return sharp(left ** (1 / 100), 1.0)(min(step, 100))

    found = course(History(AT), range(250), seen, lambda step: 2.0 if step < 10 else 1.8)
    assert bool(found[-1]) == is_told and not found[100]


@pytest.mark.parametrize(
    ("asked", "let_through", "falls", "is_told"),
    [
        (1.01, 0.97, 0.001, True),
        (1.01, 0.97, 0.005, False),  # it learns all the same
        (1.05, 0.97, 0.005, True),  # but far more is asked for
        (1.05, 0.97, 0.02, False),  # it learns quickly
        (1.01, 1.0, 0.001, False),  # it may be so
        (0.99, 0.97, 0.001, False),  # nobody asks
        (1.01, 1.03, 0.001, False),  # more and more gets through
    ],
)
def test_a_softmax_that_chokes_is_told_at_once(asked, let_through, falls, is_told):
    found = course(
        History(AT), range(40), sharp(asked, let_through), lambda step: 2.0 - 2 * falls * step
    )
    choking = [step for step, now in enumerate(found) if ("model", "collapsing", "warning") in now]
    assert bool(choking) == is_told
    if is_told:
        assert choking[0] == BEFORE


@pytest.mark.parametrize(("noise", "is_told"), [(0.02, True), (2.0, False)])
def test_a_gradient_that_scatters_says_nothing_of_choking(noise, is_told):
    rng = np.random.default_rng(0)
    scattered = noise * rng.normal(size=60)

    def seen(step):
        survival = math.exp(scattered[step]) * 0.97 ** max(step - 10, 0)
        return with_gradients(1.01**step, 1.01**step * survival)

    found = course(History(AT), range(60), seen, 2.0)
    assert any(("model", "collapsing", "warning") in now for now in found) == is_told


def test_scores_that_grow_while_the_loss_gets_worse_are_told_before_they_are_sharp():
    def seen(step):
        return heads(*[CALM | {"score_max": 5.0 * 1.05 ** max(step - 60, 0)}] * 4)

    def loss(step):
        return learns(step) if step < 80 else 0.5 + 0.06 * (step - 80)

    history = History(AT)
    found = course(history, range(110), seen, loss)
    assert 80 < first(found) < 100 and found[-1] == [("model", "collapsing", "warning")]
    assert "fold within some 30 steps, and the loss has lost" in history.findings[0].reason
    for calm, harm in ((seen, learns), (heads(*[CALM] * 4), loss)):
        assert first(course(History(AT), range(110), calm, harm)) is None
    history = History(AT)
    found = course(history, range(100), seen, lambda step: 1.0 if 20 < step < 90 else learns(step))
    assert first(found) is None
    course(history, range(100, 110), seen, math.nan)
    assert history.findings[0].reason.endswith("the loss is no number any more")


def test_scores_may_grow_where_less_and_less_is_asked_of_attention():
    def seen(step):
        return sharp(0.99, 0.99, CALM | {"score_max": 10 * 2 ** (step / 20)})(step)

    history = History(AT)
    course(history, range(120), seen, lambda step: 2.0 if step < 10 else 1.8)
    assert {finding.level for finding in history.findings} == {"info"}
    assert history.findings[0].benign == "less and less is asked of attention"
    course(history, range(120, 160), seen, 2.5)
    assert "error" in {finding.level for finding in history.findings}


@pytest.mark.parametrize(("at_first", "is_told"), [(2.0, False), (4.0, True)])
def test_only_what_was_gained_can_be_lost(at_first, is_told):
    """Heads turn sharp with a loss that rises, and the model turns away from them."""

    def loss(step):
        return at_first if step < 10 else 2.0 if step < 50 else 3.0

    seen = sharp(0.97, 1.0, lambda step: SHARP if step >= 50 else CALM)
    found = course(History(AT), range(90), seen, loss)
    assert any(found) == is_told


@pytest.mark.parametrize(
    ("asked", "level"),
    [(1.001, "info"), (0.99, "info"), (1.01, "warning")],
)
def test_a_flat_model_is_told_if_more_is_asked_of_it_than_at_the_start(asked, level):
    found = course(History(AT), range(200), flat(asked), loss=2.0)
    steps = [step for step, now in enumerate(found) if now == [("model", "flat", level)]]
    assert steps == list(range(int(AT.flat_patience), 200))


def test_a_flat_model_that_begins_to_learn_is_told_when_it_stops():
    def loss(step):  # it falls by a third, until step 140
        return 2.0 - 0.01 * min(max(step - 70, 0), 70)

    found = course(History(AT), range(300), flat(1.01), loss)
    told = [step for step, now in enumerate(found) if ("model", "flat", "warning") in now]
    assert 150 < told[0] < 200


@pytest.mark.parametrize(("falls", "is_told"), [(0.005, True), (0.015, False)])
def test_a_flat_model_whose_loss_creeps_is_not_told(falls, is_told):
    found = course(History(AT), range(250), flat(1.01), lambda t: 2.0 * (1 - falls * t / 10))
    assert (("model", "flat", "warning") in found[-1]) == is_told


def test_a_model_that_was_not_flat_for_a_while_begins_anew():
    def seen(step):
        return flat(1.01)(step) if step != 100 else heads(*[CALM] * 4)

    assert first(course(History(AT), range(300), seen, 2.0)) == 101 + AT.flat_patience


def flat(asked):
    """Flat heads, under a scale too small, whose gradient changes by a factor a step."""

    def seen(step):
        evidence = sharp(asked, 1.0, {"entropy_ratio": 0.99})(step).evidence
        return Heads(replace(evidence, scales={"a": in_use(1 / 64, 64)}), AT)

    return seen


@pytest.mark.parametrize("every", [1, 10])
def test_a_loss_that_falls_slowly_stands_still_and_a_quick_one_does_not(every):
    steps = range(0, 140, every)
    seen = heads(*[SHARP] * 4)
    assert first(course(History(AT), steps, seen, lambda step: 4.0 - 0.02 * step)) is None
    assert first(course(History(AT), steps, seen, lambda step: 4.0 - 0.002 * step)) is not None


def test_scores_may_be_large_while_the_loss_falls():
    def falls(step):
        return 4.0 - 0.03 * step

    history, large = History(AT), heads({"score_max": 2e3}, {})
    course(history, range(20), heads({}, {}), falls)
    assert course(history, range(20, 60), large, falls)[-1] == [("head", "exploding", "info")]
    assert history.findings[0].benign == "the loss is falling all the same"
    assert course(history, range(60, 130), large, 2.2)[-1] == [("head", "exploding", "error")]
    # Once told, it is not over because the loss falls for a moment.
    assert course(history, range(130, 140), large, 1.9)[-1] == [("head", "exploding", "error")]


def test_what_was_told_is_not_over_at_a_mere_sign_of_learning():
    history, stuck, growing = History(AT), sharp(1.0, 0.99), sharp(1.02, 1.02)
    found = course(history, range(120), stuck, lambda step: 2.0 if step < 10 else 1.8)
    assert found[-1] == [("model", "saturated", "warning")]
    assert all(course(history, range(120, 180), lambda step: growing(step - 120), 1.7))


def test_sharp_after_learning_is_what_learning_made():
    assert first(course(History(AT), range(300), turns, learns)) is None


def test_sharp_without_learning_is_told_when_it_happens():
    history = History(AT)
    found = course(
        history, range(160), lambda step: turns(step - 60), lambda step: 4.0 - 0.01 * min(step, 105)
    )
    assert 120 + AT.patience <= first(found) <= 130 + AT.patience
    assert found[first(found)] == [("model", "saturated", "warning")]
    assert history.findings[0].since == first(found) - AT.patience


def test_sharp_where_nothing_was_left_to_learn_is_told_only_when_the_loss_suffers():
    def late(step):
        return turns(step - 140)  # sharp from step 200 on

    assert first(course(History(AT), range(400), late, 2.0)) is None
    found = course(History(AT), range(400), late, lambda step: 2.0 if step < 250 else 2.5)
    assert 250 <= first(found) < 270


def test_collapse_with_a_loss_that_is_lost_again():
    def loss(step):
        return learns(step) if step < 60 else 3.0

    history = History(AT)
    found = course(history, range(100), turns, loss)
    assert 60 <= first(found) <= 64 + AT.patience
    assert found[first(found)] == [("model", "collapsing", "warning")]


def test_half_of_the_heads_are_needed_or_a_whole_layer():
    some = heads(a=[SHARP, CALM], b=[CALM, CALM], c=[CALM, CALM])
    assert first(course(History(AT), range(130), some, 2.0)) is None
    layer = heads(a=[CALM, CALM], b=[SHARP, SHARP], c=[CALM, CALM])
    history = History(AT)
    assert course(history, range(130), layer, 2.0)[-1] == [("layer", "saturated", "warning")]
    assert history.findings[0].layer == "b"


def test_sharp_heads_with_a_benign_pattern_do_not_count():
    excused = SHARP | {"previous_weight": 0.9}
    assert first(course(History(AT), range(130), heads(*[excused] * 4), 2.0)) is None


def test_without_a_loss_only_what_was_so_from_the_start_is_told():
    found = course(History(AT), range(50), heads(*[SHARP] * 4))
    assert found[-1] == [("model", "saturated", "warning")]
    assert first(course(History(AT), range(150), turns)) is None


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, None])
def test_a_loss_that_is_no_number_is_no_loss(loss):
    found = course(History(AT), range(50), heads(*[SHARP] * 4), loss)
    assert found[-1] == [("model", "saturated", "warning")]


def test_a_loss_that_fell_while_it_was_logged_excuses_nothing_for_ever():
    def falls(step):
        return 4.0 - 0.02 * step if step < 30 else None

    found = course(History(AT), range(200), heads(*[SHARP] * 4), falls)
    assert 130 <= first(found) <= 131 + AT.patience
    assert found[-1] == [("model", "saturated", "warning")]


def test_a_model_that_does_not_train_is_not_judged_by_its_learning():
    assert first(course(History(AT, trains=False), range(50), heads(*[SHARP] * 4))) is None
    exploding = heads({"score_max": 2e3})
    assert course(History(AT, trains=False), [0], exploding) == [[("head", "exploding", "error")]]


def test_what_is_over_is_forgotten_after_the_patience():
    history = History(AT)
    course(history, range(130), heads(*[SHARP] * 4), 2.0)
    found = course(history, range(130, 160), heads(*[CALM] * 4), 2.0)
    assert [bool(now) for now in found] == [True] * 9 + [False] * 21
    # Whatever else is found meanwhile.
    history = History(AT)
    course(history, range(130), heads(*[SHARP] * 4), 2.0)
    found = course(history, range(130, 160), heads({"score_max": 2e3}, *[CALM] * 3), 2.0)
    assert [len(now) for now in found] == [2] * 9 + [1] * 21


# ---------------------------------------------------------------- odd runs


def test_gaps_between_steps():
    found = course(History(AT), [0, 1, 2, 500, 501, 10_000], heads(*[SHARP] * 4), 2.0)
    assert first(found) == 5


def test_a_run_that_goes_back_to_a_checkpoint():
    sick, well = heads(*[SHARP] * 4), heads(*[CALM] * 4)
    history = History(AT)
    course(history, range(1000, 1130), sick, 2.0)
    assert history.findings
    found = course(history, range(500, 530), well, 1.0)
    assert not found[-1] and first(found[::-1]) >= 15  # it ends as soon as elsewhere
    found = course(history, range(100, 130), sick, 2.0)
    assert found[-1] and first(found) <= AT.patience
    assert history.findings[0].since == 100 + first(found)


def test_a_step_that_comes_twice():
    found = course(History(AT), [5] * 130, heads(*[SHARP] * 4), 2.0)
    assert found[-1] == [("model", "saturated", "warning")]


def test_heads_and_layers_may_change():
    history = History(AT)
    models = [
        heads(a=[CALM] * 2),
        heads(a=[CALM] * 3, b=[SHARP]),
        heads(b=[CALM] * 4),
        heads(c=[{"nonfinite_rows": 1}, {"widest_row": 3}]),
        heads(a=[{"score_max": 500.0}] * 2, b=[CALM], d=[{"choice_rows": 0, "widest_row": 1}]),
        Heads(Evidence({}, course=()), AT),
    ]
    for step in range(120):
        history.observe(step, models[step % len(models)], 2.0)
    assert {finding.name for finding in history.findings} == {"nonfinite"}


def test_the_last_layer_to_grow_is_foretold_though_another_joins():
    def seen(step):
        return heads(
            a=[{"score_max": 10 * 2 ** (step / 10)}], **({"b": [CALM]} if step > 40 else {})
        )

    history = History(AT)
    course(history, range(60), seen, 2.0)
    assert [(each.layer, each.name) for each in history.findings] == [("a", "exploding")]


def test_a_long_run_takes_no_more_memory_than_a_short_one():
    """The state, down to its last object."""
    history = History(AT)
    sick, well = heads(*[SHARP] * 4, {"score_max": 500.0}), heads(*[CALM] * 4, {"score_max": 2e3})
    sizes = []
    for step in range(100_000):
        history.observe(step, sick if step // 100 % 2 else well, 2.0 + step % 7)
        if step in (1_000, 9_000, 99_000):
            sizes.append(size_of(history, set()))
    assert max(sizes) - min(sizes) < 2_000, sizes


def size_of(thing, seen):
    if id(thing) in seen or isinstance(thing, (type, Thresholds)):
        return 0
    seen.add(id(thing))
    size = sys.getsizeof(thing)
    if isinstance(thing, np.ndarray):
        return size
    parts = [*thing, *thing.values()] if isinstance(thing, dict) else []
    parts += [*thing] if isinstance(thing, (list, tuple)) else []
    parts += vars(thing).values() if hasattr(thing, "__dict__") else []
    return size + sum(size_of(part, seen) for part in parts)
