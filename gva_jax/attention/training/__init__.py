"""How training attention is computed, one file a way; `gva_jax.attention.dispatch` chooses among them.

Each has two functions of the same arguments, of one device's share where a mesh splits the batch or the heads:

    attention(q, k, v, segment_ids, scale, interpret) -> (B, T, H, dv)     as `dispatch.training_attention` says
    refusal(q, k, v, segment_ids) -> str | None                            why it cannot serve these, None if it can

They raise nothing: what is wrong for all of them is refused at the door, what is wrong for one by its `refusal`.
"""
