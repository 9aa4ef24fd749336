import os
from pathlib import Path

import pytest

from trysquare.files import write_whole


def test_the_last_content_wins_and_nothing_is_left_over(tmp_path):
    for content in ("text", b"bytes"):
        write_whole(tmp_path / "file", content)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"bytes"


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_interruption_leaves_the_old_content(tmp_path, monkeypatch, interruption):
    write_whole(tmp_path / "file", "old")

    def interrupt(*_):
        raise interruption

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(type(interruption)):
        write_whole(tmp_path / "file", "new")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_folder_that_turns_read_only_meanwhile(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(OSError, match=r"cannot write .*file: Permission denied; what was there before is untouched"):
        write_whole(tmp_path / "file", "new")
