"""Trains a tiny model twice: undisturbed, and killed again and again, each time continued by the same command.

Both must end the same, bit for bit: the loss curve, the evaluations, the parameters, the optimiser and the position in
the data. Every part is a real process, `gva train`; SIGKILL and SIGTERM come at moments drawn from a seed: at any time
after the launch, when a step has been logged, during an evaluation, and while a checkpoint is being written.

    python scripts/kill_run.py --out docs/results/kills.md
"""

import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

ENTRY = "import sys; from gva_jax.cli import main; sys.exit(main())"  # what the console script `gva` does
COMPARED = ("step", "loss", "grad_norm", "learning_rate")  # and what evaluations found; not how fast it went
MODEL = {
    "model.vocab_size": 300, "model.num_layers": 2, "model.model_dim": 32, "model.hidden_dim": 64,
    "model.attention.head_dim": 8, "model.attention.rope_dim": 4, "model.dropout": 0.1,
    "data.context_length": 32, "data.batch_size": 8, "data.holdout": 0.1,
}  # fmt: skip
LOOK = {"train.log_every": 1, "train.eval_every": 20, "train.eval_batches": 4, "train.checkpoint_every": 10}


@dataclass(frozen=True)
class Kill:
    """When to send which signal: `moment` is "launch", "step", "evaluation" or "saving"."""

    signum: signal.Signals
    moment: str
    # The first step at which it may come; at the launch the last.
    step: int = 0
    # Then wait so long: seconds, or for "launch" in units of what the undisturbed run took to its first record.
    delay: float = 0.0


@dataclass(frozen=True)
class Part:
    """How one killed process went."""

    kill: Kill
    seconds: float
    exit_code: int
    # The step it had continued from, if it came so far.
    resumed: int | None
    # What it left: the last step logged, the newest checkpoint, and whether a half-written one lay there.
    logged: int
    saved: int | None
    half_written: bool


def plan(steps: int, kills: int, seed: int) -> list[Kill]:
    """Kills all over the run: ten have each moment with each signal, and saving oftener than the others."""
    draw = random.Random(seed)
    moments = [(m, s) for m in ("launch", "step", "evaluation", "saving") for s in (signal.SIGKILL, signal.SIGTERM)]
    moments = draw.sample([*moments, moments[-2], moments[-1]], 10)
    found = []
    for i in range(kills):
        moment, signum = moments[i % 10]
        step = round(steps * (i + draw.random()) / (kills + 1))
        delay = draw.uniform(0, 1 if moment == "launch" else 0.03)
        found.append(Kill(signum, moment, max(step, 1), round(delay, 3)))
    return found


class Rehearsal:
    """A folder for a text, a cache and two runs, and the command that continues either."""

    def __init__(self, work: Path, steps: int):
        self.work, self.steps, self.logs = work, steps, []
        self.startup = 0.0
        (work / "text").mkdir()
        for i in range(400):
            lines = [f"{a} and {i} are {a + i}." for a in random.Random(i).choices(range(100), k=20)]
            (work / f"text/{i:03}.txt").write_text("\n".join(lines))

    def command(self, name: str) -> list[str]:
        fields = MODEL | LOOK | {"train.steps": self.steps, "name": name, "runs": str(self.work / "runs"),
                                 "data.source": f"text:{self.work}/text/*.txt", "sample.max_new_tokens": 1}  # fmt: skip
        return ["train", "quickstart", *(f"--{field}={value}" for field, value in fields.items())]

    def start(self, name: str) -> subprocess.Popen:
        self.logs.append(self.work / f"{name}-{len(self.logs)}.log")
        log = self.logs[-1].open("w")
        cache = {"GVA_JAX_CACHE": str(self.work / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        return subprocess.Popen([sys.executable, "-c", ENTRY, *self.command(name)], stdout=log, stderr=log,
                                env={"JAX_PLATFORMS": "cpu", **os.environ, **cache})  # fmt: skip

    def run(self, name: str) -> None:
        """To the end; measures how long the first record takes."""
        process, began = self.start(name), time.monotonic()
        while process.poll() is None and not self._metrics(name):
            time.sleep(0.01)
        self.startup = self.startup or time.monotonic() - began
        code = process.wait()
        if code:
            raise SystemExit(f"{name}: exit code {code}\n{self.said()}")

    def killed(self, name: str, kill: Kill) -> Part:
        """Start, and kill."""
        process, began = self.start(name), time.monotonic()
        while not self._is_time(name, kill, time.monotonic() - began):
            if process.poll() is not None:
                raise SystemExit(f"{name}: ended with {process.returncode} before {kill}\n{self.said()}")
            time.sleep(0.0005)
        if kill.moment != "launch":
            time.sleep(kill.delay)
        process.send_signal(kill.signum)
        seconds, code = time.monotonic() - began, process.wait()
        allowed = {signal.SIGKILL: {-signal.SIGKILL}, signal.SIGTERM: {128 + signal.SIGTERM}}[kill.signum]
        if kill.moment == "launch":  # before `gva` listens the system itself ends the process, as a shell says 143, too
            allowed.add(-kill.signum)
        if code not in allowed:
            raise SystemExit(f"{name}: exit code {code} after {kill}\n{self.said()}")
        folders = [p.name for p in self._checkpoints(name).glob("*")]
        saved = max((int(step) for step in folders if step.isdigit()), default=None)
        return Part(kill, seconds, code, self.resumed(), self.logged(name), saved, any("tmp" in p for p in folders))

    def _is_time(self, name: str, kill: Kill, seconds: float) -> bool:
        if kill.moment == "launch" and seconds >= kill.delay * self.startup:
            return True
        if "model: " not in self.said():  # what an earlier process left still lies there
            return False
        if self.logged(name) < max(kill.step, (self.resumed() or 0) + 1):
            return False
        if kill.moment == "saving":
            return any(p.name.endswith("tmp") for p in self._checkpoints(name).glob("*"))
        # An evaluation follows at once on the record of its step.
        return kill.moment in ("launch", "step") or self.logged(name) % LOOK["train.eval_every"] == 0

    def _checkpoints(self, name: str) -> Path:
        return self.work / "runs" / name / "checkpoints"

    def said(self) -> str:
        """What the last process printed."""
        return self.logs[-1].read_text()

    def resumed(self) -> int | None:
        """The step that the last process continued from."""
        told = re.search(r"resumed .* at step ([\d,]+)", self.said())
        return int(told[1].replace(",", "")) if told else None

    def logged(self, name: str) -> int:
        """The last step in metrics.jsonl."""
        lines = self._metrics(name)
        return json.loads(lines[-1])["step"] if lines else 0

    def _metrics(self, name: str) -> list[str]:
        path = self.work / "runs" / name / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return text[: text.rfind("\n") + 1].splitlines()  # without a line that is being written

    def curve(self, name: str) -> list[dict]:
        """metrics.jsonl without times."""
        wanted = lambda key: key in COMPARED or key.startswith(("development_", "heldout_"))
        return [{k: v for k, v in json.loads(line).items() if wanted(k)} for line in self._metrics(name)]

    def state(self, name: str) -> dict[str, np.ndarray | str]:
        """Everything in the last checkpoint."""
        import jax
        import orbax.checkpoint as ocp

        last = self._checkpoints(name) / str(self.steps)
        trees = {item: ocp.StandardCheckpointer().restore(last.resolve() / item) for item in ("params", "optimizer")}
        leaves = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(trees)}
        return leaves | {"data": (last / "data/metadata").read_text()}


def rehearse(work: Path, steps: int, kills: list[Kill], say=print) -> tuple[list[Part], str]:
    """Runs all of it, and raises `SystemExit` where the two runs differ in anything."""
    work = work.resolve()
    rehearsal, began = Rehearsal(work, steps), time.monotonic()
    rehearsal.run("undisturbed")
    say(f"undisturbed: {steps} steps, {time.monotonic() - began:.0f} s")
    parts = []
    for kill in kills:
        part = rehearsal.killed("killed", kill)
        parts.append(part)
        say(f"{kill.signum.name} after {part.seconds:.1f} s ({kill.moment}): continued {part.resumed}, logged "
            f"{part.logged}, saved {part.saved}")  # fmt: skip
        _continued(parts)
    rehearsal.run("killed")
    say(f"killed: finished, {time.monotonic() - began:.0f} s in all")
    same = _compare(rehearsal)
    say(same)
    return parts, same


def _continued(parts: list[Part]) -> None:
    """Where a process began is where the one before it had saved, and after SIGTERM that is where it stopped."""
    last = parts[-1]
    if last.kill.signum == signal.SIGTERM and last.exit_code > 0 and (last.saved or 0) != last.logged:
        raise SystemExit(f"{last}: it did not save where it stopped")
    if len(parts) > 1 and last.resumed is not None and last.resumed != parts[-2].saved:
        raise SystemExit(f"{last}: it was not continued from where the one before it had saved")


def _compare(rehearsal: Rehearsal) -> str:
    """What was found equal."""
    one, other = rehearsal.curve("undisturbed"), rehearsal.curve("killed")
    if one != other:
        at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        raise SystemExit(f"the curves differ from record {at} on: {one[at : at + 2]} and {other[at : at + 2]}")
    one, other = rehearsal.state("undisturbed"), rehearsal.state("killed")
    for name in one.keys() | other.keys():
        a, b = one[name], other[name]
        same = a == b if isinstance(a, str) else a.dtype == b.dtype and a.tobytes() == b.tobytes()
        if not same:
            raise SystemExit(f"{name} differs at the end")
    arrays = [x for x in one.values() if not isinstance(x, str)]
    return (f"Equal bit for bit: {len(rehearsal.curve('killed'))} records of the curve, {len(arrays)} arrays of "
            f"{sum(x.size for x in arrays):,} numbers, the position in the data.")  # fmt: skip


def table(parts: list[Part]) -> str:
    """As Markdown."""
    rows = ["| | signal | moment | seconds | exit code | continued from | step logged | step saved | left |",
            "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for i, part in enumerate(parts, 1):
        left = "half a checkpoint" if part.half_written else ""
        cells = [i, part.kill.signum.name, part.kill.moment, f"{part.seconds:.2f}", part.exit_code, part.resumed,
                 part.logged, part.saved, left]  # fmt: skip
        rows.append("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a Markdown file for the table")
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="kill_run_"))
    parts, same = rehearse(work, options.steps, plan(options.steps, options.kills, options.seed))
    print(table(parts))
    if options.out:
        facts = {"day": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "jax": version("jax")}
        options.out.write_text(REPORT.format(**vars(options), **facts, table=table(parts), same=same))
    shutil.rmtree(work)


REPORT = """# A run that is killed, and the same run undisturbed

```
python scripts/kill_run.py --steps {steps} --kills {kills} --seed {seed} --out docs/results/kills.md
```

{day}, Python {python}, jax {jax}, one CPU device. A model of two layers and width 32 with dropout, {steps} steps, a
checkpoint every 10, an evaluation every 20; every part is a process of its own, the command `gva train`, and the same
one each time. Moments are drawn from the seed: at any time after the launch, when a step has been logged, when an
evaluation has begun, when the temporary folder of a checkpoint is there. Exit codes below 0 are deaths by that signal;
seconds are from the launch.

{table}

A dash: killed before it had read a checkpoint, or before there was one. `step logged` is the last one in metrics.jsonl
when the process was dead; what lies after the saved step is trained and logged again.

{same}
"""


if __name__ == "__main__":
    main()
