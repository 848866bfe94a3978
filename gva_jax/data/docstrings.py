"""The source that is always there: the docstrings of the installed Python packages. Finds and cleans them."""

import ast
import contextlib
import gc
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

from gva_jax.config import ConfigError, require
from gva_jax.display import Display

# Strings and documents shorter than this many characters are left out.
SHORTEST = 200


def documents(source: str, display: Display) -> list[str]:
    """The documents of a source: distinct, sorted, the same every time for the same installed packages.

    Args:
        source: `docstrings` reads every package in site-packages and the standard library; `docstrings:NAME,NAME` only
            the named top-level packages or modules. Nothing that is read is imported.
        display: shows the progress over files.

    Strings of 200 characters or more (docstrings and any other literal: NumPy, for one, documents its C functions by
    plain calls) are cut into paragraphs, of which those that read as English are kept; see `prose`. A paragraph is kept
    once, in the first document that has it: packages copy each other's parameter lists. What is left of a string is a
    document if it still has 200 characters.

    Raises:
        ConfigError: a named package is not installed or has no Python source.
    """
    _, colon, names = source.partition(":")
    right = "name packages after the colon, or leave it out for all that are installed"
    require(bool(names) or not colon, "source", source, right)
    files = sorted(set(_named_files(source, names.split(",")) if names else _installed_files()))
    found = set()
    with display.task("reading docstrings", total=len(files)) as task, _no_garbage_collection():
        for file in files:
            found.update(map(inspect.cleandoc, _strings(file)))
            task.advance()
    kept, seen = [], set()
    for text in sorted(found):
        paragraphs = [paragraph for paragraph in prose(text) if paragraph not in seen]
        document = "\n\n".join(paragraphs)
        if len(document) >= SHORTEST:
            kept.append(document)
            seen.update(paragraphs)
    return sorted(kept)


# ---- files -----------------------------------------------------------------------------------------------------------

# Folders and files of tests (code in strings, generated tables) and of programs without prose.
_JUNK = re.compile(r"tests?|testing|test_.*|.*_tests?|.*_test_.*|conftest|idlelib|lib2to3|(site|dist)-packages|\..*")


def _installed_files() -> Iterator[Path]:
    """Python files of the standard library and of all installed packages."""
    installed = [path for path in sys.path if os.path.basename(path) in ("site-packages", "dist-packages")]
    for root in [sysconfig.get_path("stdlib"), *installed]:
        yield from _python_files(Path(root))


def _named_files(source: str, names: list[str]) -> Iterator[Path]:
    """Python files of the named top-level packages and modules, found without importing them."""
    for name in names:
        try:
            spec = importlib.util.find_spec(name) if name.isidentifier() else None
        except ValueError:  # __main__ and the like, which have no spec
            spec = None
        if spec is None:
            raise ConfigError(f"source = {source!r}: {name!r} is not an installed top-level package or module")
        if spec.submodule_search_locations:
            for root in spec.submodule_search_locations:
                yield from _python_files(Path(root))
        elif spec.origin and spec.origin.endswith(".py"):
            yield Path(spec.origin)
        else:
            raise ConfigError(f"source = {source!r}: {name!r} has no Python source")


def _python_files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not _JUNK.fullmatch(name)]
        for name in files:
            if name.endswith(".py") and not _JUNK.fullmatch(name.removesuffix(".py")):
                yield Path(folder, name)


# ---- strings ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Syntax trees have no cycles, and the collector would walk every growing one again: a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _strings(file: Path) -> Iterator[str]:
    """The long string literals of a file; none of a file that cannot be read or parsed."""
    try:
        with warnings.catch_warnings():  # a scanned file's invalid escape is not our user's business
            warnings.simplefilter("ignore")
            stack = [ast.parse(file.read_bytes())]
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Constant):
            if isinstance(node.value, str) and len(node.value) >= SHORTEST:
                yield node.value
        elif not isinstance(node, ast.JoinedStr):  # an f-string's pieces start and end in mid-sentence
            stack.extend(ast.iter_child_nodes(node))


# ---- prose -----------------------------------------------------------------------------------------------------------

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)?")
_SURROGATE = re.compile("[\ud800-\udfff]")  # not text: cannot be written as UTF-8
_ROLE = re.compile(r":[\w:.+-]+:`~?([^`<]+?)(?:\s*<[^`>]*>)?`")
_COMMONEST = """a about after all also an and any are as at be been because before being both but by can could did do
does each for from had has have he her his i if in into is it its may might more most must no not of on one only or
other our over same she should so some such than that the their them then there these they this those to two under
until was we were what when where which while who will with would you your"""
_COMMON = frozenset(_COMMONEST.split())


def prose(text: str) -> list[str]:
    """The distinct paragraphs of `text` that read as English.

    A paragraph is English if it has at least 8 words, at least 30 % of them among the commonest of the language, and
    letters of words make up 80 % of its ink. That drops doctest transcripts, code, tables of numbers, formulas,
    references and bare lists of names (together 44 % of the text) and keeps explanations, also those of parameters.
    Cross-reference marks (`:func:`) are dropped, what they refer to stays.
    """
    paragraphs = (textwrap.dedent(part).strip() for part in re.split(r"\n\s*\n", _ROLE.sub(r"`\1`", text)))
    return [paragraph for paragraph in dict.fromkeys(paragraphs) if _is_english(paragraph)]


def _is_english(paragraph: str) -> bool:
    words = _WORD.findall(paragraph.lower())
    ink = sum(map(len, paragraph.split()))
    return (
        len(words) >= 8
        and sum(word in _COMMON for word in words) >= 0.3 * len(words)
        and sum(map(len, words)) >= 0.8 * ink
        and ">>>" not in paragraph
        and not _SURROGATE.search(paragraph)
    )
