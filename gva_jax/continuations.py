"""`gva generate`: continue prompts from a run's cache and write the text while it grows."""

import codecs
import contextlib
import json
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gva_jax import runtime
from gva_jax.config import ConfigError
from gva_jax.decoding import generate, token_lists
from gva_jax.display import Display
from gva_jax.kernels.api import check_implementation
from gva_jax.options import GenerateOptions
from gva_jax.train.checkpoint import load


def write(options: GenerateOptions) -> None:
    """Load the run, continue every prompt, and write the results on standard output (what is not text: on stderr)."""
    try:
        check_implementation(options.implementation)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    aside = Display(console=Console(stderr=True, highlight=False, soft_wrap=True))
    runtime.start(aside)
    model, variables, tokenizer = load(options.run, aside.say)
    prompts = token_lists(options.prompt, tokenizer)
    growing = [Growing(tokenizer.decode_bytes) for _ in prompts]
    show = _silent if options.json else _stream if len(prompts) == 1 else _rows
    with show(options.prompt, growing) as shown:

        def on_tokens(ids: list[int | None]) -> None:
            for text, new in zip(growing, ids, strict=True):
                text.append(new)
            shown()

        outputs = generate(
            model,
            variables,
            prompts,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
            stop_id=tokenizer.eot_id,
            cache_dtype=options.cache_dtype,
            implementation=options.implementation,
            on_tokens=on_tokens,
        )
        for text in growing:
            text.append(None)
        shown()
    if options.json:
        rows = zip(options.prompt, outputs, strict=True)
        print(json.dumps([{"prompt": p, "text": tokenizer.decode(ids), "tokens": ids} for p, ids in rows], indent=2))


class Growing:
    """Text whose tokens arrive one by one. A token may end inside a character, which is held back until it is whole."""

    def __init__(self, decode_bytes: Callable[[list[int]], bytes]):
        self.text = ""
        self._decode_bytes = decode_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token: int | None) -> None:
        """One more token, or None: the text has ended."""
        self.text += self._utf8.decode(b"" if token is None else self._decode_bytes([token]), final=token is None)


@contextlib.contextmanager
def _silent(prompts: tuple[str, ...], texts: list[Growing]) -> Iterator[Callable[[], None]]:
    yield lambda: None


@contextlib.contextmanager
def _stream(prompts: tuple[str, ...], texts: list[Growing]) -> Iterator[Callable[[], None]]:
    """One prompt: its text runs on as it is made."""
    written = 0

    def show() -> None:
        nonlocal written
        print(texts[0].text[written:], end="", flush=True)
        written = len(texts[0].text)

    print(prompts[0], end="", flush=True)
    yield show
    print()


@contextlib.contextmanager
def _rows(prompts: tuple[str, ...], texts: list[Growing]) -> Iterator[Callable[[], None]]:
    """Several prompts: a table that grows in a terminal, otherwise one text after another at the end."""
    console = Console(highlight=False)

    def table() -> Table:
        rows = Table("prompt", "continuation", show_lines=True)
        for prompt, text in zip(prompts, texts, strict=True):
            rows.add_row(Text(prompt), Text(text.text))
        return rows

    if console.is_terminal:
        with Live(console=console, get_renderable=table, auto_refresh=False) as live:
            yield live.refresh
        return
    yield lambda: None
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True), 1):
        print(f"--- {number}/{len(prompts)}\n{prompt}{text.text}\n")
