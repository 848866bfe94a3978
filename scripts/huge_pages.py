"""What a training step on a CPU gains from huge pages: `gva bench train` with and without a setting of glibc, in turn.

    python scripts/huge_pages.py gatedv_small --turns 3

XLA asks the system for a step's large temporaries anew each time, and every page of 4 KiB is a fault when it is first
written to. With `glibc.malloc.hugetlb=1` glibc asks for pages of 2 MiB, which Linux gives where
/sys/kernel/mm/transparent_hugepage/enabled is [madvise] or [always]; it must be set before the process starts.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

ENTRY = "import sys; from gva_jax.cli import main; sys.exit(main())"  # what the console script `gva` does
ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def measure(config: str, rounds: int, tunables: str | None) -> tuple[float, int]:
    """Median milliseconds of a step, and thousands of page faults of the whole process, in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    if tunables is not None:
        environment["GLIBC_TUNABLES"] = tunables
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
    command = [sys.executable, "-c", ENTRY, "bench", "train", config, "--rounds", str(rounds), "--json"]
    found = json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)
    faults = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before
    return found["variants"][0]["step_seconds"] * 1e3, faults // 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="as of `gva bench train`")
    parser.add_argument("--turns", type=int, default=3, help="processes of each kind, one after another (A B A B ...)")
    parser.add_argument("--rounds", type=int, default=10, help="steps of each process, whose median counts")
    parser.add_argument("--tunables", default="glibc.malloc.hugetlb=1", help="GLIBC_TUNABLES of B; A has none")
    options = parser.parse_args()
    print(f"transparent huge pages: {ENABLED.read_text().strip() if ENABLED.exists() else 'not of this kernel'}")
    times: dict[str | None, list[float]] = {None: [], options.tunables: []}
    for _ in range(options.turns):
        for tunables, found in times.items():
            milliseconds, faults = measure(options.config, options.rounds, tunables)
            found.append(milliseconds)
            print(f"{tunables or 'none'}: {milliseconds:,.1f} ms a step, {faults:,} thousand page faults", flush=True)
    without, with_them = (statistics.median(found) for found in times.values())
    print(f"medians of {options.turns}: {without:,.1f} and {with_them:,.1f} ms a step, ratio {with_them / without:.3f}")


if __name__ == "__main__":
    main()
