"""The scale rules."""

import math

import numpy as np
import pytest

import levelhead as lh
from levelhead.scaling import (
    FORMULAS,
    SCALE_RULES,
    dk,
    in_use,
    none,
    scale_rule,
    sqrt_dk,
    sqrt_dmodel,
)


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


# ---------------------------------------------------------------- the rule in use


@pytest.mark.parametrize("name", SCALE_RULES)
def test_the_rule_in_use_is_named(name):
    scale = SCALE_RULES[name](32, 384)
    used = in_use(scale, 32, 384)
    assert (used.rule, used.scale, used.words) == (name, scale, FORMULAS[name])
    assert used.factor == pytest.approx(scale * 32**0.5)
    assert in_use(float(np.float16(scale)), 32, 384).rule == name  # as 16 bits round it
    assert in_use(scale * 1.0009, 32, 384).rule == name
    assert in_use(scale * 1.002, 32, 384).rule == "other"


@pytest.mark.parametrize(
    ("scale", "d_k", "d_model", "rule"),
    [
        (0.125, 64, 64, "sqrt_dk"),  # one head: d_model is d_k
        (1.0, 1, 8, "sqrt_dk"),
        (1 / 64, 64, 4096, "dk"),  # here 1/√d_model as well
        (1 / 32, 64, None, "other"),  # the width is not known
        (-0.125, 64, 64, "other"),
        (0.0, 64, 64, "other"),
    ],
)
def test_of_rules_that_coincide_the_first_is_named(scale, d_k, d_model, rule):
    assert in_use(scale, d_k, d_model).rule == rule


def test_another_scale_is_told_beside_the_standard():
    assert in_use(0.043, 32, 384).words == "0.043, which is 0.24 of 1/√d_k"
    assert in_use(10, 64, 512).words == "10, which is 80 times 1/√d_k"
    assert in_use(300, 1, 1).words == "300, which is 300 times 1/√d_k"


@pytest.mark.parametrize("scale", [None, math.nan, math.inf])
def test_an_unknown_scale_is_told_as_unknown(scale):
    used = in_use(scale, 32, 384)
    assert (used.rule, used.words) == ("unknown", "not known")
    assert math.isnan(used.factor)
    assert in_use(0.5, 0, 384).rule == "unknown"
