"""Execute the notebooks of this folder and keep what they show in them.

    python examples/execute.py            # after a change of a notebook, or of what it shows
    python examples/execute.py --out DIR  # writes them to DIR and leaves them here as they are

Needs nbclient and ipykernel. A notebook runs in an empty folder, which is removed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

HERE = Path(__file__).parent


def execute(notebook: Path, out: Path) -> None:
    """Run all its cells, and write it with nothing in it that depends on machine or moment."""
    content = nbformat.read(notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        sockets = {"transport": "ipc", "ip": f"{folder}/kernel"}  # files: no port is opened
        client = NotebookClient(
            content,
            kernel_name="python3",
            config=Config(KernelManager=sockets),
            timeout=300,
            record_timing=False,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    content.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    nbformat.write(content, out / notebook.name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=HERE, help="where to; in place by default")
    folder = parser.parse_args().out
    for path in sorted(HERE.glob("*.ipynb")):
        print(f"executing {path.name}")
        execute(path, folder)
