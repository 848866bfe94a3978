"""How training attention is computed, one file a way; `gva_jax.attention.dispatch` chooses among them.

Each has two functions of the same arguments, of one device's share where a mesh splits the batch or the heads:

    attention(q, k, v, segment_ids, scale, interpret, shard) -> (B, T, H, dv)     as `dispatch.training_attention` says
    refusal(q, k, v, segment_ids) -> str | None                                   why it cannot serve these, None if so

Where a mesh splits the sequence, q is a stretch of it (which one says `shard`, a `common.Shard`) and k, v and
segment_ids are of the whole sequence. They raise nothing: what is wrong for all of them is refused at the door, what is
wrong for one by its `refusal`.
"""
