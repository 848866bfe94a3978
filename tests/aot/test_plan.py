"""`gva plan` itself, for a TPU slice and for GPUs that are not here."""

import json
import os
import subprocess
import sys

import pytest
import targets

from gva_jax import config as configs

CONFIG = """
from gva_jax.config import AttentionConfig, DataConfig, ModelConfig, RunConfig

def config():
    attention = AttentionConfig("gva", 4, 2, head_dim=64, rope_dim=16, q_norm=True, key_init="scale_matched")
    model = ModelConfig(512, 3, 128, 256, attention, dtype="bfloat16", remat="attention")
    return RunConfig(name="tiny", model=model, data=DataConfig(context_length=640, batch_size=8))
"""
L, D, F, V, H, G, d, r, T, B = 3, 128, 256, 512, 4, 2, 64, 16, 640, 8
MATRICES = D * H * d + D * G * d + D * r + d * H * (d - r) + H * d * D + 3 * D * F


def plan(tmp_path, topology, *meshes, config=None):
    """What the command prints as JSON of `config` or the tiny one, and its exit status."""
    if config is None:
        config = tmp_path / "tiny.py"
        config.write_text(CONFIG)
    environment = os.environ | {"GVA_JAX_CACHE": str(tmp_path), "PYTHONPATH": str(targets.ROOT), "XLA_FLAGS": ""}
    arguments = [str(config), "--topology", topology, "--json", *(part for mesh in meshes for part in ("--mesh", mesh))]
    command = [sys.executable, "-c", "import sys; from gva_jax.cli import main; sys.exit(main())", "plan", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr[-3000:]
    return json.loads(done.stdout), done.returncode, done.stderr


def needs(target):
    if absent := targets.missing(target):
        pytest.skip(f"needs {', '.join(absent)}, from the extra `aot`")


def test_tpus(tmp_path):
    needs("v5e")
    plans, code, progress = plan(tmp_path, "v5e:2x2", "fsdp=4")
    assert code == 0 and "compiling" in progress
    (one,) = plans
    assert one["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1, "context": 1} and one["fits"]
    assert one["attention"] == one["real_attention"] == "splash"
    # A flash kernel's forward pass runs once a layer though layers are rematerialised.
    assert one["kernel_calls"] == {"splash_mha_fwd": L, "splash_mha_dq": L, "splash_mha_dkv": L}
    again = MATRICES - F * D  # all that a layer multiplies but the last product, which no gradient needs
    assert one["flops"]["matmul"] == 2 * B * T * (L * (3 * MATRICES + again) + 3 * V * D) / 4
    tiles, block = 3, 512  # 640 positions are two blocks of 512
    pairs = B * H * tiles * block * block / 4
    widths = (d + r + d) + (2 * (d + r) + d) + (2 * (d + r) + 2 * d)
    assert one["flops"]["attention_kernels"] == 2 * L * pairs * widths
    assert one["memory"]["padding"] > 0 and one["memory"]["temporaries"] > 0
    assert one["bytes_over"].keys() == {"fsdp"} and one["bytes_over"]["fsdp"] > 0
    assert one["bound"] == max(one["seconds"].values()) > 0 and 0 < one["mfu"] < 1


def test_a_shipped_config_with_gated_values(tmp_path):
    needs("v5e")
    config = configs.load("gatedv_small_silu")
    (one,), code, _ = plan(tmp_path, "v5e:1x1", config="gatedv_small_silu")
    assert code == 0 and one["fits"] and one["parameters"] == 2_328_192
    L, D, F, V = (getattr(config.model, name) for name in ("num_layers", "model_dim", "hidden_dim", "vocab_size"))
    B, T, H, d = config.data.batch_size, config.data.context_length, 4, 32
    assert one["flops"]["matmul"] == 2 * B * T * 3 * (L * (4 * D * H * d + 3 * D * F) + V * D)
    assert one["kernel_calls"] == {"splash_mha_fwd": L, "splash_mha_dq": L, "splash_mha_dkv": L}
    assert one["flops"]["attention_kernels"] == 2 * L * B * H * T * T * (2 + 3 + 4) * d  # a sequence is one block


def test_gpus(tmp_path):
    needs("h100")
    (one,), code, _ = plan(tmp_path, "h100:1x2", "fsdp=2")
    assert code == 0 and one["fits"]
    assert one["attention"] == "chunked" and one["real_attention"] == "tokamax or cudnn"
    assert set(one["passed_over"]) == {"tokamax", "cudnn"}
    assert one["memory"]["padding"] == 0 and one["bytes_over"].keys() == {"fsdp"}
    assert one["flops"]["attention_kernels"] == 0 and not one["uncounted"]
