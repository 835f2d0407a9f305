"""Files on disk: whole or as before, and said before any work if they cannot be written."""

import os
import stat

import pytest

from levelhead._files import OutputError, check_output, write_whole


def test_places_that_cannot_be_written_are_told(tmp_path):
    with pytest.raises(OutputError, match="it is a folder; name a file in it"):
        check_output(tmp_path)
    with pytest.raises(OutputError, match=r"there is no folder .*nowhere; create it first"):
        check_output(tmp_path / "nowhere" / "page.html")
    check_output(tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_whole_or_as_before(tmp_path, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("before")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space")))
    with pytest.raises(OutputError, match=r"cannot write .*: No space"):
        write_whole(path, "after")
    assert path.read_text() == "before"
    monkeypatch.undo()
    write_whole(path, "after, with é")
    assert path.read_text(encoding="utf-8") == "after, with é"
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask
