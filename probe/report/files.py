"""Writing a file so that whoever reads it sees the old one or the new one, never half of one."""

import os
from pathlib import Path


def write(path: str | Path, data: str | bytes) -> Path:
    """Put `data` in the file, text as UTF-8, and make its folder. An OSError leaves what was there."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return target
