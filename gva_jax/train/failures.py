"""What is told when reading or writing a checkpoint fails: one line, and not what Orbax prints on the way there."""

import contextlib
import gc
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from gva_jax.config import RunError

_LONGEST = 200


@contextlib.contextmanager
def told(message: Callable[[str], str]) -> Iterator[None]:
    """What fails inside raises `RunError(message(reason))`."""
    silence()
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        raise RunError(message(reason(error))) from error


def reason(error: BaseException) -> str:
    """Why something failed, in a line: the system's own words where it has any."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    if code := re.search(r"os_error_code='(\d+)'", text):  # how TensorStore reports what the system said
        return os.strerror(int(code[1]))
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"
    return text or type(error).__name__


def attempt(read: Callable[[], Any]) -> tuple[Any, str | None]:
    """`(read(), None)`, or `(None, reason)` where it fails."""
    silence()
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None  # one array fails: all that are read with it do
    try:
        try:
            return read(), None
        except Exception as error:  # whatever a damaged file leads to
            if "RESOURCE_EXHAUSTED" in str(error):  # no fault of the file
                raise
            why = reason(error)
        gc.collect()
        time.sleep(0.1)  # until the last of them has failed
        return None, why
    finally:
        sys.unraisablehook = hook


def silence() -> None:
    """Keep Orbax from printing tracebacks of what it also raises."""
    logging.getLogger("absl").addFilter(_not_of_orbax)
    if not isinstance(sys.unraisablehook, _OfOthers):
        sys.unraisablehook = _OfOthers(sys.unraisablehook)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


class _OfOthers:
    """When one write of several fails, Orbax ends their event loop, and the others find nobody to tell."""

    def __init__(self, hook):
        self._hook = hook

    def __call__(self, unraisable):
        if str(unraisable.exc_value) != "Event loop is closed":
            self._hook(unraisable)
