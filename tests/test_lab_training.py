"""The experiments that train: text, model, training, and what becomes of the figures."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch

from levelhead import lab
from levelhead.lab import _corpus, _run
from levelhead.lab._checkpoints import checkpoints
from levelhead.lab._corpus import GUESSING, LENGTH, WORDS, stories
from levelhead.lab._figures import plain
from levelhead.lab._train import KNOWS_NOTHING, Budget, train
from levelhead.lab._transformer import Attention, LanguageModel, Shape

NAMES = ("training", "growth")
SHORT = Budget(steps=3, every=1)


def sentences(words):
    return [" ".join(WORDS[number] for number in story) for story in words]


# ---------------------------------------------------------------- the text


def test_answers_are_words_of_the_sentence_and_of_the_kind_asked_for():
    words, answers = stories(200, seed=0)
    assert words.shape == answers.shape == (200, LENGTH)
    kinds = {"who": _corpus.NAMES, "what": _corpus.THINGS, "where": _corpus.PLACES}
    places = set()
    for text in sentences(words):
        sentence, *asked = text.removesuffix(" .").split(" . ")
        told = sentence.split()
        for question in asked:
            kind, mark, answer = question.split()
            assert mark == "?" and answer in kinds[kind] and told.count(answer) == 1
            places.add((kind, told.index(answer)))
        assert {question.split()[0] for question in asked} == set(kinds)
    assert len(places) == 6  # two for each kind: a position alone says nothing
    assert answers.sum(axis=1).tolist() == [3] * 200
    assert pytest.approx(np.log(6)) == GUESSING


def test_stories_follow_the_seed_and_are_not_the_ones_held_out():
    assert (stories(50, [3, 0])[0] == stories(50, [3, 0])[0]).all()
    training, held_out = (set(sentences(stories(100, [3, part])[0])) for part in (0, 1))
    assert len(training) > 95 and len(training & held_out) < 5


# ---------------------------------------------------------------- the model


def test_no_word_sees_a_later_one():
    torch.manual_seed(0)
    model = LanguageModel(Shape(d_k=8, width=16), len(WORDS), LENGTH)
    text = torch.from_numpy(stories(2, seed=0)[0])
    other = text.clone()
    other[:, 12:] = 1
    assert torch.equal(model(text)[:, :12], model(other)[:, :12])
    assert not torch.equal(model(text)[:, 12:], model(other)[:, 12:])


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_layer_norm_stands_where_it_is_said(norm):
    torch.manual_seed(0)
    block = LanguageModel(Shape(d_k=8, width=16, norm=norm), 9, 4).blocks[0]
    x = 5 * torch.randn(3, 4, 16)
    mean = block(x).mean(-1).abs().max()
    assert (mean < 1e-5) == (norm == "post")
    longer = block(10 * x) / block(x)
    assert (longer.std() > 1) == (norm == "none") or norm == "pre"


@pytest.mark.parametrize(
    ("weights", "variance"), [("unit", 1.0), ("linear", 1 / 3), ("small", 256 * 0.02**2)]
)
def test_queries_begin_with_the_variance_of_their_weights(weights, variance):
    torch.manual_seed(0)
    layer = Attention(Shape(d_k=64, width=256, weights=weights))
    x = torch.randn(500, 256)
    for projection in (layer.query, layer.key):
        assert float(projection(x).detach().var()) == pytest.approx(variance, rel=0.1)


def test_clipping_shrinks_the_scores_of_loud_heads_alone():
    torch.manual_seed(0)
    layer = Attention(Shape(d_k=4, heads=3, width=8))
    x = torch.randn(5, 8)

    def scores():
        query, key = ((x @ p.weight.T).view(5, 3, 4) for p in (layer.query, layer.key))
        return torch.einsum("qhd,khd->hqk", query, key)

    before = scores()
    layer.clip(torch.tensor([10.0, 40.0, 80.0], dtype=torch.float64), limit=20.0)
    expected = before * torch.tensor([1.0, 0.5, 0.25])[:, None, None]
    torch.testing.assert_close(scores(), expected)


# ---------------------------------------------------------------- the training


def test_the_same_seed_gives_the_same_training_and_leaves_the_generator_alone():
    state = torch.random.get_rng_state()
    threads = torch.get_num_threads()
    first, again, other = (train(SHORT, seed, rate=1e-2, d_k=8) for seed in (0, 0, 1))
    assert (first.loss == again.loss).all() and first.unseen == again.unseen
    assert [*first.heads()] == [*again.heads()]
    assert (first.loss != other.loss).all()
    assert torch.equal(torch.random.get_rng_state(), state) and torch.get_num_threads() == threads


def test_scales_differ_in_nothing_but_the_scale():
    # At d_k = 1 three rules are the same number; the runs must then be the same to the bit.
    root, none, dk, dmodel = (
        train(SHORT, 0, rate=1e-2, rule=rule, d_k=1)
        for rule in ("sqrt_dk", "none", "dk", "sqrt_dmodel")
    )
    assert (root.loss == none.loss).all() and (root.loss == dk.loss).all()
    assert (root.loss != dmodel.loss).any()


def test_the_watch_sees_every_head_and_the_scale():
    runs = {
        rule: [*train(Budget(2, every=1), 0, rate=1e-3, rule=rule, d_k=256, width=64).heads()]
        for rule in ("sqrt_dk", "none")
    }
    for rows in runs.values():
        assert [(row["step"], row["layer"], row["head"]) for row in rows] == [
            (step, layer, head) for step in (0, 1) for layer in (0, 1) for head in (0, 1)
        ]
    scaled, raw = (
        {name: np.mean([row[name] for row in rows]) for name in rows[0]} for rows in runs.values()
    )
    assert scaled["score_std"] == pytest.approx(1, rel=0.2)
    assert raw["score_std"] == pytest.approx(16 * scaled["score_std"], rel=0.1)
    assert raw["saturated"] > 0.4 and scaled["saturated"] < 0.05
    assert raw["survival"] < scaled["survival"]


def test_models_learn_to_answer_what_they_have_not_read(caplog):
    run = train(Budget(160), 0, rate=5e-3, rule="dk", d_k=16, width=64)
    assert run.unseen < 0.6 * GUESSING < run.answers[0]
    assert len(run.loss) == 160 and len(run.records) == 16
    assert run.seen == pytest.approx(run.unseen, abs=0.3)
    assert not run.broke and not caplog.records


def test_few_stories_are_learned_by_heart():
    run = train(Budget(80, corpus=8), 0, rate=1e-2, d_k=16, width=32)
    assert run.seen < 0.2 < GUESSING < run.unseen


def test_a_model_that_breaks_down_knows_nothing():
    run = train(Budget(4, every=1), 0, rate=1e30, d_k=8, norm="none")
    assert run.broke and run.unseen == run.seen == KNOWS_NOTHING == pytest.approx(np.log(29))
    assert np.isfinite(run.loss).all()


def test_remedies_bound_the_scores():
    def largest(**remedy):
        run = train(Budget(12, every=1), 0, rate=3e-2, d_k=16, width=32, **remedy)
        return max(row["score_max"] for row in run.heads() if row["step"] > 1), run.loss

    bare, loss = largest()
    clipped, _ = largest(clip=2.0)
    normed, _ = largest(qk_norm=True)
    capped, capped_loss = largest(softcap=2.0)
    assert clipped < 0.7 * bare
    assert normed < bare and normed < 4 * 1.6**2  # √d_k, and weights that have moved by 0.6 at most
    assert capped > 2.0 and (capped_loss != loss).all()  # the scores themselves may pass the cap


# ---------------------------------------------------------------- the experiments


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Both, as the lab runs them."""
    out = tmp_path_factory.mktemp("lab")
    run = lab.run(NAMES, out=out, size="tiny", seeds=1)
    return out, {result["experiment"]: result for result in run.results}


@pytest.fixture
def figures(done):
    def load(name):
        path = done[0] / "runs" / "tiny" / f"{name}-0.json"
        return json.loads(path.read_text())["figures"]

    return load


@pytest.mark.parametrize("name", NAMES)
def test_the_same_seed_gives_the_same_figures(figures, name):
    assert plain(lab.experiments()[name].measure("tiny", 0)) == figures(name)


@pytest.mark.parametrize("name", NAMES)
def test_verdict_text_and_pictures(done, figures, name):
    result, one = done[1][name], lab.experiments()[name]
    assert result["verdict"] == "does not hold"  # six steps teach nothing
    assert result["why"].endswith(".") and "nan" not in result["text"]
    assert len(lab.reason(result["why"])) <= 110 and len(result["key_figures"]) >= 3
    assert "{" not in result["text"] and len(result["text"]) > 500
    assert one.seeds["quick"] >= 3 and one.seeds["full"] >= 3
    pictures = one.plot([figures(name), figures(name)])
    json.dumps(pictures, allow_nan=False)
    for picture in pictures:
        for trace in picture["data"]:
            if trace["type" if "type" in trace else "mode"] != "heatmap":
                assert len(trace["x"]) == len(trace["y"]) >= 2, picture["layout"]["title"]


def test_every_scale_meets_every_width_and_rate(figures):
    grid = figures("training")["grid"]
    cells = list(zip(grid["scale"], grid["d_k"], grid["rate"], strict=True))
    assert len(cells) == len(set(cells)) == 4 * 2
    heads = figures("training")["heads"]
    assert set(heads["scale"]) == {"sqrt_dk", "none", "dk", "sqrt_dmodel"}
    assert set(zip(heads["layer"], heads["head"], strict=True)) == {(0, 0), (0, 1), (1, 0), (1, 1)}
    remedies = figures("growth")["remedies"]
    assert remedies["remedy"] == ["none", "QK-norm", "softcap", "QK-clip"]
    assert len(set(remedies["answers"])) >= 2


def set_where(table, column, value, **where):
    """A change of one column in the rows that match."""

    def alter(run):
        rows = run[table]
        for row in range(len(rows[column])):
            if all(rows[name][row] == wanted for name, wanted in where.items()):
                rows[column][row] = value

    return alter


BEHIND = set_where("grid", "answers", 3.0, scale="none")
ARRIVED = set_where("grid", "answers", 0.1, scale="sqrt_dk")
NARROW = set_where("grid", "answers", 0.1, scale="none", d_k=16)
BY_HEART = set_where("few_stories", "seen", 0.0)
WORSE = [
    BY_HEART,
    set_where("few_stories", "unseen", 3.0, scale="none"),
    set_where("few_stories", "unseen", 0.1, scale="sqrt_dk"),
]
ALTERED = [
    ("training", "holds", [BEHIND, ARRIVED, *WORSE]),
    ("training", "holds partly", [BEHIND, ARRIVED]),
    ("training", "holds partly", [BEHIND, ARRIVED, NARROW, *WORSE]),
    ("training", "holds partly", WORSE),
    (
        "growth",
        "holds",
        [
            set_where("rates", "last_score_std", 5.0, rate=0.005),
            set_where("rates", "last_score_std", 9.0, rate=0.015),
        ],
    ),
    ("growth", "holds partly", [set_where("rates", "last_score_std", 5.0)]),  # no more if faster
    ("growth", "holds partly", [set_where("rates", "last_score_std", 5.0, rate=0.015)]),
]


@pytest.mark.parametrize(("name", "expected", "changes"), ALTERED)
def test_altered_figures_alter_the_verdict(figures, name, expected, changes, monkeypatch):
    one = lab.experiments()[name]
    monkeypatch.setattr(one.module, "train", None)  # a verdict measures nothing
    run = figures(name)
    before = copy.deepcopy(run)
    for change in changes:
        change(run)
    verdict, why = one.verdict([run, copy.deepcopy(run)])
    assert verdict == expected != one.verdict([before, before])[0], why


def test_a_scale_is_judged_at_its_best_rate(figures):
    """One learning rate at which the unscaled model keeps up is enough."""
    one, run = lab.experiments()["training"], figures("training")
    for change in (BEHIND, ARRIVED, *WORSE):
        change(run)
    assert one.verdict([run])[0] == "holds"
    grid = run["grid"]
    for column, values in grid.items():  # every cell at a second rate
        grid[column] = [*values, *([1e-3] * len(values) if column == "rate" else values)]
    assert one.verdict([run])[0] == "holds"
    set_where("grid", "answers", 0.1, scale="none", rate=1e-3)(run)
    assert one.verdict([run])[0] == "holds partly"


@pytest.mark.parametrize(
    ("name", "size", "count"),
    [
        *[("training", "quick", 24), ("training", "full", 118)],
        *[("growth", "quick", 7), ("growth", "full", 13)],
    ],
)
def test_every_setting_is_trained_once_and_told(monkeypatch, name, size, count):
    one, settings = lab.experiments()[name], []

    def note(budget, seed, **setting):
        settings.append((budget, seed, *sorted(setting.items())))
        return dataclasses.replace(small, answers=np.ones(budget.steps))

    small = train(SHORT, 7, rate=1e-3, d_k=4, width=8)
    monkeypatch.setattr(one.module, "train", note)
    run = plain(one.measure(size, 7))
    assert len(settings) == len(set(settings)) == count == one.pieces[size]
    assert {seed for _, seed, *_ in settings} == {7}
    told = " ".join(text.format(**one.numbers([run])) for text in (one.done, one.found, one.limits))
    assert "nan" not in told and one.verdict([run])[0] == "does not hold"
    json.dumps(one.plot([run]), allow_nan=False)


def test_an_interrupted_seed_goes_on_with_the_models_it_has(monkeypatch, tmp_path):
    """Also the figures are those of a run that was never interrupted."""
    one, out = lab.experiments()["growth"], tmp_path / "out"
    monkeypatch.setitem(one.pieces, "tiny", 6)
    pieces = out / "runs" / "tiny" / "growth-0"
    original, calls, told = one.module.train, [], []

    def train(*given, **options):
        calls.append(options)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*given, **options)

    def go(folder, **options):
        lab.run(["growth"], out=folder, size="tiny", seeds=1, progress=told.append, **options)
        return (folder / "runs" / "tiny" / "growth-0.json").read_bytes()

    monkeypatch.setattr(one.module, "train", train)
    with pytest.raises(KeyboardInterrupt):
        go(out)
    assert one.module.train is train  # put back
    assert len(list(pieces.iterdir())) == 3
    assert [p.done for p in told] == pytest.approx([0, 1 / 6, 2 / 6, 3 / 6])
    next(pieces.iterdir()).write_text("{")  # damaged: trained anew

    told.clear()
    resumed = go(out)
    assert len(calls) == 4 + 1 + 3 and not pieces.exists()
    assert [p.done for p in told][-2:] == [1, 1] and len(told) == 1 + 6 + 1
    monkeypatch.delitem(one.pieces, "tiny")
    assert go(tmp_path / "other") == resumed and len(calls) == 8 + 6


def test_traces_stay_and_serve_another_version_of_what_is_measured_on_them(monkeypatch, tmp_path):
    one, calls, original = lab.experiments()["growth"], [], lab.experiments()["growth"].module.train

    def train(*given, **options):
        calls.append(options)
        return original(*given, **options)

    def go(version, traces, **options):
        now = dataclasses.replace(one, version=version, traces=traces, pieces={"tiny": 6})
        monkeypatch.setattr(_run, "find", lambda names: [now])
        lab.run(["growth"], out=tmp_path, size="tiny", seeds=1, **options)
        return len(calls)

    monkeypatch.setattr(one.module, "train", train)
    assert [go(1, 1), go(2, 1), go(3, 2), go(3, 2, again=True)] == [6, 6, 12, 18]


def test_models_of_another_version_are_trained_again(monkeypatch, tmp_path):
    one, was_there = lab.experiments()["growth"], []
    monkeypatch.setattr(one.module, "train", lambda *_, **__: small)
    small = train(SHORT, 0, rate=1e-3, d_k=4, width=8)
    for version in (1, 1, 2):
        now = dataclasses.replace(one, version=version)
        with checkpoints(now, tmp_path / "models", was_there.append):
            kept = one.module.train(SHORT, 0, rate=1e-3)
        assert kept.unseen == small.unseen and (kept.loss == small.loss).all()
    assert was_there == [False, True, False]
