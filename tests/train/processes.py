"""Starts the processes of one job on this machine, as a launcher would, and collects how they ended."""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def environment(folder: Path, devices: int = 4, **more: str) -> dict[str, str]:
    """What a process sees: CPU devices, quick compilation, and nothing of a cluster that these tests run in."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    cache = {"GVA_JAX_CACHE": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "PATH": os.environ["PATH"], "HOME": str(folder),
            "PYTHONPATH": str(HERE), "PYTHONUNBUFFERED": "1", **cache, **more}  # fmt: skip


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def errors(self) -> list[str]:
        """Lines that tell a person what is wrong."""
        return [line for line in self.err.splitlines() if line.startswith("error:")]


class Job:
    """Two processes and their output, in files."""

    def __init__(self, folder: Path, *commands: list[str], **more: str):
        folder.mkdir(exist_ok=True)
        self._files = [(folder / f"out{i}", folder / f"err{i}") for i in range(len(commands))]
        self.processes = []
        for command, (out, err) in zip(commands, self._files, strict=True):
            with out.open("w") as out, err.open("w") as err:
                where = {"cwd": folder, "env": environment(folder, **more), "stdout": out, "stderr": err}
                self.processes.append(subprocess.Popen([sys.executable, *command], **where))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def out(self, index: int) -> str:
        return self._files[index][0].read_text()

    def wait_for(self, text: str, index: int = 0, seconds: float = 300) -> None:
        """Until process `index` has printed this."""
        deadline = time.monotonic() + seconds
        while text not in self.out(index):
            told = [err.read_text()[-2000:] for _, err in self._files]
            assert self.processes[index].poll() is None, f"ended without printing {text!r}: {told}"
            assert time.monotonic() < deadline, f"did not print {text!r} in {seconds} s: {told}"
            time.sleep(0.02)

    def kill(self, index: int, signum: int = signal.SIGKILL) -> None:
        self.processes[index].send_signal(signum)

    def end(self, *indices: int, seconds: float = 300) -> list[Ended]:
        """How these processes (all, unless named) end by themselves."""
        ended = []
        for i in indices or range(len(self.processes)):
            code = self.processes[i].wait(timeout=seconds)
            out, err = (path.read_text() for path in self._files[i])
            ended.append(Ended(code, "\n".join(x for x in out.splitlines() if "[Gloo]" not in x), err))
        return ended
