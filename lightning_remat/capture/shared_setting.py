"""Settings of TorchDynamo of which there is one for all threads."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


class SharedSetting:
    """An attribute that has another value while any thread wants that, and its own again after the last one.

    >>> from types import SimpleNamespace
    >>> holder = SimpleNamespace(is_on=False)
    >>> setting = SharedSetting(holder, "is_on", True)
    >>> with setting.wanted():
    ...     with setting.wanted():
    ...         pass
    ...     holder.is_on
    True
    >>> holder.is_on
    False

    Args:
        holder: What has the attribute.
        name: Of the attribute.
        value: That is wanted.
    """

    def __init__(self, holder: Any, name: str, value: object) -> None:
        self._holder, self._name, self._value = holder, name, value
        self._own: object = None
        self._num_wanting = 0
        self._lock = threading.Lock()

    @contextmanager
    def wanted(self) -> Generator[None]:
        """Within the block the attribute has that value."""
        with self._lock:
            if not self._num_wanting:
                self._own = getattr(self._holder, self._name)
                setattr(self._holder, self._name, self._value)
            self._num_wanting += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_wanting -= 1
                if not self._num_wanting:
                    setattr(self._holder, self._name, self._own)
