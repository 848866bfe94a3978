"""What one GPU says of the decode kernels: are they right on it, and how fast beside what one would otherwise call.

Run by gpu_check.sh. Pieces run in order of importance while time is left; what was not reached is listed. A piece that
fails is reported and the rest goes on; the exit status is 1 then.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
import threading
import time
import traceback
import types
from pathlib import Path


def without_annotations() -> None:
    """A stand-in for jaxtyping, which here only annotates, on machines where nothing can be installed."""
    annotation = type("Annotation", (), {"__class_getitem__": classmethod(lambda cls, _: cls)})
    names = ("Array", "Bool", "Float", "Int", "Num")
    sys.modules["jaxtyping"] = types.SimpleNamespace(**dict.fromkeys(names, annotation))


try:
    import jaxtyping  # noqa: F401
except ImportError:
    without_annotations()

import cases  # noqa: E402  (tests/kernels)
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402

from gva_jax.bench.shapes import FAMILIES, DecodeShape  # noqa: E402
from gva_jax.kernels import decode_attention  # noqa: E402

KERNELS = ("pallas_mosaic_gpu", "pallas_triton")
BF16, F32 = jnp.bfloat16, jnp.float32


class Check:
    """Pieces of work under one deadline, and what they found."""

    def __init__(self, seconds: float, out: Path):
        self.begun, self.deadline, self.out = time.monotonic(), time.monotonic() + seconds, out
        self.device = jax.devices()[0].device_kind
        self.figures: dict = {"device": self.device, "jax": jax.__version__, "copy_bytes_per_second": None}
        self.figures |= {"numbers": [], "decode": [], "training": []}
        self.failed: list[str] = []
        self.skipped: list[str] = []
        self._lock = threading.Lock()
        self._running = ""
        # A compiler that does not return must not cost the table.
        watch = threading.Timer(max(seconds - 3, 1), self._stop)
        watch.daemon = True
        watch.start()

    def piece(self, name: str, estimate: float, run) -> None:
        """Runs it if `estimate` seconds are left before the deadline, less what the table takes."""
        left = self.deadline - time.monotonic() - 5
        if left < estimate:
            self.skipped.append(name)
            return
        self._running, begun = name, time.monotonic()
        try:
            said = run()
        except Exception as error:
            said = f"FAILED: {type(error).__name__}: {str(error).strip()[:300]}"
            self.failed.append(f"{name}: {said}")
            traceback.print_exc(limit=-3)
        print(f"{time.monotonic() - self.begun:6.1f} s  {name} ({time.monotonic() - begun:.1f} s): {said}", flush=True)
        self._running = ""

    def finish(self) -> int:
        with self._lock:
            text = table(self)
            self.out.mkdir(parents=True, exist_ok=True)
            figures = self.figures | {"failed": self.failed, "skipped": self.skipped}
            (self.out / "gpu_check.json").write_text(json.dumps(figures, indent=1))
            (self.out / "gpu_check.md").write_text(text)
            print("\n" + text, flush=True)
            return 1 if self.failed else 0

    def _stop(self):
        if self._running:
            self.failed.append(f"{self._running}: not finished at the deadline")
        self.finish()
        os._exit(1)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def corner(check: Check, implementation: str, case: cases.Case, dtype, interpret: bool):
    """One case of the shared cover against the brute force in float64; dead slots hold NaN."""
    operands = cases.make(case, dtype)
    out, lse = cases.run_for(implementation, case, dtype, interpret)(cases.poisoned(operands))
    truth, lse_truth = cases.brute_force(case, **operands)
    errors = cases.error(out, truth), cases.error(lse, lse_truth)
    return judge(check, implementation, str(case), dtype, errors)


def judge(check: Check, implementation: str, case: str, dtype, errors) -> str:
    """Keeps the errors of (out, lse), and raises where they pass the limits."""
    dtype, (out, lse) = jnp.dtype(dtype), errors
    check.figures["numbers"].append(
        {"implementation": implementation, "case": case, "dtype": str(dtype), "out": out, "lse": lse}
    )
    limits = cases.TOLERANCE[dtype]
    assert out < limits[0] and lse < limits[1], f"errors {errors}, limits {limits}"
    return f"out {out:.1e}, lse {lse:.1e}"


def long_context(check: Check, implementation: str, B: int, S: int, interpret: bool):
    """GVA in bfloat16 against the same inputs in float64 on the device: many splits, ragged lengths."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, values = jax.random.normal(keys[0], (B, 1, 16, 64), BF16), jax.random.normal(keys[1], (B, 4, S, 64), BF16)
    q_rope, rope_keys = jax.random.normal(keys[2], (B, 1, 16, 16), BF16), jax.random.normal(keys[3], (B, S, 16), BF16)
    lengths = jnp.asarray(np.linspace(S, 1, B), jnp.int32)
    call = lambda name, q, values, q_rope, rope_keys, **options: decode_attention(
        q, values, q_rope=q_rope, rope_keys=rope_keys, lengths=lengths, scale=80**-0.5, implementation=name, **options
    )
    found = jax.jit(functools.partial(call, implementation, interpret=interpret))(q, values, q_rope, rope_keys)
    with jax.enable_x64(True):
        wide = [x.astype(jnp.float64) for x in (q, values, q_rope, rope_keys)]
        truth = jax.jit(functools.partial(call, "reference"))(*wide)
    errors = [cases.error(a, b) for a, b in zip(jax.device_get(found), jax.device_get(truth), strict=True)]
    return judge(check, implementation, f"GVA, B={B}, S={S}", BF16, errors)


# ---- time ------------------------------------------------------------------------------------------------------------


def seconds_of(run, *args, repeats: int = 3) -> float:
    """Least of some runs, compilation not counted."""
    jax.block_until_ready(run(*args))
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - begun)
    return min(times)


def copy_bandwidth(check: Check, nbytes: int):
    """Bytes read and written a second by the simplest program that does nothing else."""
    n = 20
    run = jax.jit(lambda x: lax.fori_loop(0, n, lambda _, x: x + 1, x))
    seconds = seconds_of(run, jnp.zeros(nbytes // 4, F32)) / n
    check.figures["copy_bytes_per_second"] = 2 * nbytes / seconds
    return f"{2 * nbytes / seconds / 1e9:.0f} GB/s"


def decode_time(check: Check, shape: DecodeShape, family: str, implementation: str, interpret: bool):
    """A chain of steps, each one's output the next one's query, so that none overlaps or is left out."""
    G, dv, dk, r = shape.widths(family)
    B, S, H, dtype = shape.batch, shape.context, shape.num_heads, jnp.dtype(shape.dtype)
    key = lambda i: jax.random.key(i)
    arrays = {
        "values": jax.random.normal(key(0), (B, G, S, dv), dtype),
        "keys": jax.random.normal(key(1), (B, G, S, dk), dtype) if dk else None,
        "rope_keys": jax.random.normal(key(2), (B, S, r), dtype) if r else None,
        "q_rope": jax.random.normal(key(3), (B, 1, H, r), dtype) if r else None,
        "lengths": jnp.full((B,), S, jnp.int32),
    }
    q = jax.random.normal(key(4), (B, 1, H, dk or dv), dtype)

    if implementation == "jax.nn":  # its layout is (B, S, G, d)
        arrays = {name: arrays[name].swapaxes(1, 2) for name in ("keys", "values")}
        step = lambda q, a: jax.nn.dot_product_attention(q, a["keys"], a["values"], scale=shape.head_dim**-0.5)
    else:
        options = dict(scale=shape.head_dim**-0.5, implementation=implementation, interpret=interpret)
        step = lambda q, a: decode_attention(q, **a, **options)[0]

    def measure(n):
        run = jax.jit(lambda q, a: lax.fori_loop(0, n, lambda _, q: step(q, a).astype(q.dtype), q))
        return seconds_of(run, q, arrays) / n

    steps = max(3, min(200, int(0.05 * 2e12 / (shape.cost(family)[0] * B)))) if not interpret else 1
    return record(check, shape, family, implementation, measure(steps))


def torch_time(check: Check, shape: DecodeShape):
    """PyTorch's scaled_dot_product_attention on GQA, a graph of steps replayed."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    G, d, B, H, S = shape.num_kv_heads, shape.head_dim, shape.batch, shape.num_heads, shape.context
    draw = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16)
    q, k, v = draw(B, H, 1, d), draw(B, G, S, d), draw(B, G, S, d)
    steps = max(3, min(200, int(0.05 * 2e12 / (shape.cost("gqa")[0] * B))))

    def chain():
        y = q
        for _ in range(steps):
            y = scaled_dot_product_attention(y, k, v, scale=d**-0.5, enable_gqa=True)
        return y

    with torch.no_grad():
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
    del q, k, v, graph
    torch.cuda.empty_cache()
    return record(check, shape, "gqa", "torch", min(times) / steps)


def record(check: Check, shape: DecodeShape, family: str, implementation: str, seconds: float) -> str:
    nbytes = shape.cost(family)[0] * shape.batch
    share = nbytes / seconds / check.figures["copy_bytes_per_second"]
    check.figures["decode"].append({"family": family, "implementation": implementation, "batch": shape.batch,
                                    "context": shape.context, "seconds": seconds, "bytes": nbytes,
                                    "of_copy": share})  # fmt: skip
    return f"{seconds * 1e6:.1f} us, {nbytes / seconds / 1e9:.0f} GB/s, {share:.2f} of copy"


def training_step(check: Check, name: str, batch: int, length: int | None):
    """Three optimiser steps of a 350M model on random tokens: the least time."""
    from gva_jax import sharding
    from gva_jax.config import MeshConfig, load
    from gva_jax.model import Transformer
    from gva_jax.train import optimizer as optimizers
    from gva_jax.train import state as states
    from gva_jax.train.step import make_train_step, put

    run = load(name)
    model_config, T = run.model, length or run.data.context_length
    if length:  # a rehearsal
        model_config = dataclasses.replace(model_config, num_layers=1, vocab_size=512, model_dim=64, hidden_dim=64)
    mesh, model = sharding.make_mesh(MeshConfig(), jax.devices()[:1]), Transformer(model_config)
    optimizer = optimizers.make(run.optimizer, 100)
    schedule = optimizers.learning_rate(run.optimizer, 100)
    abstract = states.abstract(model, optimizer, 0, mesh)
    step = make_train_step(model, optimizer, schedule, abstract, mesh)
    state = states.create(model, optimizer, 0, mesh)
    tokens = np.random.default_rng(0).integers(0, model_config.vocab_size, (batch, T + 1)).astype(np.int32)
    rows = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "segment_ids": np.ones((batch, T), np.int32),
            "positions": np.broadcast_to(np.arange(T, dtype=np.int32), (batch, T))}  # fmt: skip
    data, times, losses = put(rows, mesh), [], []
    for _ in range(4):
        begun = time.perf_counter()
        state, metrics = step(state, data)
        losses.append(float(metrics["loss"]))
        times.append(time.perf_counter() - begun)
    assert np.isfinite(losses).all() and losses[-1] < losses[0], losses
    seconds = min(times[1:])
    check.figures["training"].append({"config": name, "batch": batch, "context": T, "seconds": seconds})
    return f"{seconds * 1e3:.0f} ms, {batch * T / seconds:,.0f} tokens/s, loss {losses[0]:.3f} to {losses[-1]:.3f}"


# ---- the table -------------------------------------------------------------------------------------------------------


def table(check: Check) -> str:
    figures = check.figures
    copy = figures["copy_bytes_per_second"]
    lines = [f"# Decode kernels on {figures['device']}, jax {figures['jax']}, {time.strftime('%Y-%m-%d')}", ""]
    lines += [f"Copy bandwidth, measured: {copy / 1e9:.0f} GB/s" if copy else "Copy bandwidth: not measured", ""]
    for name in KERNELS:
        found = [f for f in figures["numbers"] if f["implementation"] == name]
        if found:
            worst = max(found, key=lambda f: f["out"])
            lines.append(f"- {name}: {len(found)} cases; worst out {worst['out']:.1e} ({worst['case']}, "
                         f"{worst['dtype']}), worst lse {max(f['lse'] for f in found):.1e}")  # fmt: skip
    sizes = list(dict.fromkeys((f["batch"], f["context"]) for f in figures["decode"]))
    calls = list(dict.fromkeys((f["family"], f["implementation"]) for f in figures["decode"]))
    at = {(f["family"], f["implementation"], f["batch"], f["context"]): f for f in figures["decode"]}
    if sizes:
        head = "".join(f" {family} {name} |" for family, name in calls)
        lines += ["", "Microseconds a step (share of copy bandwidth):", "", f"| batch, context |{head} GVA / GQA |",
                  "|---|" + "---|" * (len(calls) + 1)]  # fmt: skip
    for size in sizes:
        cells = [at.get((*call, *size)) for call in calls]
        cells = ["" if f is None else f"{f['seconds'] * 1e6:.1f} ({f['of_copy']:.2f})" for f in cells]
        best = lambda family, size=size: min(
            (f["seconds"] for (of, name, *s), f in at.items() if of == family and tuple(s) == size and name in OURS),
            default=None,
        )
        gva, gqa = best("gva"), best("gqa")
        cells.append(f"{gva / gqa:.3f}" if gva and gqa else "")
        lines.append(f"| {size[0]}, {size[1]:,} | " + " | ".join(cells) + " |")
    for f in figures["training"]:
        rate = f["batch"] * f["context"] / f["seconds"]
        lines += ["", f"Training step, {f['config']}, {f['batch']} x {f['context']}: {f['seconds'] * 1e3:.0f} ms, "
                  f"{rate:,.0f} tokens/s"]  # fmt: skip
    for title, names in (("Failed", check.failed), ("Not reached in the time", check.skipped)):
        if names:
            lines += ["", f"{title}:"] + [f"- {name}" for name in names]
    return "\n".join(lines) + "\n"


OURS = (*KERNELS, "xla")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=330)
    parser.add_argument("--rehearse", action="store_true", help="tiny, on a CPU, kernels interpreted")
    options = parser.parse_args()
    rehearse = options.rehearse
    if not rehearse and jax.default_backend() != "gpu":
        print(f"no GPU: JAX runs on {jax.default_backend()}; --rehearse goes through the motions", file=sys.stderr)
        return 2
    check = Check(options.seconds, options.out)
    check.piece("copy bandwidth", 0, lambda: copy_bandwidth(check, (1 << 20) if rehearse else (2 << 30)))

    # What a kernel cannot run on this card or JAX is said once, by the kernel itself.
    probe = DecodeShape(num_heads=4, num_kv_heads=2, head_dim=32, latent_dim=64) if rehearse else DecodeShape()
    usable = []
    for name in KERNELS:
        if refused := refusal(name, rehearse):
            check.skipped.append(f"{name}: {refused}")
            continue
        usable.append(name)
        cases.small_blocks(name)

    def numbers(chosen):
        for case in chosen:
            for name in usable:
                dtypes = (BF16,) if name in cases.COMPUTES_IN else (F32, BF16)
                for dtype in dtypes:
                    check.piece(f"{name}, {jnp.dtype(dtype)}, {case}", 4,
                                lambda n=name, c=case, t=dtype: corner(check, n, c, t, rehearse))  # fmt: skip

    cover = cases.NAMED + cases.pairwise()
    numbers(cover[:1] if rehearse else cover[:8])
    sizes = [(16, 32768), (1, 131072), (128, 8192), (128, 131072), (16, 8192), (1, 32768), (128, 32768), (16, 131072),
             (1, 8192)]  # fmt: skip
    for at, (batch, context) in enumerate([(1, 256)] if rehearse else sizes):
        shape = dataclasses.replace(probe, batch=batch, context=context)
        gigabytes = batch * context * 2048 / 1e9
        estimate = 6 + gigabytes / 4
        for family in FAMILIES:
            for name in usable:
                check.piece(f"time, {family}, {name}, batch {batch}, context {context:,}", estimate,
                            lambda f=family, n=name, s=shape: decode_time(check, s, f, n, rehearse))  # fmt: skip
        check.piece(f"time, gqa, jax.nn, batch {batch}, context {context:,}", estimate,
                    lambda s=shape: decode_time(check, s, "gqa", "jax.nn", False))  # fmt: skip
        if not rehearse:
            check.piece(f"time, gqa, torch, batch {batch}, context {context:,}", estimate,
                        lambda s=shape: torch_time(check, s))  # fmt: skip
        if at == 1 or rehearse:
            for name in ("gva_350m", "gqa_350m"):
                size = (2, 32) if rehearse else (8, None)
                check.piece(f"training step, {name}", 1 if rehearse else 40,
                            lambda n=name, size=size: training_step(check, n, *size))  # fmt: skip
        if at == 2 or rehearse:
            for name in usable:
                long = (2, 512) if rehearse else (16, 32768)
                check.piece(f"{name}, long context", 8,
                            lambda n=name, size=long: long_context(check, n, *size, rehearse))  # fmt: skip
    numbers([] if rehearse else cover[8:])
    return check.finish()


def refusal(name: str, rehearse: bool) -> str | None:
    """Why the kernel cannot run here, or None."""
    q, values = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((1, 1, 16, 64), (1, 4, 256, 64)))
    try:
        jax.eval_shape(
            lambda q, v: decode_attention(q, v, lengths=jnp.ones((1,), jnp.int32), scale=1.0, implementation=name,
                                          interpret=rehearse),
            q, values,
        )  # fmt: skip
    except ValueError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main())
