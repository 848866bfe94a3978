import pytest

from gva_jax.config import DataConfig
from gva_jax.data.prepare import prepare
from gva_jax.display import Display

SOURCE = "docstrings:json,email,argparse,logging,asyncio,unittest"


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A few hundred documents of the standard library, each tenth held out, each tenth for development."""
    return DataConfig(source=SOURCE, holdout=0.1, directory=str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def corpus(data):
    return prepare(data, 400, Display(quiet=True))
