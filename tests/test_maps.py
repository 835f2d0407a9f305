"""The maps of the code in README.md and CONTRIBUTING.md, against the files that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def listed(page):
    """The paths that a page's map names, and the folders that it goes into."""
    block = re.search(r"```\n(csrc/.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)[
        1
    ]
    paths, folders, above = set(), set(), {}
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{2,}(?![\w.]+/)", line.strip())[0].split()
        folder = ROOT.joinpath(*(above[level] for level in range(depth)))
        stem = names[0].rpartition(".")[0]  # "describe.h .cpp" are two files
        paths |= {folder / (stem + name if name.startswith(".") else name) for name in names}
        above[depth] = names[0]
        if depth:
            folders.add(folder)
    return paths, folders


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_what_a_map_names_exists(page):
    paths, _ = listed(page)
    assert len(paths) > 8 and [path for path in paths if not path.exists()] == []


def test_the_full_map_names_every_file():
    """Of every folder that it goes into; others stand for what is in them."""
    paths, folders = listed("CONTRIBUTING.md")
    there = {
        path
        for folder in folders
        for path in folder.iterdir()
        if not re.search(r"__pycache__|assets|\.so$", path.name)
    }
    partly = {ROOT / "src/levelhead/lab"}  # it names the folder of the claims only
    missing = {path for path in there - paths if path.parent not in partly}
    assert missing == set()
