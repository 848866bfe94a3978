"""What a person sees while work goes on: live bars in a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Task:
    """One piece of long work. `advance` may be called as often as one likes: output is rate-limited."""

    def __init__(self, title: str, total: int | None, start: int, every: float, progress: Progress | None, say):
        self.title, self.total, self.done = title, total, start
        self.lines = True  # where there is no bar; not for a caller that says lines of its own
        self._every, self._say, self._progress = every, say, progress
        self._last, self._first = 0.0, None  # first: when the first unit was done, compilation included, and how many
        self._id = None if progress is None else progress.add_task(title, total=total, completed=start, figures="")

    def advance(self, count: int = 1, figures: str = "") -> None:
        """`count` more units are done; `figures` (loss, tokens/s, ...) stand beside the count."""
        self.done += count
        now = time.monotonic()
        self._first = self._first or (now, self.done)
        if self._progress is not None:
            self._progress.update(self._id, advance=count, figures=figures)
        elif self.lines and (now - self._last >= self._every or self.done == self.total):
            self._last = now
            self._say("  ".join(filter(None, [self._count(), figures, self.left()])))

    def _count(self) -> str:
        return f"{self.title} {self.done:,}" + (f"/{self.total:,}" if self.total else "")

    def left(self) -> str:
        """The time that the rest takes at the mean pace so far, without the first unit; "" while that is not known."""
        began, done = self._first or (0, self.done)
        if not self.total or self.done == done:
            return ""
        seconds = round((time.monotonic() - began) / (self.done - done) * (self.total - self.done))
        hours, minutes, seconds = seconds // 3600, seconds // 60 % 60, seconds % 60
        return f"{hours}:{minutes:02d}:{seconds:02d} left" if hours else f"{minutes}:{seconds:02d} left"


class Display:
    """Lines for a person, on standard output unless told otherwise. `quiet` says nothing (other processes, tests)."""

    def __init__(self, quiet: bool = False, every: float = 5.0, console: Console | None = None):
        self._quiet, self._every = quiet, every
        self._console = console or Console(file=sys.stdout, highlight=False, soft_wrap=True)

    def say(self, text: str = "") -> None:
        """One line (or a block) of plain text, printed above any live bar."""
        if not self._quiet:
            self._console.print(text, markup=False)

    def show(self, renderable) -> None:
        """A rich table or panel."""
        if not self._quiet:
            self._console.print(renderable)

    @property
    def live(self) -> bool:
        """Whether a person watches in a terminal."""
        return self._console.is_terminal and not self._quiet

    @contextlib.contextmanager
    def task(self, title: str, total: int | None = None, start: int = 0) -> Iterator[Task]:
        """Long work of `total` units, of which `start` are already done. Lines said meanwhile stand above the bar."""
        if not self.live:
            yield Task(title, total, start, self._every, None, self.say)
            return
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
                   TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), TimeRemainingColumn(compact=True)]
        with Progress(*columns, console=self._console, transient=False) as progress:
            yield Task(title, total, start, self._every, progress, self.say)
