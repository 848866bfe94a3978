"""The `gva` command: parse, call, print. Whatever is heavy is imported by the command that needs it.

A user's mistake is a `ConfigError`: one line on standard error, exit code 2. What fails on the way is a `RunError`: one
line, exit code 1.
"""

import os
import select
import signal
import sys
import traceback
from collections.abc import Callable

from gva_jax import __version__
from gva_jax.config import ConfigError, RunError, cache_folder, shipped

# Modules of `gva-jax[train]`, by the top-level name that an import error reports.
TRAIN_EXTRA = {"optax", "orbax", "grain", "tensorflow_datasets", "array_record", "tokenizers", "tensorboardX"}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the process's exit code."""
    try:
        code = _run(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        return _refuse(str(error))
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in TRAIN_EXTRA:
            raise
        return _refuse(f"{missing} is not installed; it comes with: pip install 'gva-jax[train]'")
    except (RunError, FloatingPointError) as error:  # or a loss or weights that are not finite: the message says where
        return _refuse(str(error), code=1)
    except KeyboardInterrupt as stop:
        code = 128 + getattr(stop, "signum", signal.SIGINT)
        _end_others("interrupted", code)
        print("interrupted", file=sys.stderr, flush=True)
        if getattr(stop, "at_once", False):
            os._exit(code)  # Python itself would wait for threads that write
        return code
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_gone():
            _end_others("the reader of its output has gone", 128 + signal.SIGPIPE)
            return 128 + signal.SIGPIPE
        _end_others(error, 1)
        raise


def _reader_gone() -> bool:
    """Whether nobody reads standard output any more (`gva ... | head`); if so, what is left of it goes nowhere."""
    output = select.poll()
    output.register(1, 0)
    gone = any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python itself would complain on exit
    return gone


def _refuse(message: str, code: int = 2) -> int:
    _end_others(message, code)
    print("error:", " ".join(message.split("\n")), file=sys.stderr)
    return code


def _end_others(reason: str | Exception, code: int) -> None:
    """Where this is one of several processes, end all: the others would wait for it. Then it does not return."""
    distributed = sys.modules.get("gva_jax.distributed")
    if distributed is None or not distributed.many():
        return
    if isinstance(reason, Exception):  # a fault
        traceback.print_exc()
        reason = f"{type(reason).__name__}: {reason}"
    distributed.end_all(reason, code)


def _run(argv: list[str]) -> int:
    name, *args = argv or ["--help"]
    if name in ("--help", "-h"):
        print(_overview())
    elif name == "--version":
        print(f"gva-jax {__version__}")
    elif name in COMMANDS:
        try:
            return COMMANDS[name](args) or 0
        except SystemExit as stop:  # how the parser ends when it has printed help
            return int(stop.code or 0)
    else:
        from gva_jax.options import nearest

        raise ConfigError(f"no command {name!r}; did you mean {nearest(name, list(COMMANDS))}? `gva` lists all")
    return 0


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = [f"  {name:{width}}  {command.__doc__.splitlines()[0]}" for name, command in COMMANDS.items()]
    ending = ["", f"shipped configs: {', '.join(shipped())}", "`gva COMMAND --help` says more; `gva --version`."]
    return "\n".join(["usage: gva COMMAND ...", "", *commands, *ending])


def _description(command: Callable) -> str:
    """A command's docstring as help, with the folders that it names."""
    paragraphs = command.__doc__.format(cache=cache_folder()).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def train(args: list[str]) -> int:
    """Train a model from a config; an interrupted run continues from its last checkpoint.

    The run's folder RUNS/NAME receives the config, checkpoints, metrics (JSON lines and TensorBoard; Weights & Biases
    too, where it is installed) and how it was launched. A run that a signal stops saves a
    checkpoint and exits with 128 + the signal; the same command continues it. Prepared corpora and compiled programs
    (JAX's persistent compilation cache, on by default) are kept in {cache}; GVA_JAX_CACHE names another folder.

    Started many times, by SLURM, on a TPU pod, in a Kubernetes job or with --coordinator, the processes train one model
    together. If one of them is lost or stalls, all exit with 70.
    """
    from gva_jax.options import TrainOptions, parse_with_config

    options = parse_with_config(TrainOptions, args, "gva train", _description(train))
    config = options.config
    from gva_jax import distributed, runtime
    from gva_jax.display import Display
    from gva_jax.train import loop, report

    try:
        distributed.start(options.coordinator, options.num_processes, options.process_id, options.connect_seconds)
    except distributed.LostProcess as error:
        return _refuse(str(error), distributed.LOST)
    display = Display(quiet=not distributed.first())
    runtime.start(display)
    result = loop.train(config, display, profile=options.profile)
    report.show(config, result, display)
    distributed.finish()
    return 0 if result.stopped_by is None else 128 + result.stopped_by


def prepare(args: list[str]) -> None:
    """Tokenise text into a folder of shards: `gva prepare SOURCE --out DIR`.

    SOURCE is one of docstrings (of the installed packages; docstrings:NAME,NAME of some), text:GLOB, jsonl:GLOB,
    parquet:GLOB (quote the pattern; .gz, .bz2, .xz and .zst files of text and of JSON lines too),
    tfds:NAME[/CONFIG]:SPLIT, and hf:NAME[/CONFIG]:SPLIT, which streams from the Hugging Face hub or reads a folder.

    Memory stays the same however much text there is. A document's hash decides whether it is for training, for
    development or held out. A preparation that was killed continues when the same command is given again, to the same
    bytes; one that is complete is checked. To train on it: gva train CONFIG --data.source prepared:DIR
    """
    from gva_jax.options import PrepareOptions, parse

    options = parse(PrepareOptions, args, "gva prepare", _description(prepare))
    from pathlib import Path

    from gva_jax.data.prepare import Recipe, make
    from gva_jax.display import Display

    display = Display()
    recipe = Recipe(
        source=options.source,
        text_field=options.text_field,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        max_bytes=options.max_bytes,
        holdout=options.holdout,
        shard_bytes=round(options.shard_megabytes * 1_000_000),
    )
    corpus = make(recipe, Path(options.out), display, verify=True)
    display.say(f"to train: gva train CONFIG --data.source prepared:{corpus.folder} --model.vocab_size "
                f"{corpus.tokenizer.vocab_size}")  # fmt: skip


def generate(args: list[str]) -> None:
    """Continue prompts from the value cache of a trained run.

    One prompt is continued token by token as text; several at once, each in its row. Compiled programs (JAX's
    persistent compilation cache, on by default) are kept in {cache}; GVA_JAX_CACHE names another folder.
    """
    from gva_jax.options import GenerateOptions, parse

    options = parse(GenerateOptions, args, "gva generate", _description(generate))
    from gva_jax import continuations

    continuations.write(options)


def evaluate(args: list[str]) -> None:
    """Evaluate a run's checkpoint on held-out or development text, as it was trained or with a part swapped.

    Prints loss (nats per token), perplexity and bits per byte of the whole split. `--model.attention.value_transform
    none` takes SiLU out of a GatedV run, and so on: whatever leaves the parameters and the text as they are can be
    changed by its dotted name. Prepared corpora and compiled programs (JAX's persistent compilation cache, on by
    default) are kept in {cache}; GVA_JAX_CACHE names another folder.
    """
    from gva_jax.options import EvaluateOptions, parse_with_run

    options = parse_with_run(EvaluateOptions, args, "gva evaluate", _description(evaluate))
    from gva_jax import evaluate as evaluation

    evaluation.main(options)


def info(args: list[str]) -> None:
    """Print a config's parameters, cache and FLOPs; nothing is trained and no parameter is allocated.

    Cache bytes are those of arrays really allocated, values and rotary keys over capacity.
    """
    from gva_jax.options import InfoOptions, parse_with_config

    options = parse_with_config(InfoOptions, args, "gva info", _description(info))
    import json

    from gva_jax import info as info_module
    from gva_jax.display import Display

    figures = info_module.describe(options.config)
    if options.json:
        print(json.dumps(figures, indent=2))
    else:
        Display().show(info_module.table(options.config, figures))


def plan(args: list[str]) -> int:
    """Compile a config's training step for devices that are not here: memory, FLOPs, network, least step time.

    `gva plan CONFIG --topology v5e:16x16 [--mesh data=2,fsdp=128 ...]`. Meshes are sorted by the lower bound on their
    step time, which is what FLOPs, HBM or the network need at least, whichever is longest; nothing is measured. The
    exit status is 0 if one of the meshes fits the devices' memory, 1 if none does, 2 for bad input. Compilers come with
    the extra `aot`. Compiled programs are kept in {cache}/plan; GVA_JAX_CACHE names another folder.
    """
    from gva_jax import plan as plan_package

    plan_package.environment()
    from gva_jax.options import PlanOptions, parse_with_config

    return plan_package.main(parse_with_config(PlanOptions, args, "gva plan", _description(plan)))


def bench(args: list[str]) -> None:
    """Measure attention variants side by side: `gva bench decode`, `gva bench train CONFIG CONFIG ...`.

    decode: one decode step's attention of GQA, GVA and MLA on the same template, interleaved, medians; bytes that a
    step must read over time, and their share of this machine's own copy bandwidth. --roofline prints what accelerators
    allow at best, without having one.

    train: full-context forward, training step and peak memory of configs, interleaved, medians, and their ratios to the
    first.
    """
    name, *args = args or ["--help"]
    if name in ("--help", "-h"):
        usage = "usage: gva bench decode [OPTIONS]\n       gva bench train CONFIG [CONFIG ...] [OPTIONS]"
        print(f"{usage}\n\n{_description(bench)}\n\n`gva bench decode --help`, `gva bench train --help` list them.")
        return
    if name == "decode":
        from gva_jax.bench import decode as benchmark
    elif name == "train":
        from gva_jax.bench import train as benchmark
    else:
        raise ConfigError(f"no benchmark {name!r}: must be decode or train")
    benchmark.main(args, _description(bench))


def study(args: list[str]) -> int:
    """Compare variants on paired seeds: `gva study STUDY`.

    STUDY is a file that defines study(), or the name of a shipped one. Each variant's learning rate is searched on the
    development split, or fixed; confirmations on fresh seeds start from the same weights, read the same batches, and
    alone see the held-out split. DIR receives a small JSON file for each finished member, report.md, figures and CSV.

    An interrupted study, or one that was limited, goes on when the same command is given again; finished members are
    not run again, also where only their JSON files are there. A study that lacks a run says so and has no mean of it.
    """
    from gva_jax.options import StudyOptions, parse

    options = parse(StudyOptions, args, "gva study", _description(study))
    from gva_jax.study import command

    return command.main(options)


COMMANDS = {
    "train": train,
    "prepare": prepare,
    "generate": generate,
    "evaluate": evaluate,
    "info": info,
    "plan": plan,
    "bench": bench,
    "study": study,
}
