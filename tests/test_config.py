"""Configs: validation, JSON, files, and what the shipped ones say."""

import dataclasses

import pytest

from gva_jax import config as c
from gva_jax.config import AttentionConfig, ConfigError, DataConfig, RunConfig, TrainConfig
from gva_jax.options import GenerateOptions, PrepareOptions

SHIPPED = (
    "gatedv_medium",
    "gatedv_medium_full_glu",
    "gatedv_medium_headwise_g2",
    "gatedv_medium_reduced_glu",
    "gatedv_medium_silu",
    "gatedv_medium_tanh_gate",
    "gatedv_small",
    "gatedv_small_silu",
    "gqa_350m",
    "gva_350m",
    "gva_350m_baseline",
    "gva_350m_r24",
    "gva_350m_scale_matched",
    "gva_350m_silu",
    "mla_350m",
    "quickstart",
)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: AttentionConfig(num_heads=6, num_kv_heads=4), "num_kv_heads = 4: must divide num_heads = 6"),
        (lambda: AttentionConfig(num_kv_heads=0), "num_kv_heads = 0"),
        (lambda: AttentionConfig(num_heads=0), "num_heads = 0"),
        (lambda: AttentionConfig(head_dim=0), "head_dim = 0"),
        (lambda: AttentionConfig(head_dim=63), "head_dim = 63: must be even for full RoPE"),
        (lambda: AttentionConfig(rope_dim=15), "rope_dim = 15: must be even"),
        (lambda: AttentionConfig(rope_dim=-2), "rope_dim = -2: must be even and not negative"),
        (lambda: AttentionConfig(rope_dim=64, head_dim=64), "rope_dim = 64: must be below head_dim = 64"),
        (lambda: AttentionConfig(latent_dim=0), "latent_dim = 0"),
        (lambda: AttentionConfig(rope_base=1.0), "rope_base = 1.0"),
        (lambda: c.ModelConfig(num_layers=0), "model.num_layers = 0"),
        (lambda: c.ModelConfig(dropout=1.0), "model.dropout = 1.0"),
        (lambda: DataConfig(context_length=0), "data.context_length = 0"),
        (lambda: DataConfig(holdout=0.5), "data.holdout = 0.5"),
        (lambda: DataConfig(max_bytes=0), "data.max_bytes = 0"),
        (lambda: c.OptimizerConfig(learning_rate=0.0), "optimizer.learning_rate = 0.0"),
        (lambda: c.OptimizerConfig(learning_rate=float("nan")), "optimizer.learning_rate = nan"),
        (
            lambda: c.OptimizerConfig(learning_rate=float("inf")),
            "optimizer.learning_rate = inf: must be a finite",
        ),
        (lambda: c.OptimizerConfig(eps=-1.0), "optimizer.eps = -1.0: must be above 0"),
        (lambda: c.SampleConfig(temperature=float("inf")), "sample.temperature = inf: must be a finite number"),
        (lambda: TrainConfig(steps=10**22), f"train.steps = {10**22}: must be below 2**31"),
        (lambda: TrainConfig(seed=2**32), "train.seed = 4294967296: must be at least 0 and below 2**32"),
        (lambda: TrainConfig(seed=-1), "train.seed = -1: must be at least 0"),
        (lambda: DataConfig(seed=-1), "data.seed = -1: must be at least 0"),
        (lambda: GenerateOptions(".", ("a",), seed=-1), "seed = -1: must be at least 0"),
        (lambda: GenerateOptions(".", ("a",), temperature=float("inf")), "temperature = inf: must be a finite number"),
        (lambda: PrepareOptions("s", "o", shard_megabytes=float("inf")), "shard_megabytes = inf: must be a finite"),
        (lambda: PrepareOptions("s", "o", vocab_size=99_999_999_999), "vocab_size = 99999999999: must be below 2**31"),
        (lambda: c.OptimizerConfig(clip_norm=0.0), "optimizer.clip_norm = 0.0"),
        (lambda: c.MeshConfig(data=0), "mesh.data = 0"),
        (lambda: c.MeshConfig(context=0), "mesh.context = 0: must be 1 or more"),
        (lambda: TrainConfig(steps=-3), "train.steps = -3: must be 1 or more"),
        (lambda: TrainConfig(eval_every=-1), "train.eval_every = -1"),
        (lambda: c.SampleConfig(top_p=0.0), "sample.top_p = 0.0"),
        (lambda: RunConfig(name="../up"), "name = '../up'"),
        (lambda: RunConfig(name=""), "name = ''"),
        (
            lambda: RunConfig(data=DataConfig(batch_size=8), train=TrainConfig(accumulation=3)),
            "train.accumulation = 3: must divide data.batch_size = 8",
        ),
    ],
)
def test_mistakes_are_refused_with_the_field_its_value_and_what_is_right(make, field):
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value).startswith(field)
    assert "\n" not in str(error.value)


def test_shipped_configs_are_these_and_each_is_named_after_its_file():
    assert tuple(c.shipped()) == SHIPPED
    for name in SHIPPED:
        assert c.load(name).name == name
        assert c.load(c.configs_folder() / f"{name}.py") == c.load(name)


@pytest.mark.parametrize("name", SHIPPED)
def test_json_round_trip(name):
    config = c.load(name)
    assert c.from_dict(RunConfig, c.to_dict(config)) == config
    assert c.difference(config, c.from_dict(RunConfig, c.to_dict(config))) == []


def test_an_unknown_field_in_json_is_refused_by_its_dotted_name():
    values = c.to_dict(RunConfig())
    values["model"]["attention"]["windw"] = 3
    with pytest.raises(ConfigError, match=r"model\.attention\.windw: no such field"):
        c.from_dict(RunConfig, values)


def test_difference_names_every_changed_field():
    old = c.load("gva_350m")
    new = dataclasses.replace(old, train=dataclasses.replace(old.train, steps=7), name="other")
    assert c.difference(old, new) == ["name: 'gva_350m' -> 'other'", "train.steps: 57221 -> 7"]


def test_the_350m_family_differs_in_its_attention_only():
    """A comparison between sisters is a comparison of attention: same data, optimiser, length and shape."""
    base = c.load("gva_350m")
    for name in SHIPPED:
        if name.endswith("_350m") or name.startswith("gva_350m_"):
            changed = [line.partition(":")[0] for line in c.difference(base, c.load(name))]
            assert all(path == "name" or path.startswith("model.attention.") for path in changed), name


def test_the_350m_family_is_the_papers():
    config = c.load("gva_350m")
    model, attention = config.model, config.model.attention
    assert (model.num_layers, model.model_dim, model.hidden_dim, model.vocab_size) == (24, 1024, 3072, 50_304)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (16, 4, 64)
    assert (attention.rope_dim, attention.q_norm, attention.key_init) == (16, True, "scale_matched")
    assert config.data.context_length == 2048
    a_step = config.data.batch_size * config.data.context_length
    assert 0 <= config.train.steps * a_step - 30_000_000_000 < a_step

    rows = {name: c.load(f"gva_350m_{name}").model.attention for name in ("baseline", "scale_matched", "r24")}
    row = lambda a: (a.rope_dim, a.q_norm, a.key_init)
    assert row(rows["baseline"]) == (None, False, "default")
    assert row(rows["scale_matched"]) == (None, True, "scale_matched")
    assert row(rows["r24"]) == (24, True, "scale_matched")
    mla = c.load("mla_350m").model.attention
    assert (mla.latent_dim, mla.rope_dim) == (256, 16)


def test_the_gatedv_sizes_are_the_papers():
    for name, layers, width, heads, head_dim, hidden in (
        ("gatedv_small", 6, 128, 4, 32, 384),
        ("gatedv_medium", 12, 384, 6, 64, 1152),
    ):
        config = c.load(name)
        model, attention = config.model, config.model.attention
        assert (model.num_layers, model.model_dim, model.hidden_dim, model.vocab_size) == (layers, width, hidden, 8192)
        assert (attention.family, attention.num_heads, attention.head_dim) == ("mha", heads, head_dim)
        assert (config.data.context_length, config.data.batch_size, config.data.layout) == (256, 8, "windows")
    assert config.train.steps == 327_680 and config.optimizer.learning_rate == 3e-4


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_variant_beside_its_base_loads(tmp_path):
    (tmp_path / "mybase.py").write_text("from gva_jax.config import RunConfig\ndef config(): return RunConfig()\n")
    variant = "import dataclasses\nfrom mybase import config as base\n"
    (tmp_path / "variant.py").write_text(variant + "def config(): return dataclasses.replace(base(), name='variant')\n")
    assert c.load(tmp_path / "variant.py").name == "variant"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "must define a function config"),
        ("def config(): return 3\n", "config() returned int"),
        ("def config(): return dict(1)\n", "config() raised TypeError"),
        ("import nowhere_to_be_found\n", "does not load: ModuleNotFoundError"),
        ("def config(:\n", "does not load: SyntaxError"),
        ("from gva_jax.config import TrainConfig\ndef config(): return TrainConfig(steps=0)\n", "train.steps = 0"),
    ],
)
def test_a_file_that_is_no_config_says_why(tmp_path, text, message):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        c.load(path)
    assert message in str(error.value)


def test_a_missing_config_lists_the_shipped_ones(tmp_path):
    for name in ("quickstrat", str(tmp_path / "none.py")):
        with pytest.raises(ConfigError, match=r"no such file or shipped config; shipped are gatedv_medium"):
            c.load(name)


def test_the_cache_folder_follows_its_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("GVA_JAX_CACHE", str(tmp_path))
    assert c.cache_folder() == tmp_path
    assert c.cache_folder("elsewhere").name == "elsewhere"
    monkeypatch.delenv("GVA_JAX_CACHE")
    assert c.cache_folder().parts[-2:] == (".cache", "gva_jax")
