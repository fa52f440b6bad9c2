"""Ring attention: context parallelism in which no rank holds the whole sequence (Liu et al. 2023, arXiv:2310.01889).

Forward: each rank keeps its queries, and the blocks of keys and values, one of each rank, go around the ring. While
a rank computes with one block, the next one arrives. The output of each block is normalised by the block's own
log-sum-exp, and partial outputs are merged by their log-sum-exps, in fp32, so that the order of the blocks does not
matter. Sinks (sinks.py) are merged last. Backward: the blocks go around again, and the gradients of each block go
behind it, a sum to which every rank adds its terms; after a whole turn they are back at the block's own rank. Saved for
the backward: q, k, v, the output and one number a row.

Block and queries are cut into tiles. Rank r holds chunks r and 2 cp - 1 - r of the sequence (zigzag.py). So of the
block of rank j it computes: for j = r a causal square; for j < r all its queries with the first half of the keys; for
j > r the second half of its queries with all keys. This is the same work in each step, and needs no dense mask.
Windows, documents and ALiBi need dense masks, which are made for one tile of two chunks at a time. Tiles outside of the
window are left out, but their blocks are sent all the same. Of a pattern (specs/block_pattern.py) chunks that no query
sees are left out, and of the others the rectangles are computed that it shows. Under a bidirectional mask a tile is all
queries with all keys of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatronish.attention import tile
from megatronish.attention.dropout_attention import dropped_tile
from megatronish.attention.latent_blocks import LatentSizes, gradients_of_block, open_block
from megatronish.attention.mask import AttentionMask, BlockMask
from megatronish.attention.operations import TileMask
from megatronish.attention.sinks import gradient_of_sinks, kept
from megatronish.attention.zigzag import chunks_of, places_of
from megatronish.ops.dropout import DroppedTile, ProbabilityDropout
from megatronish.ops.library import accumulation_dtype
from megatronish.parallel import comm
from megatronish.parallel.mesh import Axis

BLOCK_TAG, GRADS_TAG = 0, 1


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cp: Axis,
    mask: AttentionMask,
    first_head: int,
    dropout: ProbabilityDropout | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[S/cp, B, n, H], [S/cp, B, k, H], [S/cp, B, k, H] -> [S/cp, B, n H] of the places that zigzag.py says."""
    dropped = None if dropout is None else dropped_tile(dropout, mask, first_head=first_head, device=q.device)
    return _RingAttention.apply(q, k, v, sinks, _RingPlan(cp, mask, dropped))


def ring_of_latents(
    q: Tensor,
    latents: Tensor,
    up: Tensor,
    sizes: LatentSizes,
    *,
    cp: Axis,
    mask: AttentionMask,
    first_head: int,
    dropout: ProbabilityDropout | None,
) -> Tensor:
    """[S/cp, B, n, H], [S/cp, B, r + dr], W [n (dn + dv), r] -> [S/cp, B, n H], as of values that end in zeros.

    Latents go round in the place of keys and values, and each rank makes those of its own heads (latent_blocks.py).
    """
    dropped = None if dropout is None else dropped_tile(dropout, mask, first_head=first_head, device=q.device)
    return _RingAttention.apply(q, latents, up, None, _RingPlan(cp, mask, dropped, sizes))


class Tile(NamedTuple):
    """Tile of attention: some of a rank's queries, some of a block's keys, and their mask."""

    queries: slice
    keys: slice
    block_mask: BlockMask
    first_query: int = 0  # positions, of tiles by chunks
    first_key: int = 0


def tiles_of(rank: int, source: int, *, cp_size: int, mask: AttentionMask, by_chunks: bool) -> list[Tile]:
    """Tiles that `rank` has to compute with the block of rank `source`.

    A query's first tile holds the query itself among its keys, so its log-sum-exp is finite from then on. `by_chunks`
    keeps tiles to two chunks also where a plain causal mask needs none so small.
    """
    mine, theirs = (chunks_of(mask.seq_length, each, cp_size) for each in (rank, source))
    # Each rank holds two chunks of one length, `front` and its mirror image `back`.
    length = len(mine.front)
    front, back, whole = slice(0, length), slice(length, 2 * length), slice(0, 2 * length)
    # Each chunk of another rank's block lies wholly before or wholly after each chunk of queries: what is left needs no
    # mask.
    if not mask.causal and mask.is_plain and not by_chunks:
        return [Tile(whole, whole, "everything")]
    if mask.is_plain and not by_chunks:
        if source == rank:
            return [Tile(whole, whole, "causal")]
        return [Tile(whole, front, "everything") if source < rank else Tile(back, whole, "everything")]
    # A query's own chunk first: its diagonal makes the log-sum-exp finite, and later tiles may be masked whole for it.
    tiles = [
        tile_of_run
        for queries, query_places, key_chunks in (
            (front, mine.front, ((front, theirs.front), (back, theirs.back))),
            (back, mine.back, ((back, theirs.back), (front, theirs.front))),
        )
        for keys, key_places in key_chunks
        for tile_of_run in _tiles_of_runs(mask, HeldRun(query_places, queries.start), HeldRun(key_places, keys.start))
    ]
    return [each for each in tiles if each.block_mask != "nothing"]


class HeldRun(NamedTuple):
    """A run of places of the sequence, and where a rank holds the first of them."""

    places: range
    begin: int

    def part(self, places: range) -> slice:
        """Where the rank holds a part of it."""
        begin = self.begin + places.start - self.places.start
        return slice(begin, begin + len(places))


def _tiles_of_runs(mask: AttentionMask, queries: HeldRun, keys: HeldRun) -> Iterator[Tile]:
    """Tiles of a chunk of queries and a chunk of keys: one, or those of a pattern that shows some of it."""
    pieces = [(queries.places, keys.places)]
    if mask.pattern is not None and mask.pattern.between(queries.places, keys.places) == "some":
        pieces = list(mask.pattern.pieces(queries.places, keys.places))
    for rows, columns in pieces:
        kind = mask.between(rows, columns)
        yield Tile(queries.part(rows), keys.part(columns), kind, rows.start, columns.start)


@dataclass(frozen=True)
class _RingPlan:
    """Order of blocks and tiles in one turn of the ring, the same forward and backward."""

    cp: Axis
    mask: AttentionMask
    dropped: DroppedTile | None
    latents: LatentSizes | None = None

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Each rank, its block as it is sent, and as [2, B, kv, S/cp, H]; this rank's own first.

        The next block arrives while one is used. Of latents, k are these and v is W.
        """
        # One message for keys and values. It is received into another buffer, as the block is used until the end of the
        # step.
        block = torch.stack((k, v)) if self.latents is None else k.contiguous()
        for step in range(self.cp.size):
            is_last = step == self.cp.size - 1
            coming = None if is_last else comm.start_shift(block, self.cp, tag=BLOCK_TAG)
            yield (self.cp.rank - step) % self.cp.size, block, self._opened(block, v)
            if coming is not None:
                block = coming.wait()

    def _opened(self, block: Tensor, up: Tensor) -> Tensor:
        if self.latents is not None:
            return open_block(block, up, self.latents)
        return rearrange(block, "c s b k h -> c b k s h")

    def tiles(self, source: int, device: torch.device) -> Iterator[tuple[slice, slice, TileMask]]:
        """Queries, keys and mask of each tile with the block of rank `source`."""
        cp, mask = self.cp, self.mask
        mine, theirs = (places_of(mask.seq_length, rank, cp.size, device=device) for rank in (cp.rank, source))
        by_chunks = self.dropped is not None or bool(mask.slopes)  # explicit probabilities, and biases, are large
        # Three kinds of mask, from the most explicit to none: probabilities with dropout, a dense mask with biases, a
        # flag.
        for each in tiles_of(cp.rank, source, cp_size=cp.size, mask=mask, by_chunks=by_chunks):
            if self.dropped is not None:
                here = self.dropped._replace(first_query=each.first_query, first_key=each.first_key)
                tile_mask = TileMask(dropped=here)
            elif by_chunks or each.block_mask == "dense":
                places = {"queries": mine[each.queries], "keys": theirs[each.keys]}
                tile_mask = TileMask(dense=mask.dense(**places), alibi=mask.alibi(**places))
            else:
                tile_mask = TileMask(causal=each.block_mask == "causal")
            yield each.queries, each.keys, tile_mask


def _add_terms(block: Tensor, terms: list[tuple[slice, Tensor, Tensor]]) -> None:
    """Add gradients of keys and values, each of some columns, to those of a block [2, B, kv, S/cp, H]."""
    dkeys, dvalues = block
    for columns, dk, dv in terms:
        dkeys[:, :, columns] += dk
        dvalues[:, :, columns] += dv


class _RingAttention(torch.autograd.Function):
    """Ring attention with a backward of its own. Shapes inside: [B, n, S/cp, H] queries, [B, k, S/cp, H] keys.

    Of latents, k is [S/cp, B, r + dr] and v is the weight that makes keys and values of them.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: _RingPlan) -> Tensor:
        # The output so far, merged in at least fp32: `merged` [S/cp, B, n, H], `out` a view [B, n, S/cp, H] of it, and
        # `lse` [B, n, S/cp], the log-sum-exp of all scores so far.
        queries = rearrange(q, "s b n h -> b n s h")
        merged = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
        out = rearrange(merged, "s b n h -> b n s h")
        lse = torch.full(out.shape[:3], -torch.inf, dtype=merged.dtype, device=q.device)
        # One step a rank: the tiles with the block at hand, while the next block arrives.
        for source, _, block in plan.blocks(k, v):
            for rows, columns, tile_mask in plan.tiles(source, q.device):
                new = tile.forward(queries[:, :, rows], *block[..., columns, :], tile_mask=tile_mask)
                tile.merge(out[:, :, rows], lse[:, :, rows], *new)
        # Last and once: a sink is a term of the softmax's sum, and no key of any block.
        ctx.plan = plan
        return kept(ctx, (q, k, v, sinks), out, lse, result=merged.flatten(2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, sinks, result, lse = ctx.saved_tensors
        plan: _RingPlan = ctx.plan
        queries = rearrange(q, "s b n h -> b n s h")
        out, dout = (rearrange(x, "s b (n h) -> b n s h", n=q.shape[2]) for x in (result, grads[0]))
        # Summed over cp tiles in at least fp32, as the output was.
        dq = torch.zeros(q.shape, dtype=accumulation_dtype(q.dtype), device=q.device)
        dqueries = rearrange(dq, "s b n h -> b n s h")
        # Gradients of the block at hand, [2, S/cp, B, k, H], summed by the ranks that had the block before.
        coming: comm.Pending | None = None
        dup = dq.new_zeros(v.shape if plan.latents is not None else 0)
        for source, sent, block in plan.blocks(k, v):
            # 1. This rank's terms of the gradients, while the next block and the sums of this one arrive.
            terms = []
            for rows, columns, tile_mask in plan.tiles(source, q.device):
                mine = (x[:, :, rows] for x in (dout, queries, out, lse))
                here = tile.backward(*mine, *block[..., columns, :], tile_mask=tile_mask)
                dqueries[:, :, rows] += here.q
                terms.append((columns, here.k, here.v))
            # 2. The terms are added to the sums, and the sums follow the block to the next rank.
            # In the first step each rank has its own block, whose sums begin here.
            sums = dq.new_zeros(sent.shape) if coming is None else coming.wait()
            if plan.latents is None:
                _add_terms(rearrange(sums, "c s b k h -> c b k s h"), terms)
            else:
                opened = dq.new_zeros(block.shape)
                _add_terms(opened, terms)
                dsent, dweight = gradients_of_block(opened, sent, v, plan.latents)
                sums += dsent
                dup += dweight
            coming = comm.start_shift(sums, plan.cp, tag=GRADS_TAG)
        # 3. After the last step the sums of this rank's own block come home.
        assert coming is not None
        dk, dv = coming.wait() if plan.latents is None else (coming.wait(), dup)
        # Each rank has the terms of its queries: they are summed with those of the other data ranks.
        dsinks = gradient_of_sinks(dout, out, lse, sinks) if ctx.needs_input_grad[3] else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None
