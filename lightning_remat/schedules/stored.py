"""What is stored as text: read back or refused with one error, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def reading(what: str) -> Generator[None]:
    """Whatever a truncated, empty or foreign text leads to inside is told as one `ValueError`.

    >>> with reading("plan"):
    ...     json.loads('{"planner": ')["schedule"]
    Traceback (most recent call last):
    ValueError: the text is no stored plan: it breaks off or is no JSON at character 12 of 12

    Args:
        what: What the text should hold.
    """
    try:
        yield
    except json.JSONDecodeError as error:
        where = f"breaks off or is no JSON at character {error.pos} of {len(error.doc)}" if error.doc else "is empty"
        raise ValueError(f"the text is no stored {what}: it {where}") from error
    except KeyError as error:
        raise ValueError(f"the text is no stored {what}: it has no {error}") from error
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError(f"the text is no stored {what}: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Writes a file that others see as it was or as it will be, never in between, whatever interrupts this."""
    path = path.resolve()  # where it is a link, what it links to
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            shutil.copymode(path, temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
