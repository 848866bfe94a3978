"""What the small studies share."""

# Budget and text of the reduced ones: what two CPU cores do in some hours, on 6.8M tokens of general prose.
REDUCED = {
    "data.source": "prepared:prose",
    "data.max_bytes": None,
    "model.scan_layers": False,  # unrolled, as in quickstart
    "train.steps": 1500,
    "train.eval_every": 50,
    "train.eval_batches": 10,
    "train.checkpoint_every": 200,
}

SILU, NONE = {"model.attention.value_transform": "silu"}, {"model.attention.value_transform": "none"}
