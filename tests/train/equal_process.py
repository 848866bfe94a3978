"""One of two processes that train the tiny model from a checkpoint of one process, print losses and save.

equal_process.py ADDRESS INDEX FOLDER
"""

import json
import sys
from pathlib import Path

from gva_jax import distributed

distributed.start(sys.argv[1], 2, int(sys.argv[2]), 200)

import jax  # noqa: E402
import tiny_run as tiny  # noqa: E402

from gva_jax.config import MeshConfig, TrainConfig  # noqa: E402
from gva_jax.train.checkpoint import Checkpoints  # noqa: E402
from gva_jax.train.step import put  # noqa: E402


class Position:
    def get_state(self):
        return {}

    def set_state(self, _):
        pass


losses = {}
for name, change, steps in (("float32", lambda run: run, 1), ("float64", tiny.float64, 20)):
    run = change(tiny.config(mesh=MeshConfig(data=2, fsdp=2, tensor=2)))
    it = tiny.Run(run, state=False)
    assert len(jax.local_devices()) == 4 and it.mesh.size == 8
    checkpoints = Checkpoints(Path(sys.argv[3]) / name, TrainConfig(keep=2))
    state, losses[name] = checkpoints.restore(it.abstract, Position()), []
    rows = run.data.batch_size // 2
    mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
    for i in range(steps):
        batch = {key: x[mine] for key, x in tiny.batch(i, run).items()}
        state, metrics = it.step(state, put(batch, it.mesh))
        losses[name].append(float(metrics["loss"]))
    if name == "float64":
        checkpoints.save(state, Position())
        checkpoints.wait()
    checkpoints.close()
print(json.dumps(losses))
distributed.finish()
