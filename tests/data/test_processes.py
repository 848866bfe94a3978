"""Two real processes train on the batches of one, and what they save one process continues."""

import json
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

from gva_jax.config import ConfigError
from gva_jax.data.loader import train_iterator
from gva_jax.train.checkpoint import Checkpoints
from gva_jax.train.state import TrainState

# Every process feeds its rows of three batches, checks that the array made of all rows is the whole batch, and saves.
PROCESS = """
import dataclasses, json, sys
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P

index, address, folder, fields = int(sys.argv[1]), sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
jax.distributed.initialize(address, 2, index)
from gva_jax.config import DataConfig, TrainConfig
from gva_jax.data.loader import train_iterator
from gva_jax.data.prepare import prepare
from gva_jax.display import Display
from gva_jax.train.checkpoint import Checkpoints
from gva_jax.train.state import TrainState

data = DataConfig(**fields)
corpus = prepare(data, 400, Display(quiet=True))
mesh = jax.make_mesh((2,), ("data",))
iterator = train_iterator(corpus, data, process_index=index, process_count=2)
alone = train_iterator(corpus, data)
for _ in range(3):
    rows, whole = next(iterator), next(alone)
    for name, mine in rows.items():
        array = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), mine)
        assert array.shape == whole[name].shape
        np.testing.assert_array_equal(multihost_utils.process_allgather(array, tiled=True), whole[name])
zero = jax.device_put(np.zeros((), np.int32), NamedSharding(mesh, P()))
state = TrainState(step=zero + 3, params={"w": zero + 1}, opt_state={"m": zero + 2}, rng=zero)
checkpoints = Checkpoints(folder, TrainConfig(keep=1))
checkpoints.save(state, iterator)
checkpoints.wait()
checkpoints.close()
"""


def test_what_two_processes_saved_one_continues(corpus, data, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    fields = {"source": data.source, "holdout": data.holdout, "directory": data.directory, "context_length": 64}
    command = [sys.executable, "-c", PROCESS]
    arguments = [address, str(tmp_path), json.dumps(fields)]
    environment = {"JAX_PLATFORMS": "cpu", "PATH": "", "HOME": str(tmp_path)}
    processes = [
        subprocess.Popen([*command, str(i), *arguments], env=environment, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors

    here = type(data)(**fields)
    fresh, alone = train_iterator(corpus, here), train_iterator(corpus, here)
    zero = jax.ShapeDtypeStruct((), np.int32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    checkpoints = Checkpoints(tmp_path)
    abstract = TrainState(step=zero, params={"w": zero}, opt_state={"m": zero}, rng=zero)
    assert int(checkpoints.restore(abstract, fresh).step) == 3
    batches = [next(alone) for _ in range(6)][3:]
    for expected, found in zip(batches, fresh, strict=False):
        assert all((found[name] == expected[name]).all() for name in expected)
    # What an earlier version wrote: a position for each process, in another order of the text.
    (tmp_path / "checkpoints/3/data/process_0-of-1.json").write_text("{}")
    with pytest.raises(ConfigError, match="was saved by an older version"):
        checkpoints.restore(abstract, fresh)
    checkpoints.close()
    fresh.close()
    alone.close()
