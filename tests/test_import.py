"""What `import levelhead` brings: its own names, their examples, and nobody else."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import levelhead

HEAVY = ("torch", "transformers", "plotly", "jax", "ml_dtypes", "typer", "scipy")


def test_import_brings_no_framework():
    code = (
        "import sys, numpy as np, levelhead as lh\n"
        "x = np.ones((2, 3, 4), np.float32)\n"
        "lh.attention(x, x, x, return_health=True).health.verdicts()\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.strip() == "[]"


def test_without_torch_the_import_says_what_to_install():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try: import levelhead.torch\n"
        "except ModuleNotFoundError as error: print(error.name, error)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    said = 'torch levelhead.torch needs PyTorch: pip install "levelhead[torch]"'
    assert run.stdout.strip() == said


def test_all_public_names():
    assert sorted(levelhead.__all__, key=lambda name: (not name.isupper(), name)) == list(
        levelhead.__all__
    )
    for name in levelhead.__all__:
        assert getattr(levelhead, name) is not None
    star: dict[str, object] = {}
    exec("from levelhead import *", star)
    assert set(levelhead.__all__) == set(star) - {"__builtins__"}


def modules():
    parts = {"levelhead": levelhead.__path__, "levelhead._health": levelhead._health.__path__}
    names = [f"{part}.{m.name}" for part, at in parts.items() for m in pkgutil.iter_modules(at)]
    return [name for name in names if name != "levelhead._engine"]


@pytest.mark.parametrize("name", modules())
def test_examples_in_docstrings(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("name", [n for n in levelhead.__all__ if n.islower()])
def test_public_functions_have_an_example(name):
    assert ">>> " in getattr(levelhead, name).__doc__
