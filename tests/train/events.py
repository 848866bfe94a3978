"""Reads TensorBoard's event files, as far as the tests need: scalars, purged where a later launch says so."""

import struct
from pathlib import Path

from tensorboardX.proto.event_pb2 import Event, SessionLog


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """`{tag: [(step, value), ...]}` as TensorBoard shows it."""
    found: dict = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in _events(path.read_bytes()):
            if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                for name, points in found.items():
                    found[name] = [point for point in points if point[0] < event.step]
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def _events(data: bytes):
    """A record is its length (8 bytes), a checksum (4), the event and another checksum (4)."""
    at = 0
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        yield Event.FromString(data[at + 12 : at + 12 + size])
        at += 16 + size
