"""The type checker that `conftest.py` installs behind jaxtyping's annotations."""

import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype
from jax.typing import DTypeLike

# Flax's custom is to annotate a dtype field with jnp.dtype and to give it jnp.float32, which is a scalar type.
check = beartype(conf=BeartypeConf(is_pep484_tower=True, hint_overrides=FrozenDict({np.dtype: DTypeLike})))
