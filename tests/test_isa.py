"""The builds for other instruction sets: chosen by name, and in agreement."""

import os
import subprocess
import sys

import numpy as np
import pytest

import levelhead as lh

SCRIPT = """
import sys
import numpy as np
import levelhead as lh

found = {"isa": lh.cpu_info()["isa"], "bits": lh.cpu_info()["vector_bits"]}
shapes = [(1, 1, 1, 1), (4, 3, 700, 40), (4, 1, 1300, 64), (2, 17, 25, 59), (2, 60, 203, 80)]
for dtype in ("float32", "float64", "float16"):
    for n, (heads, length, size, d) in enumerate(shapes):
        rng = np.random.default_rng(n)
        q = rng.standard_normal((2, heads, length, d)).astype(dtype)
        k, v = rng.standard_normal((2, 2, max(1, heads // 2), size, d)).astype(dtype)
        for name, options in {
            "plain": {},
            "causal": {"causal": True, "sinks": np.linspace(-1, 1, heads)},
            "mask": {"mask": rng.random((length, size)) > 0.3, "softcap": 5.0},
        }.items():
            r = lh.attention(q, k, v, return_lse=True, return_health=True, **options)
            g = lh.attention_backward(r.output, q, k, v, r.output, r.lse, **options)
            label = f"{dtype} {n} {name} "
            found |= {label + "output": r.output, label + "lse": r.lse}
            found |= {label + "entropy": r.health.entropy, label + "signal": r.health.signal}
            found |= {label + "dq": g.dq, label + "dk": g.dk, label + "dv": g.dv}
np.savez(sys.argv[1], **found)
"""


def run(code, isa, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"LEVELHEAD_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )


def outputs(isa, folder):
    path = folder / f"{isa or 'default'}.npz"
    done = run(SCRIPT, isa, str(path))
    assert done.returncode == 0, done.stderr
    with np.load(path) as file:
        return dict(file)


def test_cpu_info():
    info = lh.cpu_info()
    assert set(info) == {"isa", "vector_bits", "threads"}
    assert (info["isa"], info["vector_bits"]) in {("avx2", 256), ("portable", 128)}
    assert info["threads"] >= 1


def test_the_builds_are_chosen_by_name_and_agree(tmp_path):
    default, portable = outputs("", tmp_path), outputs("portable", tmp_path)
    assert (portable.pop("isa"), portable.pop("bits")) == ("portable", 128)
    best = str(default.pop("isa"))
    assert int(default.pop("bits")) == {"avx2": 256, "portable": 128}[best]
    assert default.keys() == portable.keys()
    differ = False
    for name, ours in default.items():
        theirs = portable[name]
        tolerance = {"float64": 1e-12, "float32": 1e-5, "float16": 4e-3}[name.split()[0]]
        size = max(1.0, float(np.abs(theirs.astype(np.float64)).max()))
        np.testing.assert_allclose(
            ours.astype(np.float64), theirs, rtol=0, atol=tolerance * size, err_msg=name
        )
        differ |= ours.tobytes() != theirs.tobytes()
    assert differ or best == "portable", "two builds that agree in every bit are one build"


@pytest.mark.parametrize("name", ["avx1024", "AVX2", " portable"])
def test_an_unknown_name_is_an_error(name):
    for call in ("cpu_info()", "attention(*np.ones((3, 2, 2)))"):
        done = run(f"import numpy as np, levelhead as lh; lh.{call}", name)
        assert done.returncode == 1
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("ValueError: LEVELHEAD_ISA: expected 'portable'")
        assert last.endswith(f"got '{name}'")


def test_a_name_that_this_cpu_runs():
    best = run("import levelhead as lh; print(lh.cpu_info()['isa'])", "").stdout.strip()
    again = run("import levelhead as lh; print(lh.cpu_info()['isa'])", best)
    assert again.stdout.strip() == best
