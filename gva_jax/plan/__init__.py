"""`gva plan`: what a training run would need on devices that are not here. The real step is compiled, nothing is run.

`topologies` knows devices by name, `program` compiles for them, `hlo` reads what was compiled, `count` and `kernels`
count in it, `report` draws the conclusions. This module itself imports nothing heavy: `environment` comes before JAX.
"""

import dataclasses
import json
import os

from gva_jax.config import require


def environment() -> None:
    """What must be set before JAX starts: it shall ask for no device, and let several processes compile at once."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    for name, value in (("TPU_SKIP_MDS_QUERY", "1"), ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"), ("TPU_MIN_LOG_LEVEL", "3"),
                        ("TF_CPP_MIN_LOG_LEVEL", "3")):  # fmt: skip
        os.environ.setdefault(name, value)


def options_of(pairs) -> dict[str, str]:
    """XLA's options from `name=value` texts."""
    for pair in pairs:
        require("=" in pair, "xla", pair, "must be NAME=VALUE")
    return dict(pair.split("=", 1) for pair in pairs)


def main(options) -> int:
    """The command, of `gva_jax.options.PlanOptions`: 0 where one of the meshes fits, 1 where none does."""
    from rich.console import Console

    from gva_jax.display import Display
    from gva_jax.plan import program, report, topologies

    topology, config = topologies.parse(options.topology), options.config
    meshes = [program.parse_mesh(text) for text in options.mesh] or program.default_meshes(config, topology)
    xla, devices = options_of(options.xla), topology.devices()
    display = Display(console=Console(stderr=True, highlight=False, soft_wrap=True))
    plans = []
    with display.task(f"compiling for {topology.name}", total=len(meshes)) as task:
        for mesh in meshes:
            fitted = program.fitted(config, mesh, topology.size)
            name = report.mesh_name(dataclasses.asdict(fitted.mesh))
            display.say(f"{config.name} on {topology.name}, mesh {name}: compiling, a minute or more")
            compiled, on = program.compile_step(fitted, topology, devices, xla, keep=not options.fresh)
            plans.append(report.plan(fitted, topology, on, compiled))
            task.advance()
    plans.sort(key=lambda one: (not one.fits, one.bound))
    if options.json:
        print(json.dumps([dataclasses.asdict(one) | {"bound": one.bound} for one in plans], indent=2))
    else:
        out = Display()
        out.show(report.table(plans, topology))
        for line in report.notes(config, plans):
            out.say(line)
    return 0 if plans[0].fits else 1
