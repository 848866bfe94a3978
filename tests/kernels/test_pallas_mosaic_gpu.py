"""The Mosaic GPU kernel beside what all implementations are tried on: other generations of cards, shared memory that is
used again, which card gets which kernel, and what is refused. It is compiled in tests/aot.
"""

import functools
import re
import types
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BF16, Case, Run, assert_same_bits, brute_force, error, make, poisoned

from gva_jax.kernels import decode_attention, pallas_mosaic_gpu
from gva_jax.kernels.pallas_mosaic_gpu import plan as planning

CARDS = {  # compute capability, name, multiprocessors, shared memory a block
    "a100": ((8, 0), "NVIDIA A100-SXM4-80GB", 108, 166912),
    "h100": ((9, 0), "NVIDIA H100 80GB HBM3", 132, 232448),
    "b200": ((10, 0), "NVIDIA B200", 148, 232448),
    "rtx": ((12, 0), "NVIDIA RTX PRO 6000", 188, 101376),
}
RUN_ON = ("h100", "b200", "rtx")
TOLERANCE = 1e-2  # of a bfloat16 output, largest difference over largest entry
NEW = jax.__version_info__ >= (0, 11)
new_jax = pytest.mark.skipif(not NEW, reason="needs JAX 0.11 or newer")


# ---- numbers ---------------------------------------------------------------------------------------------------------

LONG = {"tokens": 1024, "lengths": np.array([1024, 700, 65]), "q_lengths": np.array([16, 3, 1])}
CASES = [
    Case(8, 2, r=16),  # two groups a program on Hopper
    Case(5, 1, T=16, d=32, r=24, window=126, sinks=True),  # tiles of rows; the first query sees one block more
    Case(6, 2, T=2, d=80, keys=96, r=16, softcap=3.0, page=128, stored="int8"),
    Case(8, 2, d=96, stored="float8_e4m3fn", window=130),
    Case(3, 1, d=256, r=64, page=256),
]


@pytest.fixture
def one_split(monkeypatch):
    """More blocks a program than it holds at once."""
    monkeypatch.setattr(planning, "SPLIT", 10**6)


def run(case, operands, dtype=BF16, **options):
    return Run(case, "pallas_mosaic_gpu", dtype, **{"interpret": True} | options)(operands)


@new_jax
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("card", RUN_ON)
def test_shared_memory_is_used_again(card, case, one_split, monkeypatch):
    monkeypatch.setattr(pallas_mosaic_gpu, "INTERPRETED", CARDS[card][0])
    operands = make(case, BF16, **LONG)
    found = run(case, operands)
    for a, b in zip(found, brute_force(case, **operands), strict=True):
        assert error(a, b) < TOLERANCE
    assert_same_bits(found, run(case, poisoned(operands)))


@new_jax
def test_float16():
    case = CASES[0]
    operands = make(case, jnp.float16, **LONG)
    for a, b in zip(run(case, operands, jnp.float16), brute_force(case, **operands), strict=True):
        assert error(a, b) < TOLERANCE / 4


@new_jax
def test_dead_blocks_are_not_read(monkeypatch):
    """Where values are not cleared NaN shows if it is read: past the last block or ahead of the window it is not."""
    from gva_jax.kernels.pallas_mosaic_gpu import blocks

    case, block = Case(8, 1, d=64, window=100), 128
    operands = make(case, BF16, tokens=512, lengths=np.array([300, 1, 0, 512]), q_lengths=np.ones(4, np.int32))
    length, token = operands["lengths"][:, None], np.arange(512)
    clean = run(case, operands)
    monkeypatch.setattr(blocks, "clear", lambda ref, first_dead, layout: None)
    nan = lambda where: operands | {"values": np.where(where[:, None, :, None], np.nan, operands["values"])}
    read = (token < -(-length // block) * block) & (token >= np.maximum(length - 100, 0) // block * block)
    assert_same_bits(clean, run(case, nan(~read)))
    out, _ = run(case, nan(read & (token >= length)))
    np.testing.assert_array_equal(np.isnan(out.astype(np.float32)).any((1, 2, 3)), (read & (token >= length)).any(1))


@new_jax
@pytest.mark.parametrize(("keys", "stored"), [(None, None), (80, None), (None, "int8")])
def test_each_block_is_copied_once(keys, stored, monkeypatch):
    """Of each stream, in a step of the loop and ahead of it: of the values too, which are keys at the same time."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    case, copy, seen = Case(8, 2, d=128, r=32, keys=keys, stored=stored), plgpu.copy_gmem_to_smem, Counter()
    widths = {128: "values", 80: "keys", 32: "rope_keys"}

    def counted(source, target, barrier):
        if source.shape[0] in (64, 128) and len(source.shape) == 2:
            seen[widths[source.shape[1]]] += 1
        elif len(source.shape) == 1:
            seen["scales"] += 1
        copy(source, target, barrier)

    monkeypatch.setattr(plgpu, "copy_gmem_to_smem", counted)
    operands = make(case, BF16, tokens=256, lengths=np.array([200]), q_lengths=np.array([1]))
    run(case, operands)
    streams = {"values", "rope_keys"} | ({"keys"} if keys else set()) | ({"scales"} if stored else set())
    assert seen == dict.fromkeys(streams, planning.STAGES + 1)  # those ahead of the loop, and the one in it


@new_jax
def test_an_interpreter_with_other_parameters():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    case = Case(4, 1, d=64, page=128)
    operands = make(case, BF16, tokens=256, lengths=np.array([200]), q_lengths=np.array([1]))
    found = run(case, operands, interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert_same_bits(found, run(case, operands))


# ---- which card, which kernel, how many programs ---------------------------------------------------------------------


def abstract_mesh(card, *, with_capability=True):
    (major, minor), name, cores, _ = CARDS[card]
    kind = jax.sharding.AbstractDevice
    if with_capability:
        kind = type("Device", (kind,), {"compute_capability": f"{major}.{minor}"})
    return jax.sharding.AbstractMesh((1,), ("x",), abstract_device=kind(name, cores, "cuda"))


def arguments(B=8, T=1, H=16, G=4, d=64, r=16, S=8192, dtype="bfloat16", keys=None, cache=None, page=None, sinks=False):
    """Shapes of `decode_attention`'s operands."""
    shape = jax.ShapeDtypeStruct
    pages, tokens = (B, S) if page is None else (B * S // page, page)
    scales = shape((pages, G, tokens), "float32") if cache and jnp.dtype(cache).itemsize == 1 else None
    return {
        "q": shape((B, T, H, keys or d), dtype),
        "values": shape((pages, G, tokens, d), cache or dtype),
        "keys": shape((pages, G, tokens, keys), cache or dtype) if keys else None,
        "q_rope": shape((B, T, H, r), dtype) if r else None,
        "rope_keys": shape((pages, tokens, r), dtype) if r else None,
        "lengths": shape((B,), "int32"),
        "q_lengths": shape((B,), "int32"),
        "sinks": shape((H,), "float32") if sinks else None,
        "value_scales": scales,
        "key_scales": scales if keys else None,
        "page_table": shape((B, S // page), "int32") if page else None,
    }


OPTIONS = ("window", "softcap", "layout", "implementation", "interpret")


def call(sizes):
    """(f, its operands' shapes)."""
    options = {name: sizes[name] for name in OPTIONS if name in sizes}

    def f(operands):
        operands = dict(operands)
        return decode_attention(operands.pop("q"), operands.pop("values"), **operands, **options, scale=0.1)

    return f, arguments(**{name: size for name, size in sizes.items() if name not in options})


def chosen(card, *, with_capability=True, **sizes):
    """The name of the kernel that runs, and its first result's shape."""
    f, operands = call(sizes)
    with jax.sharding.use_abstract_mesh(abstract_mesh(card, with_capability=with_capability)):
        equations = list(_all_equations(jax.make_jaxpr(f)(operands).jaxpr))
    for e in equations:
        if "gva_decode" in (name := str(e.params.get("name") or e.params.get("name_and_src_info") or "")):
            return re.search(r"gva_decode_\w+?(?= |$)", name).group(0), e.outvars[0].aval.shape
    return "xla", None


def _all_equations(jaxpr):
    for e in jaxpr.eqns:
        yield e
        for inner in (e.params.get("call"), e.params.get("jaxpr")):
            if hasattr(inner, "jaxpr"):
                yield from _all_equations(inner.jaxpr)


@pytest.mark.parametrize(
    ("card", "sizes", "name"),
    [
        ("h100", {}, "mosaic"),
        ("b200", {}, "mosaic"),
        ("h100", {"cache": "int8", "keys": 80, "r": 24}, "mosaic"),
        ("a100", {}, "triton"),
        ("rtx", {}, "triton"),
        ("h100", {"with_capability": False}, "triton"),
        ("h100", {"dtype": "float32"}, "triton"),
        ("h100", {"d": 72}, "triton"),
        ("b200", {"S": 8200}, None),
    ],
)
def test_the_default(card, sizes, name):
    name = "triton" if name == "mosaic" and not NEW else name
    assert chosen(card, **sizes)[0] == ("xla" if name is None else f"gva_decode_{name}")


def test_a_mesh_of_the_machines_own_cards(monkeypatch):
    """Its abstract device does not tell the capability, the cards do."""
    _, name, cores, _ = CARDS["h100"]
    card = types.SimpleNamespace(device_kind=name, core_count=cores, platform="gpu", compute_capability="9.0")
    monkeypatch.setattr(jax, "devices", lambda *backend: [card])
    assert chosen("h100", with_capability=False)[0] == ("gva_decode_mosaic" if NEW else "gva_decode_triton")


@new_jax
@pytest.mark.parametrize(
    ("B", "S", "sizes", "splits"),
    [
        (1, 131072, {}, 264),  # two programs with two groups each would fill a card 264 times over
        (1, 8192, {}, 32),
        (16, 32768, {}, 16),
        (256, 131072, {}, 1),
        (4, 65536, {"H": 16, "G": 1, "d": 512, "r": 64}, 33),  # one program fills a multiprocessor
    ],
)
def test_small_batches_fill_the_card(B, S, sizes, splits):
    assert chosen("h100", B=B, S=S, **sizes)[1][0] == splits


# ---- refusals --------------------------------------------------------------------------------------------------------


@new_jax
@pytest.mark.parametrize(
    ("card", "change", "message"),
    [
        ("h100", {"S": 380}, "values have 380 tokens: must be a multiple of 128"),
        ("h100", {"layout": "tokens_minor", "d": 128, "S": 128, "r": 0}, "layout = 'tokens_minor': must be"),
        ("h100", {"dtype": "float32"}, "q is float32: must be one of bfloat16, float16, the tensor cores' own"),
        ("h100", {"cache": "float32"}, "values are float32 beside q in bfloat16: must be one of bfloat16, int8"),
        ("h100", {"cache": "int8", "dtype": "float16"}, "values are int8 beside q in float16: must be one of float16"),
        ("h100", {"d": 72}, "values in bfloat16 have width 72: must be a multiple of 16, or at most 64"),
        ("h100", {"r": 4}, "rope_keys in bfloat16 have width 4: a token's row must be a multiple of 16 bytes"),
        ("h100", {"d": 1024, "keys": 1024, "H": 4}, "a tile of 64 tokens takes .* bytes of shared memory: must be at"),
        ("h100", {"interpret": "races"}, "interpret = 'races': must be True, False or an InterpretGPUParams"),
        ("a100", {}, "the card's compute capability is 8.0: must be one of 9.x, 10.x, 12.x; use"),
    ],
)
def test_what_it_cannot_run_is_refused(card, change, message):
    with pytest.raises(ValueError, match=f"pallas_mosaic_gpu: {message}"):
        chosen(card, **{"B": 2, "S": 384, "implementation": "pallas_mosaic_gpu"} | change)


def test_an_unknown_card_another_platform_and_an_old_jax_are_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"compute capability is unknown|must be 0\.11 or newer"):
        chosen("h100", with_capability=False, implementation="pallas_mosaic_gpu")
    q, values = jnp.ones((1, 1, 4, 16), BF16), jnp.ones((1, 2, 128, 16), BF16)
    attend = functools.partial(decode_attention, q, values, lengths=jnp.array([3]), scale=1.0)
    with pytest.raises(ValueError, match="pallas_mosaic_gpu runs on GPUs, the target is cpu: pass interpret=True"):
        attend(implementation="pallas_mosaic_gpu")
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    with pytest.raises(ValueError, match=r"must be 0\.11 or newer; use pallas_triton or xla"):
        attend(implementation="pallas_mosaic_gpu", interpret=True)
