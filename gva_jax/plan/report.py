"""From a compiled step to what a person decides by: memory, FLOPs, bytes over the network, the least step time."""

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from jax.sharding import Mesh
from rich.table import Table

from gva_jax.config import RunConfig
from gva_jax.info import describe, matching_gqa
from gva_jax.plan import hlo
from gva_jax.plan.count import Counts, count
from gva_jax.plan.program import Compiled, real_attention
from gva_jax.plan.topologies import Topology


@dataclass(frozen=True)
class Plan:
    """Figures of one config on one mesh; bytes and FLOPs are one device's, of one step; seconds are lower bounds."""

    config: str
    topology: str
    mesh: dict[str, int]
    accumulation: int
    parameters: int
    attention: str
    real_attention: str
    passed_over: dict[str, str]
    compile_seconds: float
    fits: bool
    refused: str | None = None
    memory: dict[str, int] | None = None
    flops: dict[str, int] | None = None
    hbm_bytes: int | None = None
    bytes_over: dict[str, float] | None = None
    seconds: dict[str, float] | None = None
    mfu: float | None = None
    kernel_calls: dict[str, int] | None = None
    uncounted: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()

    @property
    def bound(self) -> float:
        """Seconds below which a step cannot be done."""
        return max(self.seconds.values()) if self.seconds else math.inf


def plan(config: RunConfig, topology: Topology, mesh: Mesh, compiled: Compiled) -> Plan:
    """The figures of a compiled step.

    The bound on step time takes FLOPs at the chip's peak, bytes of HBM at its bandwidth and bytes over each mesh axis
    at that of its links, as if all three went on at once without ever waiting: whichever is longest. MFU is that of
    `gva info`'s training FLOPs per token, recomputation left out: `tokens FLOPs / (seconds devices peak)`.
    """
    about = describe(config)
    tokens = config.data.batch_size * config.data.context_length
    figures: dict[str, Any] = dict(
        config=config.name,
        topology=topology.name,
        mesh=dict(mesh.shape),
        accumulation=config.train.accumulation,
        whole=tuple(compiled.whole),
        parameters=about["parameters"],
        attention=compiled.attention,
        real_attention=real_attention(compiled, topology),
        passed_over=compiled.passed_over,
        compile_seconds=compiled.seconds,
    )
    if compiled.refused:
        return Plan(**figures, fits=False, refused=compiled.refused)
    program = hlo.parse(compiled.text)
    counts = count(program, dict(mesh.shape))
    memory = memory_of(program, compiled.memory)
    seconds = {
        "flops": counts.flops / topology.chip.flops,
        "hbm": counts.hbm_bytes / topology.chip.bandwidth,
        "network": network_seconds(counts, topology, mesh),
    }
    ideal = tokens * about["flops_per_token"]["training"] / (topology.size * topology.chip.flops)
    return Plan(
        **figures,
        fits=memory["total"] <= topology.chip.memory,
        memory=memory,
        flops={"matmul": counts.matmul_flops, "attention_kernels": counts.kernel_flops, "total": counts.flops},
        hbm_bytes=counts.hbm_bytes,
        bytes_over=counts.bytes_over(),
        seconds=seconds,
        mfu=ideal / max(seconds.values()),
        kernel_calls=counts.kernel_calls,
        uncounted=tuple(sorted(counts.uncounted)),
    )


def memory_of(program: hlo.Program, reported: dict[str, int]) -> dict[str, int]:
    """Bytes of one device. Arguments are read off the program's own layouts, with their padding.

    `activations` are what layers' forward passes leave for their backward passes where layers are scanned; they are
    part of `temporaries`. The total is arguments, results that replace no argument, temporaries and code.
    """
    sizes = {"parameters": 0, "optimizer": 0, "batch": 0, "unpadded": 0}
    for op in program.entry.parameters():
        source = op.source.replace("\\'", "'")
        part = "parameters" if source.startswith("state.params") else "optimizer"
        sizes["batch" if source.startswith("batch") else part] += sum(a.padded_bytes for a in op.shape)
        sizes["unpadded"] += sum(a.nbytes for a in op.shape)
    results = max(0, reported["outputs"] - reported["aliased"])
    arguments = sizes["parameters"] + sizes["optimizer"] + sizes["batch"]
    return {
        "parameters": sizes["parameters"],
        "optimizer": sizes["optimizer"],
        "padding": arguments - sizes["unpadded"],
        "batch": sizes["batch"],
        "activations": activations(program),
        "temporaries": reported["temporaries"],
        "peak": reported["peak"],
        "results": results,
        "code": reported["code"],
        "total": arguments + results + reported["temporaries"] + reported["code"],
    }


def break_even(config: RunConfig, products: int) -> float | None:
    """The context at which GVA's training step, absorbed, costs as many FLOPs as GQA's of the same heads and groups.

    GVA's projections are smaller: 3 x 2 FLOPs a parameter and token are saved. Its keys are wider by r: each of the
    `products` of a training step that run over the keys' width costs 2 L H r (T + 1)/2 more a token. There are 4 where
    scores are computed once more in the backward pass, as flash attention does, and 5 where two backward kernels do.
    None where keys cannot be absorbed or have no rotary part.
    """
    attention = config.model.attention
    if attention.family != "gva" or not attention.rope_dim:
        return None
    gqa = replace(config, model=matching_gqa(config.model))
    saved = (describe(one)["parameters_by_part"]["attention"] for one in (gqa, config))
    saved = next(saved) - next(saved)
    return 6 * saved / (products * config.model.num_layers * attention.num_heads * attention.rope_dim) - 1


def activations(program: hlo.Program) -> int:
    """Bytes that loops over layers stack in the forward pass, a slice a trip: what their bodies update in place."""
    total = 0
    for computation in program.computations.values():
        for loop in computation.ops.values():
            if loop.opcode != "while" or "transpose(" in loop.source or "jvp(Transformer" not in loop.source:
                continue
            trips = program.trips(computation, loop)
            body = program.computations[re.search(r"body=%([\w.\-]+)", loop.attributes).group(1)]
            if body.root.opcode != "tuple" or trips == 1:
                continue
            for name in body.root.operands:
                op = body.ops[name]
                while op.opcode in ("bitcast", "copy"):
                    op = body.ops[op.operands[0]]
                stacked = op.shape and op.shape[0].dims[:1] == (trips,)
                if stacked and op.opcode != "get-tuple-element" and not op.shape[0].on_chip:
                    total += op.shape[0].padded_bytes
    return total


def network_seconds(counts: Counts, topology: Topology, mesh: Mesh) -> float:
    """The longest time over any mesh axis (or set of axes that collectives span)."""
    times: dict[tuple[str, ...], float] = {}
    for one in counts.collectives:
        index = tuple(slice(None) if axis in one.axes else 0 for axis in mesh.axis_names)
        members = list(mesh.devices[index].flat)
        seconds = topology.seconds(one.nbytes, members, max(one.ways, 2))
        times[one.axes] = times.get(one.axes, 0) + seconds
    return max(times.values(), default=0.0)


# ---- printing --------------------------------------------------------------------------------------------------------

GB, TERA = 1e9, 1e12


def mesh_name(mesh: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1) or "one device"


COLUMNS = ("config", "topology", "mesh", "micro-batches", "parameters", "optimiser", "activations", "temporaries",
           "peak", "of memory", "TFLOP", "of it attention", "HBM", "network by axis", "FLOPs ms", "HBM ms",
           "network ms", "MFU at most", "fits")  # fmt: skip


def row(one: Plan, memory: float) -> tuple[str, ...]:
    """One line of the table: gigabytes, TFLOP and milliseconds of one device."""
    start = (one.config, one.topology, mesh_name(one.mesh), str(one.accumulation))
    if one.refused:
        return (*start, *("" for _ in COLUMNS[4:-1]), "no")
    gb = lambda name: f"{one.memory[name] / GB:.3f}"
    over = ", ".join(f"{axes} {nbytes / GB:.2f}" for axes, nbytes in sorted(one.bytes_over.items())) or "0"
    attention = f"{one.flops['attention_kernels'] / TERA:.2f}" if one.attention != "chunked" else "in TFLOP"
    return (*start, gb("parameters"), gb("optimizer"), gb("activations"), gb("temporaries"), gb("peak"),
            f"{one.memory['total'] / memory:.1%}", f"{one.flops['total'] / TERA:.2f}", attention,
            f"{one.hbm_bytes / GB:.0f}", over, *(f"{one.seconds[name] * 1e3:.1f}" for name in
            ("flops", "hbm", "network")), f"{one.mfu:.0%}", "yes" if one.fits else "no")  # fmt: skip


def table(plans: list[Plan], topology: Topology) -> Table:
    """Meshes of one config, the fastest first, one a column."""
    first = plans[0]
    title = (f"{first.config} on {topology.name}, {topology.size} x {topology.chip.name}: {first.parameters:,} "
             "parameters; one device, one step; compiled, not measured")  # fmt: skip
    shown = Table(title=title, title_justify="left")
    for at, column in enumerate(("", *(mesh_name(one.mesh) for one in plans))):
        shown.add_column(column, justify="right" if at else "left")
    lines = [row(one, topology.chip.memory)[3:] for one in plans]
    units = {"parameters": "GB", "optimiser": "GB", "activations": "GB, among temporaries", "temporaries": "GB",
             "peak": "GB, as the compiler reports it", "HBM": "GB moved", "network by axis": "GB"}  # fmt: skip
    for at, name in enumerate(COLUMNS[3:]):
        unit = f"{topology.chip.memory / GB:.0f} GB" if name == "of memory" else units.get(name)
        shown.add_row(f"{name} ({unit})" if unit and name != "of memory" else f"{name}" + (f", {unit}" if unit else ""),
                      *(line[at] for line in lines), end_section=name in ("micro-batches", "of memory",
                      "network by axis", "network ms"))  # fmt: skip
    return shown


def markdown(plans: list[Plan], memory: float) -> list[str]:
    """The table as Markdown's lines, without a heading."""
    return ["| " + " | ".join(row(one, memory)) + " |" for one in plans]


def notes(config: RunConfig, plans: list[Plan]) -> list[str]:
    """What the figures do not say themselves, a line each."""
    lines, first = [], plans[0]
    if first.accumulation != config.train.accumulation:
        lines.append(f"micro-batches: {first.accumulation} rather than the config's {config.train.accumulation}, which "
                     f"the mesh cannot split evenly: --train.accumulation {first.accumulation}")  # fmt: skip
    if first.real_attention == first.attention:
        lines.append(f"training attention: {first.attention}")
    else:
        lines.append(f"training attention: compiled with {first.attention}; on the device: {first.real_attention}, "
                     "which do not compile without one: temporaries, HBM and FLOPs would be less")  # fmt: skip
        lines += [f"  {name}: {reason}" for name, reason in first.passed_over.items()]
    for one in plans:
        if one.refused:
            lines.append(f"mesh {mesh_name(one.mesh)}: the compiler refuses: {one.refused}")
        if one.uncounted:
            lines.append(f"mesh {mesh_name(one.mesh)}: FLOPs of {', '.join(one.uncounted)} are not counted")
        lines += [f"mesh {mesh_name(one.mesh)}: {told}" for told in one.whole]
    if (four := break_even(config, 4)) is not None:
        attention, five = config.model.attention, break_even(config, 5)
        d, r = attention.head_dim, attention.rope_dim
        would = "are" if attention.form == "absorbed" else f"(here they are materialised, {d} wide) would be"
        lines.append(f"absorbed keys {would} {d} + {r} wide: QK costs {(d + r) / d:g} of GQA's; a step's FLOPs equal "
                     f"GQA's at context {four:,.0f} ({five:,.0f} where both backward kernels compute the scores), this "
                     f"is {config.data.context_length:,}")  # fmt: skip
    return lines
