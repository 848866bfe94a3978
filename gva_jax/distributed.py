"""Many processes that run one program: how they find each other, tell each other what happened, and end together.

`start` comes before anything that touches a device. A process that stays alone pays for nothing here: every function
then does the plain thing. What the processes tell each other goes through the key-value store of `jax.distributed`,
which process 0 serves; `gva_jax.watch` uses it to notice who has stalled.
"""

import atexit
import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from gva_jax import cluster, compat
from gva_jax.config import ConfigError

# Exit code: another process is missing, dead or stalled. To start all again goes on from the last checkpoint.
LOST = 70

# After so many seconds without a heartbeat JAX itself gives a process up and ends all others.
JAX_GIVES_UP = 100

# Seconds until a folder that one process has made is seen by all: network file systems remember what is not there.
SHARED_WITHIN = 60

LAST_STAYS = "the last checkpoint stays: start all again"

_FAILED = "gva_jax/failed"
_HEARD = "gva_jax/heard"

_T = TypeVar("_T")
_names = itertools.count()


class LostProcess(RuntimeError):
    """Another process cannot be reached, has died or has stalled: told in one line, exit code `LOST`."""


# ---- start and end ---------------------------------------------------------------------------------------------------


def start(coordinator: str | None, num_processes: int | None, process_id: int | None, seconds: float) -> None:
    """Join the other processes, if there are any; before any device is used.

    What is None comes from the environment, see `cluster.find`. A process that is alone there stays alone.

    Raises:
      ConfigError: the three do not fit together, or the cluster says too little.
      LostProcess: the coordinator, or one of the others, has not come within `seconds`.
    """
    if jax.distributed.is_initialized():  # by the program that called this one
        listen()
        return
    place = cluster.find(coordinator, num_processes, process_id, seconds)
    if place is not None and place.count > 1:
        _join(place, seconds)
        listen()


def finish() -> None:
    """The good end: wait for the others, then part. Also what happens when the interpreter ends."""
    global _finished, _listener
    if many():
        _finished = True
        jax.distributed.shutdown()
    if _listener is not None:
        _listener.join()  # a thread that is still in the store would crash the interpreter's end
        _listener = None


def many() -> bool:
    """Whether there are other processes."""
    return compat.process_index_and_count()[1] > 1


def first() -> bool:
    """Whether this is the process that speaks, logs and writes what only one may write."""
    return compat.process_index_and_count()[0] == 0


def _join(place: cluster.Place, seconds: float) -> None:
    # JAX would catch SIGTERM for itself and tell nobody but those who ask it.
    jax.config.update("jax_enable_preemption_service", False)
    since, limit = time.monotonic(), f"within {seconds:g} s (--connect_seconds)"
    if place.index == 0:
        _check_free(place.coordinator)
    else:
        _reach(place.coordinator, since + seconds, limit)
    # JAX ends the process with a stack trace when its time is over: be there before.
    missing = f"not all of the {place.count} processes have come to the coordinator {place.coordinator} {limit}"
    deadline = threading.Timer(max(since + seconds - time.monotonic(), 1), lambda: leave(missing, LOST))
    deadline.daemon = True
    deadline.start()
    try:
        jax.distributed.initialize(
            place.coordinator, place.count, place.index, place.local_devices, cluster_detection_method="deactivate",
            initialization_timeout=round(seconds) + 60, heartbeat_timeout_seconds=JAX_GIVES_UP,
        )  # fmt: skip
    finally:
        deadline.cancel()
    _delay_aborts()


def _delay_aborts() -> None:
    """When it finds that process 0 has died, JAX logs at length and aborts the process within milliseconds.

    The listener then has no time to say what happened. So SIGABRT is handled by the C library's `sleep`, which is
    called with the signal's number, 6: seconds in which the aborting thread waits, and others may end the process with
    a line and a code. A handler of Python's would not do, because it runs in the main thread.
    """
    with contextlib.suppress(OSError, AttributeError):  # a system without them: then it is JAX's end
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, libc.sleep)


def _check_free(address: str) -> None:
    """Refuses a port that is taken; JAX may crash where it cannot listen."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    where = ("", int(address.rpartition(":")[2]))
    try:
        socket.create_server(where, family=family, dualstack_ipv6=family == socket.AF_INET6).close()
    except OSError as error:
        right = "must have a free port of this machine, where process 0 runs"
        raise ConfigError(f"coordinator = {address!r}: {right}: {error.strerror}") from error


def _reach(address: str, deadline: float, limit: str) -> None:
    """Until the coordinator listens.

    Raises:
      LostProcess: it does not in time.
    """
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                told = f"coordinator {address} cannot be reached {limit}: {error.strerror or error}"
                raise LostProcess(f"{told}; process 0 must run there and be let through") from error
        time.sleep(min(0.5, max(deadline - time.monotonic(), 0.05)))


# ---- telling each other ----------------------------------------------------------------------------------------------


def share(make: Callable[[], str]) -> str:
    """What `make` gives in process 0, in every process; the others wait for it, however long it takes."""
    if not many():
        return make()
    store, name = compat.key_value_store(), f"gva_jax/shared/{next(_names)}"
    if first():
        value = make()
        store.key_value_set(name, value)
        return value
    while (value := _get(store, name, 10)) is None:
        pass
    return value


def _get(store, name: str, seconds: float) -> str | None:
    """Wait for a value in the store; None if it does not come in time."""
    try:
        return store.blocking_key_value_get(name, round(seconds * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def wait_for_all() -> None:
    """Until every process is here. (Where one has ended, or stalls, `_listen` and the watch end the others.)"""
    if many():
        compat.key_value_store().wait_at_barrier(f"gva_jax/barrier/{next(_names)}", 24 * 3600 * 1000)


def first_then_all(make: Callable[[], _T], folder: Path) -> _T:
    """`make()` in process 0, and then, when every process sees the `folder` that it has made, in the others.

    Raises:
      ConfigError: the folder is not on a file system that all share.
    """
    if not many():
        return make()
    made = [make()] if first() else []
    check_shared(folder)
    return made[0] if made else make()


def check_shared(folder: Path) -> None:
    """Refuses a folder that is not the same one in all processes; it exists in process 0.

    Raises:
      ConfigError: naming the process that does not see it.
    """
    if not many():
        return

    def leave() -> str:
        mark = folder / f".seen-by-all-{os.getpid()}-{time.time_ns()}"
        mark.touch()
        return str(mark.resolve())

    mark = Path(share(leave))
    deadline = time.monotonic() + SHARED_WITHIN
    while mark.name not in (os.listdir(mark.parent) if mark.parent.is_dir() else ()):
        if time.monotonic() > deadline:
            right = "must be on a file system that all processes share, under the same path"
            raise ConfigError(f"{str(mark.parent)!r} of process 0 is not seen by {here()}: {right}")
        time.sleep(0.2)
    wait_for_all()
    if first():
        mark.unlink(missing_ok=True)


def here() -> str:
    """This process's name in messages: `process 3 (node-17)`."""
    return f"process {compat.process_index_and_count()[0]} ({socket.gethostname()})"


class Largest:
    """The largest of the numbers that the processes bring, as an array on the devices of `mesh`.

    The numbers travel in a collective of one scalar a device, dispatched like a training step and in order with these.
    So it costs no wait: who reads the result one step later gets it as soon as that step is done, and it is the same
    number, at the same step, in every process. A store that is asked now and then would need a margin of steps.
    """

    def __init__(self, mesh: Mesh):
        line = Mesh(mesh.devices.reshape(-1), ("all",), axis_types=(AxisType.Auto,))
        self._split, self._size = NamedSharding(line, P("all")), line.size
        self._local = len(self._split.addressable_devices)
        self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(line, P()))

    def __call__(self, number: int) -> jax.Array:
        mine = np.full(self._local, number, np.int32)
        return self._largest(jax.make_array_from_process_local_data(self._split, mine, (self._size,)))


# ---- ending together -------------------------------------------------------------------------------------------------

_finished = False
_listener: threading.Thread | None = None
_ending = threading.Lock()


def end_all(message: str, code: int, *, everyone: bool = False, without: Iterable[int] = ()) -> NoReturn:
    """End every process with `code`, at once.

    This process tells `message`, unless another has ended all with the same one before; process 0 tells it too, with
    the name of this process, and with `everyone` all do. `without`: processes that cannot hear any more.
    """
    if not _ending.acquire(blocking=False):  # another thread is at it
        time.sleep(3600)
    store, (index, count) = compat.key_value_store(), compat.process_index_and_count()
    told = {"process": index, "name": here(), "message": message, "code": code, "everyone": everyone}
    before = []

    def publish() -> None:
        try:
            store.key_value_set(_FAILED, json.dumps(told))
        except RuntimeError:  # another was first, or process 0 is gone
            before.append(json.loads(store.key_value_try_get(_FAILED))["message"])

    _briefly(publish)
    if everyone or message not in before:
        _tell(message)
    _part(store, index, set(range(count)) - {index, *without}, code)


def listen() -> None:
    """From now on, what ends another process ends this one; and so does the end of process 0."""
    global _finished, _listener
    if many() and _listener is None:
        _finished = False
        _listener = threading.Thread(target=_listen, args=(compat.key_value_store(),), name="listener", daemon=True)
        _listener.start()
        atexit.register(finish)


def _listen(store) -> None:
    index, count = compat.process_index_and_count()
    try:
        while (text := _get(store, _FAILED, 3600)) is None:
            pass
    except RuntimeError as error:
        lost_coordinator(error)
        return
    told = json.loads(text)
    if not told["everyone"]:
        time.sleep(1)  # a mistake is often that of all: this process may be about to find it itself
    if not _ending.acquire(blocking=False):  # `end_all` is at work here
        return
    if told["everyone"]:
        _tell(told["message"])
    elif index == 0:
        _tell(f"{told['name']}: {told['message']}")
    _part(store, index, set(range(count)) - {index, told["process"]}, told["code"])


def lost_coordinator(error: RuntimeError) -> None:
    """A call of the store has failed: end this process, if it is not ending anyway."""
    if not _finished and _ending.acquire(blocking=False):
        leave(f"process 0, the coordinator, is gone ({str(error).splitlines()[0]}); {LAST_STAYS}", LOST)


def _part(store, index: int, others: set[int], code: int) -> NoReturn:
    """Leave at once; process 0, which serves the store, when all others have heard why, or after some seconds."""

    def part() -> None:
        store.key_value_set(f"{_HEARD}/{index}", "", allow_overwrite=True)
        while index == 0:
            heard = {int(name.rpartition("/")[2]) for name, _ in store.key_value_dir_get(_HEARD)}
            if others <= heard:
                time.sleep(0.2)  # they are on their way out
                return
            time.sleep(0.05)

    _briefly(part)
    _exit(code)


def _briefly(act: Callable[[], None], seconds: float = 4) -> None:
    """`act()`, but no longer than this (less than `_delay_aborts` gives): a store whose process 0 is gone may hang."""

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)


def leave(message: str, code: int) -> NoReturn:
    """End this process alone, where the others cannot be told."""
    _tell(message)
    _exit(code)


def _tell(message: str) -> None:
    print("error:", " ".join(message.split("\n")), file=sys.stderr, flush=True)


def _exit(code: int) -> NoReturn:
    """Without Python's own end, which would wait for the other processes."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)
