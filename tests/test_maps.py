"""The map of the code in CONTRIBUTING.md, against the files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def listed():
    """The paths that the map names, and the folders that it goes into."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    block = re.search(r"```\n(csrc/.*?)```", text, re.DOTALL)[1]
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


def test_what_the_map_names_exists():
    paths, _ = listed()
    assert len(paths) > 8 and [path for path in paths if not path.exists()] == []


def test_the_map_names_every_file():
    """Of every folder that it goes into; others stand for what is in them."""
    paths, folders = listed()
    there = {
        path
        for folder in folders
        for path in folder.iterdir()
        if not re.search(r"__pycache__|assets|\.so$", path.name)
    }
    partly = {ROOT / "src/levelhead/lab"}  # it names the folder of the claims only
    missing = {path for path in there - paths if path.parent not in partly}
    assert missing == set()
