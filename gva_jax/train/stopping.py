"""A polite end: SIGINT and SIGTERM finish the running step and save; a second one ends at once.

With several processes a signal may reach one of them, or all at different steps, and all must stop after the same one.
So each brings its signal to a collective at every step, which is read one step later: see `distributed.Largest`.
"""

import signal
import threading

from jax.sharding import Mesh

from gva_jax import distributed


class StopRequest:
    """Context manager; `signum` is the signal that asked to stop, or None: in all processes of `mesh` the same."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, mesh: Mesh | None = None):
        self.signum: int | None = None
        self._asked: int | None = None
        self._largest = distributed.Largest(mesh) if mesh is not None and distributed.many() else None
        self._votes = None
        self._previous = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # elsewhere (notebooks' workers) Python allows none
            self._previous = {s: signal.signal(s, self._ask) for s in self.SIGNALS}
        return self

    def __exit__(self, *_):
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def dispatched(self) -> None:
        """A step has been dispatched; with several processes, `signum` is now what they had heard at the one before."""
        if self._largest is not None:
            before, self._votes = self._votes, self._largest(self._asked or 0)
            self.signum = self.signum or (None if before is None else int(before) or None)

    def _ask(self, signum, _frame):
        if self._asked is not None:
            raise KeyboardInterrupt
        self._asked = signum
        if self._largest is None:
            self.signum = signum
