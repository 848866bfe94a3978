"""Notices a process that has stalled and names it, where all others would wait for it for ever.

A collective waits until every process has come to it, so one process that hangs, swaps or has died holds all. Each
process therefore writes how far it has come into the store of `jax.distributed`, every few seconds, from a thread of
its own; and one that has waited for long reads what the others wrote, and ends all with a line that names who is
missing.
"""

import json
import math
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

import jax

from gva_jax import compat, distributed

# The first step (evaluation, save) may take so many times longer: it is compiled.
FIRST = 6
# A process that has not written for so many seconds shows no sign of life; twice that lies below JAX's own limit.
SILENT = 45
# Processes that a message names, at most.
_NAMED = 8

_BEATS = "gva_jax/beats"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Beat:
    """What a process writes: how far it is."""

    # The process, as messages name it.
    name: str
    # How many marks it has come to; all processes come to the same ones.
    reached: int
    # The last of them, in words, seconds ago when this was written, and after how many it counts as stalled.
    what: str
    ago: float
    limit: float
    # Counts what it writes.
    number: int


class Watch:
    """While it is open, no process waits longer than `seconds` for another one to reach the next mark.

    With one process, or `seconds` = 0, it does nothing.
    """

    def __init__(self, seconds: float):
        self._seconds, self._silent = seconds, min(SILENT, seconds / 2)
        self._on = bool(seconds) and distributed.many()
        self._kinds: set[str] = set()
        self._mark = (0, "the beginning", time.monotonic(), math.inf)  # preparing text takes its time
        self._error = False
        self._closed = threading.Event()

    def __enter__(self):
        if self._on:
            distributed.listen()
            self._asking = ThreadPoolExecutor(1, "store")
            self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, _type, error, _trace):
        if not self._on:
            return
        lost = lambda e: isinstance(e, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(e)
        if any(map(lost, _causes(error))):
            self._error = True  # perhaps because another one died: then the thread finds out, and ends all
            time.sleep(2 * self._silent)
        self._closed.set()
        self._thread.join()
        self._asking.shutdown(wait=False)

    def reach(self, kind: str, number: int | str) -> None:
        """This process has come to `kind` `number` (step 12); the first of a kind may take longer."""
        first, self._kinds = kind not in self._kinds, self._kinds | {kind}
        limit = self._seconds * (FIRST if first else 1)
        self._mark = (self._mark[0] + 1, f"{kind} {number}", time.monotonic(), limit)

    def each(self, kind: str, things: Iterable[_T]) -> Iterator[_T]:
        """The things, each of them marked when it is there."""
        for number, thing in enumerate(things, 1):
            self.reach(kind, number)
            yield thing

    def _run(self) -> None:
        index, count = compat.process_index_and_count()
        others = [i for i in range(count) if i != index]
        name, number, waits = distributed.here(), 0, None
        try:
            while True:
                now, number = time.monotonic(), number + 1
                reached, what, since, limit = self._mark
                mine = Beat(name, reached, what, now - since, limit, number)
                self._ask("key_value_set", f"{_BEATS}/{index}", json.dumps(asdict(mine)), True)
                if mine.ago < self._silent and not self._error:
                    waits = None  # who makes progress need not look at the others
                else:
                    if waits is None:
                        waits, seen = now, {}
                    for key, text in self._ask("key_value_dir_get", _BEATS):
                        who, beat = int(key.rpartition("/")[2]), Beat(**json.loads(text))
                        if who not in seen or seen[who][0].number != beat.number:
                            seen[who] = beat, now
                    beats = {i: replace(beat, ago=beat.ago + now - when) for i, (beat, when) in seen.items()}
                    dead = {i for i in others if now - seen.get(i, (None, waits))[1] >= self._silent}
                    if verdict := judge(beats, dead, patient=self._error or len(beats) < count):
                        distributed.end_all(verdict[1], distributed.LOST, everyone=True, without=verdict[0])
                if self._closed.wait(min(5, self._silent / 5)):
                    return
        except RuntimeError as error:
            if not self._closed.wait(1):  # the listener may have heard why
                distributed.lost_coordinator(error)

    def _ask(self, call: str, *args):
        """A call of the store, which is process 0's: where that is frozen it would never come back."""
        answer = self._asking.submit(getattr(compat.key_value_store(), call), *args)
        while True:
            try:
                return answer.result(timeout=self._silent)
            except TimeoutError:
                _, what, since, _ = self._mark
                if (ago := time.monotonic() - since) >= self._silent:
                    told = f"process 0, the coordinator, shows no sign of life ({what} was {ago:.1f} s ago)"
                    distributed.leave(f"{told}; {distributed.LAST_STAYS}", distributed.LOST)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from: a checkpoint's failure tells a collective's in its own words."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def judge(beats: dict[int, Beat], dead: set[int], patient: bool = False) -> tuple[set[int], str] | None:
    """Whom the others wait for, and the line that says so; None while all have time left.

    Args:
        beats: the newest one of each process that has written one, with what `ago` is by now.
        dead: processes that show no sign of life.
        patient: name no others.
    """
    if dead:
        told = {i: f"{_name(beats, i)} shows no sign of life{_last(beats, i, 'at least ')}" for i in dead}
    elif patient or any(beat.ago <= beat.limit for beat in beats.values()):
        return None
    else:
        most = max(beats.values(), key=lambda beat: beat.reached)
        told = {i: f"{beat.name} has not reached {most.what}{_last(beats, i)}"
                for i, beat in beats.items() if beat.reached < most.reached}  # fmt: skip
        if not told:
            hangs = f"all {len(beats)} processes have reached {most.what} and none has gone on for {most.ago:.0f} s"
            return set(), f"{hangs}: a device, or the network between them, hangs; {distributed.LAST_STAYS}"
    names = [told[i] for i in sorted(told)]
    more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return set(told), "; ".join([*names[:_NAMED], *more, distributed.LAST_STAYS])


def _name(beats: dict[int, Beat], index: int) -> str:
    return beats[index].name if index in beats else f"process {index}"


def _last(beats: dict[int, Beat], index: int, bound: str = "") -> str:
    beat = beats.get(index)
    return f" (last: {beat.what}, {bound}{beat.ago:.1f} s ago)" if beat else " (it has never shown any)"
