"""One of two processes that train the quickstart's model from a checkpoint of one process, print losses and save.

equal_process.py ADDRESS INDEX FOLDER DTYPE STEPS
"""

import json
import sys

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


folder, dtype, steps = sys.argv[3:]
run = tiny.quickstart(MeshConfig(data=2, fsdp=2, tensor=2), dtype)
it = tiny.Run(run, state=False).optimised()
assert len(jax.local_devices()) == 4 and it.mesh.size == 8
checkpoints = Checkpoints(folder, TrainConfig(keep=2))
state, losses = checkpoints.restore(it.abstract, Position()), []
rows = run.data.batch_size // 2
mine = slice(jax.process_index() * rows, (jax.process_index() + 1) * rows)
for i in range(int(steps)):
    batch = {key: x[mine] for key, x in tiny.batch(i, run).items()}
    state, metrics = it.step(state, put(batch, it.mesh))
    losses.append(float(metrics["loss"]))
checkpoints.save(state, Position())
checkpoints.wait()
checkpoints.close()
print(json.dumps(losses))
distributed.finish()
