"""Stands for `gva` in tests of launch files: joins the others as `gva train` does, and trains nothing.

launched_process.py train CONFIG [--until-stopped]
"""

import json
import os
import sys
import time
from pathlib import Path

from gva_jax import distributed
from gva_jax.train.stopping import StopRequest

command, *args = sys.argv[1:]
distributed.start(None, None, None, 200)
index, count = distributed.compat.process_index_and_count()
told = {"index": index, "count": count, "args": args, "folder": os.getcwd(), "cache": os.environ["GVA_JAX_CACHE"]}
told["together"] = distributed.share(lambda: str(os.getpid()))
code = 0
with StopRequest() as stop:
    stop.defer()
    Path(f"started{index}").touch()
    while "--until-stopped" in args and stop.signum is None:
        time.sleep(0.05)
    if stop.signum is not None:
        code = 128 + stop.signum
os.write(1, (json.dumps(told | {"code": code}) + "\n").encode())  # at once: both processes write into one pipe
distributed.finish()
sys.exit(code)
