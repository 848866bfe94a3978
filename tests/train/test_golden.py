"""One training step on fixed tokens, against figures written down when it was known to be right."""

import pytest
import tiny_run as tiny

GOLDEN = {
    "gva": {"loss": 4.1720996, "grad_norm": 1.1261940, "next_loss": 4.0776958},
    "gqa": {"loss": 4.1724042, "grad_norm": 1.0680516, "next_loss": 4.0791116},
    "mla": {"loss": 4.1646152, "grad_norm": 1.0372333, "next_loss": 4.0858073},
}

ADVICE = """
The first training step of the tiny {family} model gave {name} = {value!r}, written down is {expected!r}.
If you meant to change initialisation, model, loss, optimiser or schedule, check that the new figure is right (does the
loss start near ln(64) = 4.16, do the other tests pass?) and write it into GOLDEN. If not, training has changed by
accident.
"""


@pytest.mark.parametrize("family", GOLDEN)
def test_first_step(family):
    first, second = tiny.one_device(tiny.config(family)).advance(2)
    got = {"loss": first["loss"], "grad_norm": first["grad_norm"], "next_loss": second["loss"]}
    for name, expected in GOLDEN[family].items():
        advice = ADVICE.format(family=family, name=name, value=got[name], expected=expected)
        assert got[name] == pytest.approx(expected, rel=2e-5), advice
