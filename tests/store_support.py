"""What the tests of the store share: records, and what is in its file."""

import logging
import sqlite3
from contextlib import closing

import numpy as np

import levelhead as lh
from levelhead._records import Alert, StepRecord

LAYERS = ("layers.0.attn", "layers.1.attn")
HEADS = 3


def record(step, *, layers=LAYERS, gradients=LAYERS, alerts=()):
    """A step whose statistics depend on its number; its first row has no choice."""
    q, k, v, g = np.random.default_rng(step).standard_normal((4, HEADS, 10, 8))
    health, grads = {}, {}
    for place, name in enumerate(layers):
        options = {"scale": (1 + step) * (1 + place), "causal": True, "return_health": True}
        health[name] = lh.reference(q, k, v, **options).health
        if name in gradients:
            grads[name] = lh.reference_backward(g, q, k, v, **options).health
    return StepRecord(step, 1000.0 + step, health, grads, alerts)


def alert(step, value=123.0):
    return Alert(
        *(step, LAYERS[1], 2, "exploding", "warning", "healthy", value),
        *("the largest |score| is 123", "tame the scores"),
    )


def rows(path, query, *values):
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query, values).fetchall()


def messages(caplog):
    assert all((r.name, r.levelno) == ("levelhead", logging.WARNING) for r in caplog.records)
    return [r.getMessage() for r in caplog.records]
