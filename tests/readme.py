"""The code blocks of README.md, for the tests that run them."""

import re
from pathlib import Path

TEXT = (Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str = "") -> list[str]:
    """Fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)


def block_with(text: str) -> str:
    """The one Python block that contains `text`."""
    (found,) = [block for block in blocks("python") if text in block]
    return found
