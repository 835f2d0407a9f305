"""The experiments that train nothing: tiny sizes, the same bytes, verdicts by the figures."""

import copy
import json
import math
import re

import numpy as np
import pytest

from levelhead import lab
from levelhead.lab._figures import stack

EXPECTED = {
    "five_steps": "holds",
    "variance": "holds",
    "divisor": "holds",
    "head_width": "holds",
    "saturation": "holds partly",
    "jacobian": "holds",
    "gradients": "holds partly",
    "overflow": "holds partly",
    "additive": "holds partly",
    "cosine": "holds partly",
    "depth": "holds partly",
    "pronoun": "does not hold",  # one pair of endings is not enough to tell from chance
    "initialisation": "holds partly",
}
NAMES = list(EXPECTED)


def test_every_experiment_is_tested():
    assert {*EXPECTED, "training", "growth", "verdicts"} == set(lab.experiments())


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """All of them, twice, each into a folder of its own."""
    folders = [tmp_path_factory.mktemp(name) / "out" for name in ("first", "second")]
    runs = [lab.run(NAMES, out=out, size="tiny", seeds=1) for out in folders]
    return folders, {result["experiment"]: result for result in runs[0].results}


@pytest.fixture
def figures(done, request):
    """One seed's figures, as they are kept, and the experiment."""

    def load(name):
        path = done[0][0] / "runs" / "tiny" / f"{name}-0.json"
        return json.loads(path.read_text())["figures"]

    return load


def test_the_same_seeds_give_the_same_bytes(done):
    first, second = (folder / "results.json" for folder in done[0])
    assert first.read_bytes() == second.read_bytes()
    other = lab.run(["variance"], out=done[0][0] / "other", size="tiny", seed=5, seeds=1)
    assert other.results[0]["figures"] != done[1]["variance"]["figures"]


@pytest.mark.parametrize("name", NAMES)
def test_cheap_experiments_take_five_seeds_or_more(name):
    seeds = lab.experiments()[name].seeds
    assert seeds["quick"] >= 5 and seeds["full"] >= 5


@pytest.mark.parametrize("name", NAMES)
def test_verdict_text_and_pictures(done, figures, name):
    result, one = done[1][name], lab.experiments()[name]
    assert result["verdict"] == EXPECTED[name], result["why"]
    assert result["claim"] == one.claim and result["size"] == "tiny" and result["seeds"] == [0]
    assert result["why"].endswith(".")
    assert len(lab.reason(result["why"])) <= 110 and re.search(r"\d", lab.reason(result["why"]))
    assert len(result["key_figures"]) == len(one.key) >= 3
    assert "{" not in result["text"] and "nan" not in result["text"] and len(result["text"]) > 500
    assert "timings" not in result["figures"]
    pictures = one.plot([figures(name)])
    json.dumps(pictures, allow_nan=False)
    for picture in pictures:
        assert picture["layout"]["title"]["text"]
        assert picture["data"]
        for trace in picture["data"]:
            if trace.get("type") != "heatmap":
                assert len(trace["x"]) == len(trace["y"]) >= 2
                assert any(y is not None for y in trace["y"])


# ---------------------------------------------------------------- figures against theory


def test_variance_is_that_of_the_theory(figures):
    found = figures("variance")
    assert found["independent"]["over_d_k"] == pytest.approx([1.0] * 15, abs=0.1)
    premises = found["premises"]
    rows = zip(premises["premise"], premises["d_k"], premises["over_d_k"], strict=True)
    theory = {
        "entries correlate by 0.3": lambda d: 1 + (d - 1) * 0.3**2,
        "q and k correlate": lambda d: 1.25,
        "mean 1": lambda d: 3.0,
        "variance 4": lambda d: 16.0,
    }
    for premise, d_k, ratio in rows:
        assert ratio == pytest.approx(theory[premise](d_k), rel=0.3), (premise, d_k)


def test_a_lead_is_worth_what_the_softmax_says(figures):
    gaps = figures("saturation")["gaps"]
    for keys, gap, top in zip(gaps["keys"], gaps["gap"], gaps["top_weight"], strict=True):
        assert top == pytest.approx(math.exp(gap) / (math.exp(gap) + keys - 1), rel=1e-5)


def test_the_norm_of_two_keys_is_twice_p_times_1_minus_p(figures):
    two = figures("jacobian")["two_keys"]
    assert two["jacobian_norm"] == pytest.approx([2 * p for p in two["p(1-p)"]], rel=1e-4)


def test_naive_softmax_overflows_where_exp_does(figures):
    naive = stack([figures("overflow")])["naive"]
    unscaled = naive["scale"][0] == "none"
    half, double = (naive["type"][0] == name for name in ("float16", "float64"))
    large = naive["d_k"][0] >= 256
    assert (naive["not_finite"][0][unscaled & half & large] == 1).all()
    assert (naive["not_finite"][0][double] == 0).all()
    assert (naive["not_finite"][0][~unscaled] == 0).all()


def test_additive_scores_keep_their_bound(figures):
    found = figures("additive")
    assert max(found["grown"]["additive_max"]) <= found["bound"]
    assert found["grown"]["dot_max"][-1] > 1000 * found["bound"]
    memory = found["memory_mib"]
    # The hidden layer: length² × width floats, held twice at most.
    hidden = [length**2 * 64 * 4 / 2**20 for length in memory["length"]]
    for measured, least in zip(memory["additive_whole"], hidden, strict=True):
        assert 0.45 * least <= measured <= 3 * least


def test_initialisations_give_their_textbook_variances(figures):
    schemes = figures("initialisation")["schemes"]
    rows = zip(schemes["words"], schemes["weights"], schemes["variance_q"], strict=True)
    theory = {
        "square Xavier": 1,
        "nn.MultiheadAttention": 1 / 2,
        "nn.Linear": 1 / 3,
        "Kaiming for ReLU": 2,
        "normal 0.02": 512 * 0.02**2,
        "T5 without scale": 1 / 64,
    }
    for words, weights, variance in rows:
        if words == "LayerNorm":
            assert variance == pytest.approx(theory[weights], rel=0.1), weights


# ---------------------------------------------------------------- altered figures


def put(*path):
    """A change: the value, or the function of the old values, at a path of names."""
    *names, value = path

    def alter(run):
        for name in names[:-1]:
            run = run[name]
        old = run[names[-1]]
        new = value(old) if callable(value) else value
        run[names[-1]] = [new] * len(old) if isinstance(old, list) and not callable(value) else new

    return alter


def where(table, key, wanted, column, value):
    """A change of one column in the rows whose key is the wanted one."""

    def alter(run):
        rows = run[table]
        rows[column] = [
            value if k == wanted else old for k, old in zip(rows[key], rows[column], strict=True)
        ]

    return alter


def times(factor):
    return lambda values: [factor * value for value in values]


def scaled_stacks(entropy, gradient):
    return [
        where("last_layer", "scale", "sqrt_dk", "lowest_entropy", entropy),
        where("last_layer", "scale", "sqrt_dk", "entropy_ratio", entropy),
        where("last_layer", "scale", "sqrt_dk", "gradient_range_log10", gradient),
    ]


def meaning(**weights):
    """Changes: what every head gives dog and ball where the dog or the ball is meant."""
    return [
        put("it", f"{noun}_if_{meant}", weight)
        for meant, pair in weights.items()
        for noun, weight in zip(("dog", "ball"), pair, strict=True)
    ]


HOLDS, PARTLY, NOT = "holds", "holds partly", "does not hold"
ALTERED = [
    ("five_steps", PARTLY, [put("steps", "shape", lambda shapes: [*shapes[:-1], "3×65"])]),
    ("five_steps", PARTLY, [put("checks", "engine_difference", 0.1)]),
    (
        "five_steps",
        NOT,
        [
            put("steps", "shape", "1×1"),
            *(put("checks", name, 1.0) for name in ("engine_difference", "heads_difference")),
            *(put("checks", name, 0.5) for name in ("head_leak", "same_order")),
        ],
    ),
    ("variance", PARTLY, [where("independent", "d_k", 512, "over_d_k", 2.0)]),
    ("variance", NOT, [put("independent", "over_d_k", 2.0)]),
    ("divisor", PARTLY, [where("scales", "scale", "sqrt_dk", "variance", 3.0)]),
    ("divisor", PARTLY, [where("scales", "scale", "dk", "variance", 3.0)]),
    ("divisor", NOT, [put("scales", "variance", 3.0)]),
    ("head_width", PARTLY, [put("models", "std_sqrt_dmodel", 1.0)]),
    ("head_width", PARTLY, [put("fixed_head", "variance", times(2))]),
    (
        "head_width",
        NOT,
        [
            *(put("models", f"std_{rule}", 5.0) for rule in ("sqrt_dk", "sqrt_dmodel")),
            *(put(name, "variance", times(3)) for name in ("fixed_head", "fixed_model")),
        ],
    ),
    ("saturation", HOLDS, [put("gaps", "top_weight", 0.99)]),
    ("saturation", NOT, [put("softmax", "top_weight", 0.1), put("softmax", "effective_keys", 1.0)]),
    ("jacobian", PARTLY, [put("formula_error", 0.1)]),
    (
        "jacobian",
        NOT,
        [
            put("formula_error", 0.1),
            put("two_keys", "jacobian_norm", 0.5),
            put("rows", "median_survival", 0.5),
        ],
    ),
    ("gradients", HOLDS, [put("one_layer", "median_query", 0.01), put("stacks", "first_W_q", 1.0)]),
    ("gradients", NOT, [put("one_layer", "median_query", 2.0)]),
    ("overflow", HOLDS, [put("naive", "not_finite_shifted", 0.5)]),
    ("overflow", NOT, [put("naive", "not_finite", 0.0)]),
    ("additive", HOLDS, [put("hidden", "top_weight", 0.05)]),
    (
        "additive",
        NOT,
        [put("bound", 0.1), put("timings", "milliseconds", "tanh_one_thread", times(1e-6))],
    ),
    ("cosine", HOLDS, [put("grown", "agreement", 0.99)]),
    ("cosine", NOT, [put("at_start", "agreement", 0.5)]),
    ("depth", HOLDS, scaled_stacks(0.6, 1.0)),
    ("depth", NOT, scaled_stacks(0.01, 9.0)),
    ("pronoun", HOLDS, meaning(dog=(0.3, 0.1), ball=(0.1, 0.3))),
    ("pronoun", PARTLY, meaning(dog=(0.4, 0.1), ball=(0.2, 0.1))),  # leans, but stays with the dog
    ("initialisation", HOLDS, [put("schemes", "score_variance", 1.0)]),
    ("initialisation", NOT, [put("schemes", "score_variance", 5.0)]),
]


def test_it_is_resolved_only_by_more_heads_than_chance_and_in_every_pair(figures):
    """One head that picks the right noun is enough in eight pairs, and chance in one."""
    run, verdict = figures("pronoun"), lab.experiments()["pronoun"].verdict
    for change in meaning(dog=(0.3, 0.1), ball=(0.3, 0.1)):  # the dog, whatever is meant
        change(run)
    assert verdict([run] * 8)[0] == NOT
    right = copy.deepcopy(run)
    right["it"]["dog_if_ball"][5], right["it"]["ball_if_ball"][5] = 0.1, 0.3
    assert verdict([right] * 8)[0] == HOLDS
    assert verdict([right])[0] == NOT
    assert verdict([right] * 7 + [run])[0] == NOT  # in all pairs but one

    leaning = copy.deepcopy(run)
    leaning["it"]["dog_if_ball"][5] = 0.15  # still the dog, but less
    assert verdict([leaning] * 8)[0] == PARTLY
    leaning["it"]["dog_if_dog"][6] = 0.15  # and one that leans the other way
    assert verdict([leaning] * 8)[0] == NOT


@pytest.mark.parametrize(("name", "expected", "changes"), ALTERED)
def test_altered_figures_alter_the_verdict(figures, name, expected, changes):
    run = figures(name)
    before = copy.deepcopy(run)
    for change in changes:
        change(run)
    assert run != before
    verdict, why = lab.experiments()[name].verdict([run, copy.deepcopy(run)])
    assert verdict == expected != lab.experiments()[name].verdict([before, before])[0], why
    assert len(lab.reason(why)) <= 120 and re.search(r"\d", lab.reason(why))


def test_every_verdict_can_turn_both_ways():
    for name, expected in EXPECTED.items():
        turned = {verdict for one, verdict, _ in ALTERED if one == name}
        assert len(turned) == 2 and expected not in turned, name


@pytest.mark.parametrize("name", NAMES)
def test_a_verdict_reads_nothing_but_figures(figures, name, monkeypatch):
    one = lab.experiments()[name]

    def refuse(*_, **__):
        raise AssertionError("a verdict measures nothing")

    for module in ("attention", "health", "normal", "queries_and_keys", "stack_layers", "demo"):
        if hasattr(one.module, module):
            monkeypatch.setattr(one.module, module, refuse)
    monkeypatch.setattr(np.random, "default_rng", refuse)
    assert one.verdict([figures(name)])[0] == EXPECTED[name]


def test_a_slow_clock_changes_nothing_in_the_results(figures):
    run = figures("additive")
    slow = copy.deepcopy(run)
    for column in ("additive", "dot", "engine", "tanh_one_thread", "engine_one_thread"):
        slow["timings"]["milliseconds"][column] = [
            1.7 * ms for ms in slow["timings"]["milliseconds"][column]
        ]
    one = lab.experiments()["additive"]
    assert one.verdict([run]) == one.verdict([slow])
    for text in (one.found, one.limits, one.done):
        assert text.format(**one.numbers([run])) == text.format(**one.numbers([slow]))
    assert one.clock.format(**one.numbers([run])) != one.clock.format(**one.numbers([slow]))
