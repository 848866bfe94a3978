"""The transformer: initial loss, layouts of the parameters, rematerialisation, dtypes, dropout, packed documents."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cover import thinned
from tiny import ATTENTION, F64, VOCAB, ids, make, relative, weights

from gva_jax.config import AttentionConfig, ConfigError
from gva_jax.model import _rows, stack, unstack


def loss(model, variables, tokens, **kw):
    logits = model.apply(variables, tokens, **kw)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits[:, :-1]), tokens[:, 1:, None], axis=-1).mean()


# ---- initial loss ----------------------------------------------------------------------------------------------------


INITIAL = [
    (64, "mla", False),
    (256, "gqa", True),
    (256, "gva", False),
    (512, "gva", True),
    (512, "gqa", False),
    (512, "mla", True),
]


@pytest.mark.parametrize(("width", "family", "tied"), thinned(INITIAL, 3))
def test_the_initial_loss_is_the_uniforms(width, family, tied):
    """Within 2 % of ln(vocab), up to D = 512."""
    heads = {} if family == "mla" else {"num_kv_heads": max(1, width // 256)}
    rotary = {} if family == "gqa" else {"rope_dim": 16}
    attention = replace(ATTENTION[family], num_heads=width // 64, head_dim=64, **heads, **rotary)
    model = make(model_dim=width, hidden_dim=width, attention=attention, tie_embeddings=tied, vocab_size=4096)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 4096, (4, 64)), jnp.int32)
    found = jax.jit(lambda key: loss(model, model.init(key, tokens), tokens))(jax.random.key(0))
    assert found == pytest.approx(np.log(4096), rel=0.02)


# ---- the same function in other forms --------------------------------------------------------------------------------


def test_scanned_layers_equal_unrolled_ones():
    with jax.enable_x64(True):
        model, tokens = make(**F64), ids()
        variables = weights(model)
        flat, unstacked = unstack(model, variables)
        assert not flat.config.scan_layers and set(unstacked["params"]) > {"layers_0", "layers_1"}
        shapes = jax.eval_shape(flat.init, jax.random.key(0), tokens)
        assert jax.tree.map(jnp.shape, unstacked) == jax.tree.map(jnp.shape, shapes)

        @jax.jit
        def run(variables, unstacked):
            a, b = (
                jax.value_and_grad(lambda v, m=m: loss(m, v, tokens))(v)
                for m, v in ((model, variables), (flat, unstacked))
            )
            return a, (b[0], stack(flat, b[1])[1])

        scanned, unrolled = jax.device_get(run(variables, unstacked))
    for a, b in zip(jax.tree.leaves(scanned), jax.tree.leaves(unrolled), strict=True):
        assert relative(a, b) < 1e-12


def test_stack_undoes_unstack():
    model = make()
    variables = weights(model)
    back, restacked = stack(*unstack(model, variables))
    assert back.config == model.config
    assert jax.tree.structure(restacked) == jax.tree.structure(variables)
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(restacked), jax.tree.leaves(variables), strict=True))
    assert unstack(*unstack(model, variables))[1].keys() == variables.keys()  # and a second time does nothing
    assert stack(model, variables)[1] is variables


@pytest.mark.parametrize(("scan", "layers"), [(True, 2), (False, 1)])
def test_rematerialisation_changes_the_program_and_not_the_result(scan, layers):
    with jax.enable_x64(True):
        tokens = ids()
        levels = ("none", "dots", "attention", "full")
        models = [make(scan_layers=scan, num_layers=layers, remat=remat, **F64) for remat in levels]
        variables = weights(models[0])
        results, products = [], []
        for model in models:
            step = jax.jit(jax.value_and_grad(lambda v, m=model: loss(m, v, tokens))).trace(variables)
            products.append(count_dots(step.jaxpr))
            results.append(jax.device_get(step.lower().compile()(variables)))
    for remat in (1, 2, 3):
        for a, b in zip(jax.tree.leaves(results[remat]), jax.tree.leaves(results[0]), strict=True):
            assert relative(a, b) < 1e-12
    # "dots" computes products with a batch axis again (scores, outputs), "attention" all that lead up to its result or
    # follow it, "full" that as well.
    assert products[0] < products[1] < products[2] < products[3]


def count_dots(jaxpr) -> int:
    """Matrix products in a program, inner programs included (a scan's body counts once)."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.primitive.name == "dot_general"
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns")):
            if hasattr(value, "eqns"):
                total += count_dots(value)
    return total


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def test_the_gradient_of_a_frequent_tokens_embedding_is_summed_in_float32():
    """In bfloat16 its error would be several percent: see the sum of the same terms below."""
    tokens = jnp.asarray(np.random.default_rng(0).choice(3, size=(2, 2_000), p=(0.9, 0.05, 0.05)))
    table = jnp.zeros((3, 16), jnp.bfloat16)
    dx = jnp.asarray(np.random.default_rng(1).normal(size=(2, 2_000, 16)) + 0.1, jnp.bfloat16)
    truth = np.zeros((3, 16))
    np.add.at(truth, np.asarray(tokens), np.asarray(dx, np.float64))
    look_up = lambda table: _rows((table.shape, table.dtype), table, tokens)
    out, pull = jax.vjp(look_up, table)
    (found,) = pull(dx)
    assert out.dtype == found.dtype == jnp.bfloat16
    assert relative(found, truth) < 4e-3  # one rounding
    assert relative(jnp.zeros_like(table).at[tokens].add(dx), truth) > 2e-2


@pytest.mark.parametrize(("tied", "x64"), [(False, False), (True, True)])
def test_a_bfloat16_model_keeps_float32_parameters_and_logits(tied, x64):
    with jax.enable_x64(x64):
        model, tokens = make(dtype="bfloat16", tie_embeddings=tied), ids()
        params = jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]
        assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
        cached = lambda v, t: model.apply(v, t, model.init_cache(2, 20), lengths=jnp.array([3, 4]), method="prefill")
        prompt, caches = jax.eval_shape(cached, {"params": params}, tokens)
        step, _ = jax.eval_shape(lambda *a: model.apply(*a, method="decode"), {"params": params}, tokens[:, :1], caches)
        assert {leaf.dtype for leaf in jax.tree.leaves(caches)} == {jnp.dtype("bfloat16"), jnp.dtype("int32")}
        assert prompt.dtype == step.dtype == jnp.float32
        inner = jax.eval_shape(
            lambda v, t: model.apply(v, t, capture_intermediates=lambda m, _: m.name == "final_norm"),
            {"params": params}, tokens,
        )[1]["intermediates"]  # fmt: skip
        assert {leaf.dtype for leaf in jax.tree.leaves(inner)} == {jnp.dtype("bfloat16")}
    if not x64:
        logits = jax.jit(model.apply)(weights(model), tokens)
        assert logits.dtype == jnp.float32
        assert (logits != logits.astype(jnp.bfloat16)).any(), "logits were rounded to bfloat16 on the way"


def test_parameters_take_the_dtype_that_is_asked_for():
    shapes = jax.eval_shape(make(param_dtype="bfloat16", tie_embeddings=False).init, jax.random.key(0), ids())
    assert {leaf.dtype for leaf in jax.tree.leaves(shapes)} == {jnp.dtype("bfloat16")}


# ---- dropout, documents, the future ----------------------------------------------------------------------------------


def test_dropout_only_with_a_random_key():
    model, without = make(dropout=0.5), make()
    variables, tokens = weights(model), ids()

    @jax.jit
    def run(variables, key, another):
        plain, same = model.apply(variables, tokens), without.apply(variables, tokens)
        return plain, same, [model.apply(variables, tokens, rngs={"dropout": k}) for k in (key, key, another)]

    plain, same, (a, again, b) = run(variables, jax.random.key(1), jax.random.key(2))
    assert (plain == same).all() and (a == again).all()
    assert relative(a, b) > 0.1 and relative(a, plain) > 0.1


def test_documents_and_futures_do_not_leak():
    with jax.enable_x64(True):
        model, tokens = make(**F64), ids(T=9)
        variables = weights(model)
        segments = jnp.array([[0] * 4 + [1] * 5] * 2)
        positions = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
        other = tokens.at[:, 6:].set((tokens[:, 6:] + 1) % VOCAB)

        @jax.jit
        def run(variables):
            packed = model.apply(variables, tokens, positions, segments)
            alone = model.apply(variables, tokens[:, :4]), model.apply(variables, tokens[:, 4:])
            return packed, alone, model.apply(variables, tokens), model.apply(variables, other)

        packed, (first, second), whole, changed = jax.device_get(run(variables))
    assert relative(packed[:, :4], first) < 1e-12 and relative(packed[:, 4:], second) < 1e-12
    assert (whole[:, :6] == changed[:, :6]).all() and (whole[:, 6:] != changed[:, 6:]).any()
    assert relative(whole[:, 4:], packed[:, 4:]) > 1e-3


# ---- decoding, refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scan", [True, False])
def test_prefill_and_decode_equal_the_forward(scan):
    with jax.enable_x64(True):
        model, tokens = make(scan_layers=scan, **F64), ids(T=12)
        variables, lengths = weights(model), jnp.array([9, 4])

        @jax.jit
        def run(variables):
            prefill = lambda **kw: model.apply(
                variables, tokens[:, :9], model.init_cache(2, 20), lengths=lengths, method="prefill", **kw
            )
            prompt, caches = prefill()
            last, _ = prefill(last=True)
            step, _ = model.apply(variables, jnp.stack([tokens[0, 9:11], tokens[1, 4:6]]), caches, method="decode")
            return model.apply(variables, tokens), prompt, last, step

        full, prompt, last, step = jax.device_get(run(variables))
    assert relative(prompt[0], full[0, :9]) < 1e-12 and relative(prompt[1, :4], full[1, :4]) < 1e-12
    assert last.shape == (2, 1, VOCAB)
    assert relative(last[0, 0], full[0, 8]) < 1e-12 and relative(last[1, 0], full[1, 3]) < 1e-12
    assert relative(step[0], full[0, 9:11]) < 1e-12 and relative(step[1], full[1, 4:6]) < 1e-12


def test_a_model_that_cannot_be_is_refused_before_it_is_built():
    for attention, message in (
        (AttentionConfig("gva", 4, k_norm=True), "attention.k_norm"),
        (AttentionConfig("mla", 4), "latent_dim = None"),
        (AttentionConfig("gpa", 4), "attention.family = 'gpa'"),
    ):
        with pytest.raises(ConfigError) as error:
            make(attention=attention)
        assert str(error.value).startswith(message)
