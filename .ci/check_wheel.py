"""Install a wheel in an empty environment that sees no compiler, and use it there.

    python .ci/check_wheel.py dist/levelhead-*.whl         # what NumPy's users get
    python .ci/check_wheel.py dist/levelhead-*.whl demo    # and the checkup of the demo model

`make wheel` calls it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "cmake", "ninja", "make")
USE = """
import sys
import numpy as np
import levelhead as lh

assert lh.__file__.startswith(sys.prefix), lh.__file__
q, k, v = np.random.default_rng(0).standard_normal((3, 4, 256, 64), dtype=np.float32)
result = lh.attention(q, k, v, causal=True, return_health=True)
error = abs(result.output - lh.reference(q, k, v, causal=True)).max()
assert error < 1e-5, error
print(f"{lh.cpu_info()['isa']}: {len(result.health.verdicts())} heads, error {error:.0e}")
"""


def environment(bin_folder: Path) -> dict[str, str]:
    """The variables of this process, with a path on which there is nothing but the environment."""
    found = [name for name in COMPILERS if shutil.which(name, path=str(bin_folder))]
    assert not found, f"the environment is not empty: {found}"
    leave = ("PYTHON", "LD_", "LEVELHEAD_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(leave)}
    return {**kept, "PATH": str(bin_folder)}


def main(wheel: str, *extras: str) -> None:
    """Install and use it; the first thing that fails ends the program."""
    file = Path(wheel).resolve()
    tags = file.stem.split("-")[-1]
    assert "manylinux" in tags, f"{file.name}: auditwheel found no manylinux policy for it"
    constraints = Path(__file__).resolve().parents[1] / "constraints.txt"
    with tempfile.TemporaryDirectory() as room:
        env = Path(room) / "env"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
        variables = environment(env / "bin")

        def run(*command: object, **more: str) -> None:
            subprocess.run(command, cwd=room, env={**variables, **more}, check=True)

        what = f"{file}[{','.join(extras)}]" if extras else str(file)
        print(f"installing {Path(what).name} where there is no compiler", flush=True)
        pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq")
        pinned = ("--no-compile", "--only-binary", ":all:", "--constraint", constraints)
        run(*pip, "--python", env / "bin/python", "install", *pinned, what)
        run(env / "bin/python", "-c", USE)
        run(env / "bin/python", "-c", USE, LEVELHEAD_ISA="portable")
        run(env / "bin/levelhead", "--version")
        run(env / "bin/levelhead", "explore", "--out", "page.html", "--no-open")
        if "demo" in extras:
            run(env / "bin/levelhead", "checkup")
    print(f"{file.name}: works without a compiler, on any Linux of {tags} or newer")


if __name__ == "__main__":
    main(*sys.argv[1:])
