"""General English prose from three Debian packages, as JSON lines for `gva prepare`.

    python scripts/prose.py prose.jsonl            # fetches the packages with apt-get (nothing is installed)
    gva prepare jsonl:prose.jsonl --vocab-size 8192 --out prose

The packages are the Treasury of David (19th century commentary, public domain), the World English Bible (public
domain) and An Anarchist FAQ (GNU FDL): about 28 MB of text. It is for training on the spot, not to be shipped on.

A document is a chapter or section, cut between paragraphs where it is longer than `LONGEST` characters, so that splits
by document hold out some of every book. Needs Python and apt-get or the .deb files; nothing else.
"""

import argparse
import html
import json
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("sword-comm-tdavid", "sword-text-web", "anarchism")

# Characters of a document, at most, unless a single paragraph has more; and at least, or it is left out.
LONGEST, SHORTEST = 8000, 200

_DROPPED = re.compile(r"<(note|head|script|style)\b[^>]*?(?<!/)>.*?</\1>", re.DOTALL | re.IGNORECASE)
# Tags that begin or end a paragraph, in OSIS and in HTML. Single verses run on within theirs.
_BREAK = re.compile(r"</?(div|p|title|chapter|lg|l|lb|h\d|li|ul|ol|br|hr|blockquote|td|tr|table|item)\b[^>]*>", re.I)
_TAG = re.compile(r"<[^>]*>")
_CHAPTER = re.compile(r"(?=<chapter\b[^>]*sID=)")
_SECTION = re.compile(r"(?=<h[1-6]\b)", re.IGNORECASE)


def paragraphs(markup: str) -> list[str]:
    """The text of a piece of OSIS or HTML, footnotes left out."""
    text = _TAG.sub("", _BREAK.sub("\x00", _DROPPED.sub("", markup)))
    return [line for part in text.split("\x00") if (line := " ".join(html.unescape(part).split()))]


def documents(chapters: Iterator[str]) -> Iterator[str]:
    """Chapters of markup as documents of text."""
    for chapter in chapters:
        document: list[str] = []
        for paragraph in [*paragraphs(chapter), None]:
            size = sum(map(len, document))
            if document and (paragraph is None or size + len(paragraph) > LONGEST):
                if size >= SHORTEST:
                    yield "\n\n".join(document)
                document = []
            document += [paragraph] if paragraph else []


def sword_chapters(stem: Path, letter: str) -> Iterator[str]:
    """The chapters of one testament of a compressed SWORD module.

    `stem.LETTERzs` lists the zlib blocks of `stem.LETTERzz`: offset, compressed and full size, little-endian uint32.
    """
    index, blocks = (stem.with_suffix(f".{letter}z{last}").read_bytes() for last in "sz")
    for offset, size, full in struct.iter_unpack("<III", index):
        if size:
            block = zlib.decompress(blocks[offset : offset + size])
            if len(block) != full:
                raise ValueError(f"{stem}: a block has {len(block)} bytes, its index says {full}")
            yield from _CHAPTER.split(block.decode("utf-8", errors="replace"))


def html_sections(folder: Path) -> Iterator[str]:
    """The sections of a folder of HTML pages, without their navigation."""
    for path in sorted(folder.glob("*.html")):
        page = path.read_text(encoding="utf-8", errors="replace")
        yield from _SECTION.split(page.partition('<div id="book-navigation')[0])


def books(root: Path) -> Iterator[str]:
    """Documents of everything that was unpacked below `root`."""
    for index in sorted(root.glob("usr/share/sword/modules/**/*.?zs")):
        yield from documents(sword_chapters(index.with_suffix(""), index.suffix[1]))
    yield from documents(html_sections(root / "usr/share/doc/anarchism/html"))


def unpack(package: str, debs: Path, root: Path) -> None:
    """The package's files below `root`, from its .deb in `debs`, which apt-get fetches where there is none."""
    found = sorted(debs.glob(f"{package}_*.deb"))
    if not found:
        subprocess.run(["apt-get", "download", package], cwd=debs, check=True)
        found = sorted(debs.glob(f"{package}_*.deb"))
    subprocess.run(["dpkg-deb", "-x", found[-1], root], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="file of JSON lines to write")
    parser.add_argument("--debs", type=Path, help="folder of the .deb files; fetched there if missing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root, debs = Path(temporary) / "root", options.debs or Path(temporary)
        for package in PACKAGES:
            unpack(package, debs.resolve(), root)
        texts = list(dict.fromkeys(books(root)))
    options.out.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts))
    print(f"{options.out}: {len(texts):,} documents, {sum(len(text.encode()) for text in texts):,} bytes of text")


if __name__ == "__main__":
    main()
