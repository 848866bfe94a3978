"""What a study refuses, which members it has and in which order; equal draws for equal parameters."""

from dataclasses import replace

import jax
import numpy as np
import pytest
import small
from cover import thinned

from gva_jax import config as configs
from gva_jax.config import ConfigError
from gva_jax.model import Transformer
from gva_jax.study import Search, Study, Variant, spec
from gva_jax.study.spec import changed
from gva_jax.train import optimizer as optimizers
from gva_jax.train import state as states


def test_whole_pairs_finish_first():
    once = Variant(small.GQA, seeds=(11,))
    study = small.study(variants={"once": once, "gqa": Variant(small.GQA), "gva": Variant()})
    members = study.confirm_members({"once": (0.1,), "gqa": (0.1,), "gva": (0.1,)})
    order = [("gqa", 11), ("gva", 11), ("gqa", 12), ("gva", 12), ("once", 11)]
    assert [(member.variant, member.seed) for member in members] == order


def test_members_of_a_seed_read_the_same_text_and_those_of_another_do_not():
    members = small.study().confirm_members({"gqa": (0.1,), "gva": (0.2,)})
    by_seed = {11: set(), 12: set()}
    for member in members:
        by_seed[member.seed].add(member.config.data)
    assert all(len(data) == 1 for data in by_seed.values()) and by_seed[11] != by_seed[12]
    assert [member.config.optimizer.learning_rate for member in members] == [0.1, 0.2, 0.1, 0.2]


def test_the_search_has_equal_budgets_and_a_seed_of_its_own():
    members = small.searching(1e-2, 2e-2).search_members()
    assert {(m.steps, m.seed) for m in members} == {(4, 1)}
    rates = [(member.variant, member.learning_rate) for member in members]
    assert rates == [("gqa", 1e-2), ("gqa", 2e-2), ("gva", 1e-2), ("gva", 2e-2)]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (dict(seeds=()), "study.seeds"),
        (dict(seeds=(1, 1)), "must be different"),
        (dict(seeds=(-1,)), "must be at least 0"),
        (dict(seeds=(11.5, 12)), r"study.seeds = \(11.5, 12\): must be a tuple of whole numbers"),
        (dict(seeds=11), "study.seeds = 11: must be a tuple of whole numbers"),
        (dict(pairs=(("gqa", "gqa"),)), "must be two different variants"),
        (dict(seeds=tuple(range(21)), pairs=(("gqa", "gva"),)), "1 to 20 seeds in common, not 21"),
        (dict(learning_rates=1e-2), "study.learning_rates = 0.01: must be a tuple of different numbers above 0"),
        (dict(learning_rates=("1e-2",)), "must be a tuple of different numbers above 0"),
        (dict(learning_rates=(1e-2, 1e-2)), "must be a tuple of different numbers above 0"),
        (dict(together=0), "study.together = 0: must be 1 or more"),
        (dict(learning_rates=(0.0,)), "must be a tuple of different numbers above 0"),
        (dict(learning_rates=(float("nan"),)), "must be a tuple of different numbers above 0"),
        (dict(name="a/b"), "study.name"),
        (dict(variants={}), "study.variants"),
        (dict(variants={"a b": Variant()}), "plain name"),
        (dict(pairs=(("gqa", "mla"),)), "study.pairs"),
        (dict(learning_rates=()), "give fixed ones"),
        (dict(variants={"gqa": Variant({"model.attentoin.family": "gqa"})}), "model.attentoin"),
        (dict(variants={"gqa": Variant({"model.attention.famly": "gqa"})}), "variants.gqa: .*famly"),
        (dict(variants={"gqa": Variant(swap={})}), "variants.gqa.swap = {}: must change the model"),
        (dict(variants={"gqa": Variant(swap={"data.batch_size": 4})}), "swap = .*: must change the model"),
        (dict(variants={"gqa": Variant({"data.batch_size": 4})}), "data.batch_size: 8 -> 4"),
        (dict(variants={"gqa": Variant({"train.steps": 7})}), "train.steps: 6 -> 7"),
        (dict(variants={"gqa": Variant(rates_from="gva"), "gva": Variant()}), "search of its own"),
        (dict(search=Search((0.1,), seed=11)), "fresh ones"),
    ],
)
def test_a_study_that_cannot_be_is_refused(change, told):
    with pytest.raises(ConfigError, match=told):
        replace(small.study(pairs=()), **change)


@pytest.mark.parametrize("rates", [1e-2, (), ("1e-2",), (1e-2, 1e-2), (-1.0,)])
def test_rates_of_a_search_that_are_none_are_refused(rates):
    with pytest.raises(ConfigError, match=r"search\.learning_rates"):
        Search(rates, seed=1)


def test_shipped_studies_load_and_build():
    assert len(spec.shipped()) == 5
    for name in spec.shipped():
        study = spec.load(name)
        assert study.name == name and study.total_updates() > 0
        for variant in study.variants:
            Transformer(study.config(variant).model)  # refuses what cannot be


def test_a_file_that_is_no_study_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    for text, told in (("x = 1", "must define"), ("def study(): return 1", "returned int"), ("1/0", "ZeroDivision")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=told):
            spec.load(str(file))
    with pytest.raises(ConfigError, match=r"shipped are .*gatedv_small"):
        spec.load("gatedv_smal")


def test_a_folder_of_the_study_is_not_in_its_way(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gva_small", "gatedv_small"):  # its own, and that of the config it changes
        (tmp_path / name).mkdir()
    assert spec.load("gva_small").name == "gva_small"


def test_other_text_is_that_of_every_variant():
    whole = changed(small.base(), small.GQA)
    study = small.study(variants={"gqa": Variant(whole), "gva": Variant()})
    moved = spec.with_source(study, "prepared:prose")
    assert {moved.config(name).data.source for name in moved.variants} == {"prepared:prose"}


# ---- equal initial weights -------------------------------------------------------------------------------------------


def initial(study: Study, variant: str, seed: int) -> dict[str, np.ndarray]:
    config = study.config(variant)
    params = states.initial(Transformer(config.model), optimizers.make(config.optimizer, 1), seed).params
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}


@pytest.mark.parametrize("scan", thinned([False, True], 2))
def test_parameters_of_equal_path_and_shape_start_equal(scan):
    """Up to the initialiser's scale, whatever a variant adds: draws follow the path."""
    silu = {"model.attention.value_transform": "silu"}
    gate = {"model.attention.value_transform": "full_glu"}
    default = {"model.attention.key_init": "default"}
    variants = {"gva": {}, "gqa": small.GQA, "gated": gate, "silu": silu, "default": default}
    study = small.study(variants={name: Variant(changes) for name, changes in variants.items()})
    model = replace(study.base.model, scan_layers=scan, num_layers=2)
    study = replace(study, base=replace(study.base, model=model))
    first, other = initial(study, "gva", 3), initial(study, "gva", 4)
    for name in ("gated",) if scan else ("gqa", "gated", "silu", "default"):
        found = initial(study, name, 3)
        shared = [path for path in found if path in first and found[path].shape == first[path].shape]
        assert len(shared) >= 0.7 * len(first)
        for path in shared:
            scale = np.std(found[path]) / np.std(first[path]) if np.std(first[path]) else 1
            np.testing.assert_allclose(found[path], scale * first[path], rtol=2e-5, atol=1e-9, err_msg=f"{name} {path}")
            assert "key_map" in path or "rope_key" in path or scale == 1
    drawn = [path for path in first if "norm" not in path]
    assert all(np.any(first[path] != other[path]) for path in drawn)


def test_configs_are_not_reshaped_by_dotted_changes():
    config = small.base()
    assert changed(config, {}) == config
    assert configs.difference(config, changed(config, {"train.steps": 9})) == ["train.steps: 6 -> 9"]
