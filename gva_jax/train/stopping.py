"""A polite end: SIGINT and SIGTERM finish the running step and save; a second one ends at once."""

import signal
import threading


class StopRequest:
    """Context manager; `signum` is the signal that asked to stop, or None."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self):
        self.signum: int | None = None
        self._previous = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # elsewhere (notebooks' workers) Python allows none
            self._previous = {s: signal.signal(s, self._ask) for s in self.SIGNALS}
        return self

    def __exit__(self, *_):
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _ask(self, signum, _frame):
        if self.signum is not None:
            raise KeyboardInterrupt
        self.signum = signum
