"""What a person reads when a run ends: how good it is, what it writes, what its cache costs, what to try next."""

import os

from rich.table import Table
from rich.text import Text

from gva_jax import info
from gva_jax.config import RunConfig, shipped
from gva_jax.decoding import generate, token_lists
from gva_jax.display import Display
from gva_jax.train.loop import Report


def show(config: RunConfig, report: Report, display: Display) -> None:
    """The report of a finished run; nothing for one that was stopped before its end."""
    if report.heldout is None:
        return
    display.say()
    display.show(quality(report))
    display.say()
    display.show(cache_costs(config))
    for prompt, text in samples(config, report):
        display.say()
        display.show(Text.assemble(("sample from the value cache: " if _value_only(config) else "sample: ", "dim"),
                                   (prompt, "bold"), text))  # fmt: skip
    display.say()
    display.say(f"run folder: {report.folder}")
    display.say("next:")
    for command in next_commands(config, report):
        display.say(f"  {command}")


def quality(report: Report) -> Table:
    """Held-out bits per byte, beside what models without context give."""
    table = Table(title="held-out text, bits per byte (lower is better)", title_justify="left")
    table.add_column("model")
    table.add_column("bits per byte", justify="right")
    table.add_row("uniform over the vocabulary", f"{report.corpus.uniform_bpb:.3f}")
    table.add_row("unigram (token frequencies)", f"{report.corpus.unigram_bpb:.3f}")
    table.add_row("this run", f"{report.heldout.bits_per_byte:.3f}", style="bold")
    return table


def cache_costs(config: RunConfig) -> Table:
    """Bytes that decoding keeps per token, against grouped-query attention of the same heads and groups."""
    figures, dtype, T = info.describe(config), config.model.dtype, config.data.context_length
    family = config.model.attention.family.upper()
    table = Table(title=f"cache, bytes in {dtype}, as allocated", title_justify="left")
    table.add_column("attention")
    for column in ("per token", f"per {T:,} tokens", "ratio"):
        table.add_column(column, justify="right")
    gqa, own = figures["gqa_cache_bytes_per_token"], figures["cache_bytes_per_token"]
    table.add_row("GQA, same heads and groups", f"{gqa:,}", f"{gqa * T:,}", "1")
    ratio = f"{figures['cache_ratio_to_gqa']:.4f}"
    table.add_row(f"{family} (this run)", f"{own:,}", f"{own * T:,}", ratio, style="bold")
    return table


def samples(config: RunConfig, report: Report) -> list[tuple[str, str]]:
    """Each prompt of the config (an empty one, if it has none) with the text that follows."""
    tokenizer, sample = report.corpus.tokenizer, config.sample
    prompts = sample.prompts or ("",)
    new = generate(
        report.model, report.variables, token_lists(prompts, tokenizer), max_new_tokens=sample.max_new_tokens,
        temperature=sample.temperature, top_p=sample.top_p, seed=config.train.seed, stop_id=tokenizer.eot_id,
    )  # fmt: skip
    return [(prompt, tokenizer.decode(ids)) for prompt, ids in zip(prompts, new, strict=True)]


def next_commands(config: RunConfig, report: Report) -> list[str]:
    gva = "uv run gva" if "UV_RUN_RECURSION_DEPTH" in os.environ else "gva"  # as the person started this one
    prompt = (config.sample.prompts or ("The",))[0]
    commands = [f'{gva} generate {report.folder} --prompt "{prompt}" --temperature 0.7']
    if config.name in shipped():
        commands += [
            f"{gva} info {config.name}",
            f"{gva} train {config.name} --name longer --train.steps {config.train.steps * 4}",
        ]
    return commands


def _value_only(config: RunConfig) -> bool:
    return config.model.attention.family not in ("mha", "gqa", "mqa")
