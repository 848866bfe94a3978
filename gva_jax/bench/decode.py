"""One decode step's attention, families side by side on the same template: time, bytes read, share of copy bandwidth.

Rounds are interleaved (A B C A B C ...), so that whatever else the machine does falls on all alike, and medians are
reported. Bytes are those a step must read: the live tokens of every cache operand once.
"""

import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from gva_jax import runtime
from gva_jax.bench.shapes import FAMILIES, DecodeShape
from gva_jax.cache import init_cache
from gva_jax.chips import CHIPS
from gva_jax.config import require
from gva_jax.display import Display
from gva_jax.kernels import decode_attention
from gva_jax.kernels.api import IMPLEMENTATIONS
from gva_jax.options import parse

EINSUM = "einsum"
COPY_BYTES = 256 * 2**20


@dataclass(frozen=True)
class DecodeOptions(DecodeShape):
    """The options of `gva bench decode`."""

    # Implementation to measure; repeat it for several. Default: the device's best. `einsum` is what one would write
    # without a kernel: scores, softmax and output over a cache as projections leave it, (B, S, G, d).
    implementation: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    # Interleaved rounds; medians over them are reported.
    rounds: int = 20
    # Print the least time that accelerators allow, instead of measuring.
    roofline: tyro.conf.FlagCreatePairsOff[bool] = False
    # Print the figures as JSON.
    json: tyro.conf.FlagCreatePairsOff[bool] = False

    def __post_init__(self):
        super().__post_init__()
        require(self.rounds >= 1, "rounds", self.rounds, "must be 1 or more")
        for name in self.implementation:
            known = (*IMPLEMENTATIONS, EINSUM)
            require(name in known, "implementation", name, f"must be one of {', '.join(known)}")


def main(args: list[str], description: str) -> None:
    """`gva bench decode`: measure, or print the roofline."""
    options = parse(DecodeOptions, args, "gva bench decode", description)
    if options.roofline:
        print(json.dumps(roofline(options), indent=2)) if options.json else Display().show(roofline_table(options))
        return
    display = Display(console=Console(stderr=True, highlight=False, soft_wrap=True))
    runtime.start(display)
    found, bandwidth = measure(options, implementations=options.implementation, rounds=options.rounds, display=display)
    if options.json:
        figures = {"copy_bytes_per_second": bandwidth, "steps": [dataclasses.asdict(m) for m in found]}
        print(json.dumps(figures, indent=2))
    else:
        Display().show(table(options, found, bandwidth))


@dataclass(frozen=True)
class Measurement:
    """Median seconds of a step, the bytes it must read, and what share of copy bandwidth that is."""

    family: str
    implementation: str
    seconds: float
    nbytes: int
    flops: int
    bytes_per_second: float
    of_copy: float
    time_ratio_to_gqa: float | None = None


def measure(
    shape: DecodeShape, *, implementations: tuple[str, ...] = (), rounds: int = 20, display: Display | None = None
) -> tuple[list[Measurement], float]:
    """Every family with every implementation (default: the device's best), and the copy bandwidth in bytes/s."""
    display = display or Display(quiet=True)
    steps: dict[tuple[str, str], Callable] = {}
    for family in FAMILIES:
        for name in implementations or (None,):
            steps[family, name or "default"] = _step(shape, family, name)
    copy = _copy()
    times: dict = {key: [] for key in [*steps, "copy"]}
    with display.task("bench", (rounds + 1) * len(times)) as task:
        for at in range(rounds + 1):
            for key, run in [*steps.items(), ("copy", copy)]:
                begun = time.perf_counter()
                run()
                if at:  # the first round compiles
                    times[key].append(time.perf_counter() - begun)
                task.advance()
    bandwidth = 2 * COPY_BYTES / statistics.median(times["copy"])
    medians = {key: statistics.median(times[key]) for key in steps}
    found = []
    for (family, name), seconds in medians.items():
        nbytes, flops = (x * shape.batch for x in shape.cost(family))
        rate, gqa = nbytes / seconds, medians["gqa", name]
        found.append(Measurement(family, name, seconds, nbytes, flops, rate, rate / bandwidth, seconds / gqa))
    return found, bandwidth


def roofline(shape: DecodeShape) -> list[dict]:
    """Bytes, FLOPs and the least microseconds per token on chips that need not be here."""
    rows = []
    for family in FAMILIES:
        nbytes, flops = shape.cost(family)
        bounds = {chip.name: chip.bound(nbytes, flops) * 1e6 for chip in CHIPS}
        rows.append({"family": family, "bytes": nbytes, "flops": flops, "microseconds": bounds})
    return rows


def table(shape: DecodeShape, found: list[Measurement], bandwidth: float) -> Table:
    title = f"decode, batch {shape.batch}, context {shape.context:,}, {shape.dtype}; copy {bandwidth / 1e9:.1f} GB/s"
    rows = Table(title=title, title_justify="left")
    for column in ("family", "implementation", "ms", "MB read", "GB/s", "of copy", "time / GQA"):
        rows.add_column(column, justify="left" if column in ("family", "implementation") else "right")
    for m in found:
        rows.add_row(m.family, m.implementation, f"{m.seconds * 1e3:.3f}", f"{m.nbytes / 1e6:.1f}",
                      f"{m.bytes_per_second / 1e9:.1f}", f"{m.of_copy:.2f}", f"{m.time_ratio_to_gqa:.3f}")  # fmt: skip
    return rows


def roofline_table(shape: DecodeShape) -> Table:
    title = f"per token and layer at context {shape.context:,}, {shape.dtype}; data sheets, nothing measured"
    rows, families = Table(title=title, title_justify="left"), roofline(shape)
    rows.add_column("")
    for family in families:
        rows.add_column(family["family"], justify="right")
    rows.add_row("bytes", *(f"{family['bytes']:,}" for family in families))
    rows.add_row("FLOPs", *(f"{family['flops']:,}" for family in families), end_section=True)
    for chip in CHIPS:
        rows.add_row(f"{chip.name}, microseconds", *(f"{f['microseconds'][chip.name]:.2f}" for f in families))
    return rows


def _step(shape: DecodeShape, family: str, implementation: str | None) -> Callable[[], None]:
    """A compiled, blocking decode step on arrays of its own."""
    G, dv, dk, r = shape.widths(family)
    B, H, dtype = shape.batch, shape.num_heads, jnp.dtype(shape.dtype)
    keys = iter(jax.random.split(jax.random.key(0), 5))
    fill = lambda x: None if x is None else jax.random.normal(next(keys), x.shape, dtype)
    cache = init_cache(B, shape.context, groups=G, value_dim=dv, key_dim=dk, rope_dim=r, dtype=dtype)
    args = {
        "values": fill(cache.values),
        "keys": fill(cache.keys),
        "rope_keys": fill(cache.rope_keys),
        "q": jax.random.normal(next(keys), (B, 1, H, dk or dv), dtype),
        "q_rope": jax.random.normal(next(keys), (B, 1, H, r), dtype) if r else None,
        "lengths": jnp.full((B,), shape.context, jnp.int32),
    }
    scale = shape.head_dim**-0.5
    if implementation == EINSUM:
        lanes = ("values", "keys", "rope_keys") if cache.layout == "tokens_minor" else ()
        turn = lambda name, x: x.swapaxes(-1, -2) if name in lanes and x is not None else x
        args = {name: turn(name, x) for name, x in args.items()}
        args |= {name: args[name].swapaxes(1, 2) for name in ("values", "keys") if args[name] is not None}
        run = jax.jit(lambda args: _einsum(**args, scale=scale))
    else:
        options = dict(scale=scale, layout=cache.layout, implementation=implementation)
        run = jax.jit(lambda args: decode_attention(**args, **options))
    return lambda: jax.block_until_ready(run(args))


def _einsum(q, values, keys, rope_keys, q_rope, lengths, scale):
    """values (B, S, G, dv), keys (B, S, G, dk) or None, rope_keys (B, S, r) or None; softmax in float32."""
    (B, _, H, _), (_, S, G, _) = q.shape, values.shape
    group = lambda x: x.reshape(B, G, H // G, -1)
    s = jnp.einsum("BGhd,BSGd->BGhS", group(q), values if keys is None else keys)
    if q_rope is not None:
        s = s + jnp.einsum("BGhr,BSr->BGhS", group(q_rope), rope_keys)
    live = jnp.arange(S) < lengths[:, None, None, None]
    p = jax.nn.softmax(jnp.where(live, s.astype(jnp.float32) * scale, -jnp.inf))
    return jnp.einsum("BGhS,BSGd->BGhd", p.astype(q.dtype), values).reshape(B, 1, H, -1)


def _copy() -> Callable[[], None]:
    """Reads and writes COPY_BYTES each, in place: fresh memory would be measured too."""
    kept = [jnp.zeros(COPY_BYTES // 4, jnp.float32)]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)

    def run():
        kept.append(jax.block_until_ready(add(kept.pop())))

    return run
