"""The scale rules."""

import numpy as np
import pytest

import levelhead as lh
from levelhead.scaling import SCALE_RULES, dk, none, scale_rule, sqrt_dk, sqrt_dmodel


def test_the_rules_have_a_module_of_their_own():
    assert lh.scaling.dk is dk
    for name in ("SCALE_RULES", "scale_rule", *SCALE_RULES):
        assert hasattr(lh.scaling, name)
        assert not hasattr(lh, name)


def test_factors_by_hand():
    assert sqrt_dk(64) == 0.125
    assert none(64) == 1.0
    assert dk(64) == 1 / 64
    assert sqrt_dmodel(64, 1024) == 1 / 32


def test_sqrt_dk_gives_unit_variance():
    q, k = np.random.default_rng(0).standard_normal((2, 20_000, 96))
    scores = sqrt_dk(96) * (q * k).sum(axis=-1)
    assert scores.var() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("name", SCALE_RULES)
def test_every_rule_is_found_by_name_and_takes_both_dimensions(name):
    rule = scale_rule(name)
    assert rule is SCALE_RULES[name]
    assert rule(16, 256) > 0


def test_unknown_name_lists_the_rules():
    with pytest.raises(
        ValueError, match=r"must be one of sqrt_dk, none, dk, sqrt_dmodel; got 'sqrt'"
    ):
        scale_rule("sqrt")


def test_sqrt_dmodel_needs_the_model():
    with pytest.raises(ValueError, match="d_model is needed by the scale rule 'sqrt_dmodel'"):
        sqrt_dmodel(64)


@pytest.mark.parametrize("rule", [sqrt_dk, dk])
def test_empty_head_is_refused(rule):
    with pytest.raises(ValueError, match="d_k must be at least 1, got 0"):
        rule(0)
