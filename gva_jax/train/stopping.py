"""A polite end: SIGINT and SIGTERM finish the running step and save; a second one ends at once.

With several processes a signal may reach one of them, or all at different steps, and all must stop after the same one.
So each brings its signal to a collective at every step, which is read one step later: see `distributed.Largest`.
"""

import signal
import threading
import time

from jax.sharding import Mesh

from gva_jax import distributed

# Launchers deliver a signal to a process and to its group: what comes within so many seconds is the same request.
_SAME = 1.0


class Interrupted(KeyboardInterrupt):
    """Work was broken off by the signal `signum`. `at_once`: without waiting for what is written in the background."""

    def __init__(self, signum: int, at_once: bool):
        super().__init__(signum)
        self.signum, self.at_once = int(signum), at_once


class StopRequest:
    """Context manager that listens to SIGINT and SIGTERM.

    Until `defer` is called a signal raises `Interrupted`: nothing has been done yet that is not found again. From then
    on the first is remembered in `signum`, for the work to ask between its pieces, and the second raises.

    Python hears of a signal between two of its own instructions, so a compilation that is running comes to its end.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.signum: int | None = None
        self._asked: int | None = None
        self._asked_at, self._deferred = 0.0, False
        self._largest = self._votes = None
        self._previous = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # elsewhere (notebooks' workers) Python allows none
            self._previous = {s: signal.signal(s, self._ask) for s in self.SIGNALS}
        return self

    def __exit__(self, *_):
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def defer(self, mesh: Mesh | None = None) -> None:
        """From here on a signal waits until it is asked for, and the processes of `mesh`, if given, agree on it."""
        self._deferred = True
        if mesh is not None and distributed.many():
            self._largest = distributed.Largest(mesh)

    def requested(self) -> bool:
        """Whether to stop; to be asked between steps and between batches of an evaluation."""
        return self.signum is not None

    def dispatched(self) -> None:
        """A step has been dispatched; with several processes, `signum` is now what they had heard at the one before."""
        if self._largest is not None:
            before, self._votes = self._votes, self._largest(self._asked or 0)
            self.signum = self.signum or (None if before is None else int(before) or None)

    def _ask(self, signum, _frame):
        if not self._deferred:
            raise Interrupted(signum, at_once=False)
        if self._asked is None:
            self._asked, self._asked_at = int(signum), time.monotonic()
            if self._largest is None:
                self.signum = self._asked
        elif time.monotonic() - self._asked_at > _SAME:
            raise Interrupted(signum, at_once=True)
