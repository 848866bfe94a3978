"""The one entry to decode attention, and the choice of an implementation."""

from jaxtyping import Array, Float, Int

from gva_jax.cache import LAYOUTS
from gva_jax.kernels import reference, xla

IMPLEMENTATIONS = {
    "reference": reference.decode_attention,
    "xla": xla.decode_attention,
}


def check_implementation(name: str | None) -> None:
    """Raises `ValueError` for a name that is no implementation."""
    if name is not None and name not in IMPLEMENTATIONS:
        known = ", ".join(IMPLEMENTATIONS)
        raise ValueError(f"implementation = {name!r}: must be one of {known}, or None for the best")


def decode_attention(
    q: Float[Array, "B T H d"],
    values: Float[Array, "BP G _ _"],
    *,
    keys: Float[Array, "BP G _ _"] | None = None,
    q_rope: Float[Array, "B T H r"] | None = None,
    rope_keys: Float[Array, "BP _ _"] | None = None,
    lengths: Int[Array, "B"],
    q_lengths: Int[Array, "B"] | None = None,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    layout: str = "tokens_major",
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "B T H"]]:
    """Attention of a few new queries over cached tokens; the values are the keys unless `keys` is given.

        s[h] = (q[h]·k[g(h)] + q_rope[h]·rope_key) scale        g(h) = h // (H // G),  k = keys or values

    Args:
      q: queries, absorbed where the values are the keys (their width is then the values').
      values, keys, rope_keys: the cache in `layout` (see `gva_jax.cache`); keys may be of another width than values.
      q_rope: rotated queries that meet `rope_keys`; both or neither.
      lengths: valid cached tokens per row, the new ones included; may be <= 0 or exceed S.
      q_lengths: real queries per row, its first ones (default T). Query t sees positions
        `< lengths - (q_lengths - 1 - t)`.
      scale: factor on the scores; `1/sqrt` of the width that was scored, not of the absorbed width.
      window: see only the last `window` of the visible positions.
      softcap: scaled scores become `c tanh(s/c)`.
      sinks: extra logits, one per head, neither scaled nor capped, that take weight and give no value.
      implementation: a name from `IMPLEMENTATIONS`, or None for the best on the device.

    Returns:
      out in q's dtype, and lse, the natural logarithm of the softmax's denominator (float32; float64 for float64
      inputs), so that partial results merge exactly. Queries that see nothing give out = 0 and lse = -inf (with a
      sink: lse = the sink); queries past `q_lengths` give 0 and -inf. What lies in dead slots, NaN included, has no
      influence.

    Raises:
      ValueError: shapes, layout or names that do not fit, naming the argument.
    """
    check_implementation(implementation)
    if layout not in LAYOUTS:
        raise ValueError(f"layout = {layout!r}: must be one of {', '.join(LAYOUTS)}")
    if (q_rope is None) != (rope_keys is None):
        raise ValueError("q_rope and rope_keys go together: give both or neither")
    (B, T, H, d), G = q.shape, values.shape[1]
    pick = lambda S, width: (S, width) if layout == "tokens_major" else (width, S)
    S, _ = pick(*values.shape[2:])
    _, key_width = pick(*(values if keys is None else keys).shape[2:])
    if d != key_width:
        raise ValueError(f"q has width {d}, its keys {key_width}: an absorbed query has the values' width")
    if H % G:
        raise ValueError(f"q has {H} heads, values have {G} groups: groups must divide heads")
    r = None if q_rope is None else q_rope.shape[-1]
    for name, x, shape in (  # an axis of 1 would be broadcast silently
        ("values", values, (B, *values.shape[1:])),
        ("keys", keys, (B, G, *pick(S, key_width))),
        ("q_rope", q_rope, (B, T, H, r)),
        ("rope_keys", rope_keys, (B, *pick(S, r))),
        ("lengths", lengths, (B,)),
        ("q_lengths", q_lengths, (B,)),
        ("sinks", sinks, (H,)),
    ):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} has shape {x.shape}, must be {shape} beside q {q.shape}, values {values.shape}")
    for name, value in (("window", window), ("softcap", softcap)):
        if value is not None and value <= 0:
            raise ValueError(f"{name} = {value}: must be above 0, or None")
    run = IMPLEMENTATIONS[implementation or "xla"]
    return run(
        q, values, keys=keys, q_rope=q_rope, rope_keys=rope_keys, lengths=lengths, q_lengths=q_lengths,
        scale=float(scale),  # NumPy's scalars would widen the scores where x64 is on
        window=window, softcap=None if softcap is None else float(softcap), sinks=sinks, layout=layout,
    )  # fmt: skip
