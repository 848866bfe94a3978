"""The text that a run of several processes trains on: one prepares it, all read the same."""

import json
from pathlib import Path

from gva_jax import distributed
from gva_jax.config import ConfigError, RunConfig
from gva_jax.data.corpus import Corpus, open_corpus
from gva_jax.data.prepare import prepare
from gva_jax.display import Display


def corpus_for_all(config: RunConfig, display: Display) -> Corpus:
    """What the first process prepares, and the others then read: the same folder, or one that holds the same.

    Raises:
      ConfigError: a process that does not see it.
    """
    make = lambda: prepare(config.data, config.model.vocab_size, display)
    if not distributed.many():
        return make()
    made = []

    def folder_and_hash() -> str:
        display.say("the corpus is looked for, or made, by process 0; the others wait for it")
        made.append(make())
        return json.dumps([str(made[0].folder.resolve()), made[0].hash])

    folder, corpus_hash = json.loads(distributed.share(folder_and_hash))
    if made:
        return made[0]
    try:
        corpus = open_corpus(Path(folder))
        told = "is another one"
    except ConfigError as error:
        corpus, told = None, f"cannot be read ({error})"
    if corpus is None or corpus.hash != corpus_hash:
        right = "all must see the same: put data.directory or GVA_JAX_CACHE on a file system that they share"
        raise ConfigError(f"corpus {folder!r} of process 0 {told} in {distributed.here()}: {right}")
    return corpus
