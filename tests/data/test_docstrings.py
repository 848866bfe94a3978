"""Which strings of Python packages become documents."""

import gc
import io
import re
import sys

import pytest
from rich.console import Console

from gva_jax.config import ConfigError
from gva_jax.data import docstrings
from gva_jax.data.docstrings import documents, prose
from gva_jax.display import Display

QUIET = Display(quiet=True)


def sentence(name: str) -> str:
    """A paragraph of English of more than 200 characters that names `name`."""
    return (
        f"The {name} is one of those things that were written down for this test and for nothing else at all.\n"
        f"It should be long enough to be a document of its own, so that what is said of the {name} here can be\n"
        "found again among all of the others that have been read from the same folder."
    )


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An importable package of hand-made files, which fails when it is imported."""
    root = tmp_path / "gva_written"
    (root / "tests").mkdir(parents=True)
    (root / "__init__.py").write_text(f'"""{sentence("module")}"""\nraise SystemExit("imported")\n')
    (root / "code.py").write_text(
        f'class A:\n    """{sentence("class")}"""\n    async def f(self):\n        """{sentence("function")}"""\n'
        f'add_newdoc("x", """{sentence("call")}""")\nTOPICS = {{"a": """{sentence("topic")}"""}}\n'
        f'short = """Too short for this."""\nmessage = f"""{sentence("piece")} {{short}} {sentence("piece")}"""\n'
        f'again = """{sentence("class")}"""\n'
    )
    (root / "tests" / "code.py").write_text(f'"""{sentence("test")}"""')
    (root / "test_code.py").write_text(f'"""{sentence("test")}"""')
    (root / "broken.py").write_text(f'"""{sentence("syntax")}"""\ndef f(:\n')
    (root / "null.py").write_bytes(f'"""{sentence("null")}"""'.encode() + b"\0")
    (root / "coded.py").write_bytes(f'# coding: no-such\n"""{sentence("coding")}"""'.encode())
    (root / "bytes.py").write_bytes(f'"""{sentence("bytes")}"""'.encode() + b'\nx = "\xff"\n')
    (root / "surrogate.py").write_text(f'"""{sentence("surrogate")} \\ud800"""\nx = "\\d"\n')
    monkeypatch.syspath_prepend(tmp_path)
    return root


def test_every_long_string_of_a_package_is_found_once_and_nothing_else(package):
    found = documents("docstrings:gva_written", QUIET)
    assert found == sorted(sentence(name) for name in ("module", "class", "function", "call", "topic"))
    assert "gva_written" not in sys.modules


def test_all_packages_are_read_but_not_those_of_another_interpreter(package, tmp_path, monkeypatch):
    library, installed = tmp_path / "lib", tmp_path / "env" / "site-packages"
    for folder in (library / "site-packages", library / "idlelib", installed / "pkg" / "test"):
        folder.mkdir(parents=True)
        (folder / "a.py").write_text(f'"""{sentence("wrong")}"""')
    (library / "a.py").write_text(f'"""{sentence("library")}"""')
    (installed / "pkg" / "a.py").write_text(f'"""{sentence("installed")}"""')
    monkeypatch.setattr(docstrings.sysconfig, "get_path", {"stdlib": str(library)}.__getitem__)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(installed)])
    assert documents("docstrings", QUIET) == sorted([sentence("library"), sentence("installed")])


def test_real_documents_are_distinct_sorted_prose_and_always_the_same():
    found = documents("docstrings:json,email", QUIET)
    assert len(found) > 50
    assert found == sorted(set(found)) == documents("docstrings:email,json", QUIET)
    assert all(len(document) >= docstrings.SHORTEST and ">>>" not in document for document in found)
    assert any("JSON" in document for document in found) and any("MIME" in document for document in found)
    paragraphs = [paragraph for document in found for paragraph in document.split("\n\n")]
    assert len(paragraphs) == len(set(paragraphs))


@pytest.mark.parametrize(
    "text",
    [
        ">>> from scipy import stats as the_stats\n>>> what = the_stats.norm(0, 1)\n>>> what is not the_stats",
        ">>> help(it)\nThis is what is said of it, by the help that you get when you ask for it.",
        "0.1  0.25  0.5  1.0 of the 17\n0.2  0.35  0.6  2.0 of the 18\n0.3  0.45  0.7  3.0 of the 19 or the 20",
        '.. [1] A. Author, B. Author, "A title", Journal 12 (1999), pp. 1-99, https://example.org/a/1234567890',
        "for i in range(len(x)): y[i] = x[i] * a[i] + b[i]; z[i, :] = (y[i] - x[i]) / (a[i] ** 2 + 1e-12)",
        "abs, absolute, add, all, any, arange, arccos, arccosh, arcsin, arcsinh, arctan, arctan2, arctanh, argmax",
        "This is short but it is English.",
    ],
)
def test_prose_drops_what_is_no_english(text):
    assert prose(text) == []
    assert prose(f"{text}\n\n{sentence('word')}\n \n{text}") == [sentence("word")]


def test_prose_drops_cross_reference_marks_and_keeps_what_they_name():
    text = "Like :func:`numpy.sum` it is one of the :class:`~a.B`, and all of the others are in :ref:`the list <here>`."
    assert prose(text) == ["Like `numpy.sum` it is one of the `a.B`, and all of the others are in `the list`."]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("docstrings:", "name packages after the colon"),
        ("docstrings:json,nosuchpackage", "'nosuchpackage' is not an installed"),
        ("docstrings:os.path", "'os.path' is not an installed top-level"),
        ("docstrings:json, email", "' email' is not an installed"),
        ("docstrings:sys", "'sys' has no Python source"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(source, message):
    with pytest.raises(ConfigError, match=message) as error:
        documents(source, QUIET)
    assert source in str(error.value) and "\n" not in str(error.value)


def test_progress_is_shown_and_the_garbage_collector_left_as_it_was():
    out = io.StringIO()
    documents("docstrings:json", Display(console=Console(file=out)))
    assert re.search(r"reading docstrings (\d+)/\1\b", out.getvalue())
    assert gc.isenabled()
