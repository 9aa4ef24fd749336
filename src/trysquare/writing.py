"""Files that are whole or not there."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: str | os.PathLike[str], content: bytes | str) -> None:
    """Write a file in one step: whoever reads it sees the old or the new content, whatever happens meanwhile.

    Raises:
        OSError: if it cannot be written (disk full, folder read-only); it names the file, which is as it was.
    """
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        _remove(temporary)
        reason = f"cannot write {target}: {error.strerror or error}; what was there before is untouched"
        raise OSError(error.errno, reason) from error
    except BaseException:
        _remove(temporary)
        raise


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:  # a folder that turned read-only keeps it; the first error is the one to tell
        return
