"""Names of pods and meshes, their links, what is refused; the command without compilers."""

from types import SimpleNamespace

import pytest

from gva_jax import cli
from gva_jax.config import ConfigError, DataConfig, MeshConfig, RunConfig, TrainConfig
from gva_jax.plan import program, topologies


@pytest.mark.parametrize(
    ("name", "size", "chip"),
    [
        ("v5e:16x16", 256, "TPU v5e"),
        ("v6e:4x8", 32, "TPU v6e"),
        ("v5p:4x4x8", 128, "TPU v5p"),
        ("tpu7x:2x2x1", 8, "TPU7x"),
        ("h100:8x8", 64, "H100 SXM"),
        ("H200:1x8", 8, "H200"),
        ("b200:2x4", 8, "B200"),
        ("a100:1x1", 1, "A100 80GB"),
    ],
)
def test_names(name, size, chip):
    topology = topologies.parse(name)
    assert (topology.size, topology.chip.name) == (size, chip)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("", "must be KIND:SIZES"),
        ("v5e", "must be KIND:SIZES"),
        ("v9:2x2", "kinds are v5e"),
        ("v5e:0x4", "must be KIND:SIZES"),
        ("v5e:4x4x4", "has 2 axes"),
        ("v5p:4x4", "has 3 axes"),
        ("v5e:32x2", "at most 16"),
        ("h100:64", "hosts x GPUs"),
        ("h100:4x16", "at most 8 GPUs"),
    ],
)
def test_names_that_are_none_are_told_what_would_be_right(name, told):
    with pytest.raises(ConfigError, match=told):
        topologies.parse(name)


def test_meshes():
    assert program.parse_mesh("data=2,fsdp=8") == MeshConfig(data=2, fsdp=8)
    assert program.parse_mesh("tensor=2") == MeshConfig(tensor=2)
    for wrong in ("model=2", "fsdp", "fsdp=two", "fsdp=2,fsdp=4", ""):
        with pytest.raises(ConfigError, match="AXIS=DEVICES"):
            program.parse_mesh(wrong)


@pytest.mark.parametrize(("devices", "pieces"), [(16, 8), (64, 4), (256, 1), (3, 8)])
def test_micro_batches_are_the_most_that_the_mesh_can_split_up_to_the_configs(devices, pieces):
    """3 devices cannot split 256 rows: that is left for the mesh to refuse."""
    config = RunConfig(data=DataConfig(batch_size=256), train=TrainConfig(accumulation=8))
    fitted = program.fitted(config, MeshConfig(data=-1), devices)
    assert fitted.train.accumulation == pieces and fitted.mesh.data == devices


def test_default_meshes_use_all_devices_and_are_different():
    for name in ("v5e:4x4", "v5e:16x16", "h100:1x8", "h100:8x8", "a100:1x1"):
        topology = topologies.parse(name)
        meshes = program.default_meshes(RunConfig(data=DataConfig(batch_size=256)), topology)
        assert len(set(meshes)) == len(meshes) >= 1
        assert {m.data * m.fsdp * m.tensor * m.context for m in meshes} == {topology.size}


def chip(*coords):
    return SimpleNamespace(coords=(*coords, *(0,) * (3 - len(coords))), id=0)


def gpu(i):
    return SimpleNamespace(id=i)


def test_links_of_a_torus():
    """v5e: 50 GB/s a link. A row of 16 is a ring, one of 4 is open at its ends; a plane has both axes' links."""
    ring, row = [chip(x, 0) for x in range(16)], [chip(x, 0) for x in range(4)]
    plane = [chip(x, y) for x in range(4) for y in range(4)]
    pod, small = topologies.parse("v5e:16x16"), topologies.parse("v5e:4x4")
    assert pod.seconds(100e9, ring, 16) == pytest.approx(1)
    assert pod.seconds(100e9, row, 4) == pytest.approx(2)  # part of a ring
    assert small.seconds(100e9, row, 4) == pytest.approx(2)
    assert small.seconds(100e9, plane, 16) == pytest.approx(1)
    cube = topologies.parse("v5p:4x4x4")
    assert cube.seconds(100e9, [chip(0, 0, z) for z in range(4)], 4) == pytest.approx(0.5)


def test_links_of_gpus():
    """H100: 450 GB/s of NVLink, 50 GB/s of network a GPU; what comes from other hosts comes in over all adapters."""
    pod = topologies.parse("h100:4x8")
    assert pod.seconds(450e9, [gpu(i) for i in range(8)], 8) == pytest.approx(1)
    assert pod.seconds(50e9, [gpu(8 * i) for i in range(4)], 4) == pytest.approx(1)
    # Of 400 GB that all 32 have in the end each GPU brings in an eighth of what is foreign, 37.5 GB in 0.75 s, and has
    # the rest over NVLink, 350 GB.
    assert pod.seconds(400e9 * 31 / 32, [gpu(i) for i in range(32)], 32) == pytest.approx(350 / 450)
    assert pod.seconds(0, [gpu(0)], 1) == 0


def test_without_compilers_the_command_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr(topologies.Topology, "missing", lambda self: ["libtpu"])
    assert cli.main(["plan", "quickstart", "--topology", "v5e:4x4"]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "libtpu" in line and "gva-jax[aot]" in line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "topology = ''"),
        (["--topology", "v5e:4"], "has 2 axes"),
        (["--topology", "v5e:4x4", "--mesh", "heads=2"], "AXIS=DEVICES"),
        (["--topology", "v5e:4x4", "--xla", "fast"], "NAME=VALUE"),
        (["--topolgy", "v5e:4x4"], "did you mean --topology"),
    ],
)
def test_mistakes_are_one_line(arguments, told, capsys):
    assert cli.main(["plan", "quickstart", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert told in line
