"""What the processes of some tests do: join each other, and then what is asked for; no model, nothing to compile.

light_process.py ADDRESS INDEX DEED...
"""

import os
import sys
import time
from pathlib import Path

from gva_jax import cli, distributed
from gva_jax.config import ConfigError
from gva_jax.watch import Watch

address, index, deed, *more = sys.argv[1:]
index = int(index)


def march(seconds: float, steps: int, asleep_at: int | None = None) -> None:
    """Steps that nobody can take alone; process 1 falls asleep before one of them, alive."""
    with Watch(seconds) as watch:
        for step in range(1, steps + 1):
            if index == 1 and step == asleep_at:
                print("asleep", flush=True)
                time.sleep(3600)
            watch.reach("step", step)
            print(f"step {step}", flush=True)
            distributed.wait_for_all()
            time.sleep(0.02)


def act(_args) -> int:
    distributed.start(address, 2, index, 200)
    if deed == "sleep":
        march(4, 10_000, asleep_at=4)
    elif deed == "march":
        march(4, 10_000)
    elif deed == "share":
        import jax
        import jax.numpy as jnp

        mesh = jax.make_mesh((jax.device_count(),), ("all",))
        largest = distributed.Largest(mesh)
        print(distributed.share(lambda: f"from {os.getpid()}"), int(largest(0)), int(largest(7 * index)))
        assert jnp.ones(3).sum() == 3
        folder = Path(more[0])
        print(distributed.first_then_all(lambda: "saw" if folder.exists() else folder.mkdir() or "made", folder))
        distributed.wait_for_all()
        raise ConfigError("name = 'x': is not right")
    elif deed == "apart":  # as if each had a disk of its own
        distributed.SHARED_WITHIN = 0.5
        folder = Path(more[0]) / str(index)
        distributed.share = lambda make: str(folder / "mark") if index else make()
        folder.mkdir()
        distributed.check_shared(folder)
    distributed.finish()
    return 0


cli.COMMANDS["act"] = act
sys.exit(cli.main(["act"]))
