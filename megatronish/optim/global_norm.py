"""Global norms of gradients and parameters: over all ranks, each element counted once."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from megatronish.parallel import comm
from megatronish.parallel.disk import disk_of, in_memory, pieces_of
from megatronish.parallel.mesh import Axis, Domain

ROW = 2048

ByDomain = Mapping[str, Iterable[Tensor]]
"""Tensors whose elements this rank counts, by the name of their reduction domain."""


def global_norm(counted: ByDomain, domains: Mapping[str, Domain], *, pp: Axis, device: torch.device) -> Tensor:
    """The 2-norm of all elements, each counted once: a scalar in fp64 on `device`, not read yet.

    The whole rule:

    1. Of the model ranks and stages that hold the same elements (a norm's weight over tp, a tied embedding over pp) one
       counts them: `Sharding.is_counted`.
    2. Data ranks that shard the parameters (ZeRO) each count their own part; the parts are disjoint, and padding is
       zero: `BucketPlan.part`, in ZeRO-3 the rows of a rank. `counted_gradients` (zero.py, fully_sharded.py in
       data_parallel/) selects by 1 and 2; frozen parameters have no gradient.
    3. The squares of each domain are summed over `Domain.counting_axes`: over shards and model axes, not over replicas.
    4. The sums of all domains are added, and summed over the pipeline stages.
    """
    squares = {name: [each.to(device) for each in sums_of_squares(list(parts))] for name, parts in counted.items()}
    return _total(squares, domains, pp=pp, zero=torch.zeros((), dtype=torch.float64, device=device)).sqrt()


def num_zeros(counted: ByDomain, domains: Mapping[str, Domain], *, pp: Axis, device: torch.device) -> int:
    """Number of elements that are exactly zero, each element counted once as in `global_norm`."""
    zeros = {
        name: [(part.numel() - torch.count_nonzero(part)).to(device) for part in parts]
        for name, parts in counted.items()
    }
    return int(_total(zeros, domains, pp=pp, zero=torch.zeros((), dtype=torch.int64, device=device)))


def _total(terms: ByDomain, domains: Mapping[str, Domain], *, pp: Axis, zero: Tensor) -> Tensor:
    """The sum of scalars over the ranks that count them. Every rank has every domain, perhaps without terms."""
    total = zero.clone()
    # Collectives are matched by order, so every rank reduces every domain, in the order of `domains`.
    for name, domain in domains.items():
        of_domain = zero.clone()
        for term in terms[name]:
            of_domain += term
        for axis in domain.counting_axes:
            comm.all_reduce(of_domain, axis)
        total += of_domain
    return comm.all_reduce(total, pp)


def sums_of_squares(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Scalars in fp64 whose sum is that of all squares: one for all tensors on a GPU, one for each of the others."""
    on_gpu = [tensor for tensor in tensors if tensor.is_cuda]
    others = [sum_of_squares(tensor) for tensor in tensors if not tensor.is_cuda]
    return [sum_at_once(on_gpu), *others] if on_gpu else others


def sum_at_once(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of all elements, a scalar in fp64, in a few launches for any number of tensors.

    Their norms are added up in fp64 from the first element on: on a GPU the memory takes longer to read than that. On
    a CPU it would take longer than `sum_of_squares`.
    """
    norms = torch._foreach_norm([tensor.reshape(-1) for tensor in tensors], 2, dtype=torch.float64)
    return torch.stack(norms).square().sum()


def sum_of_squares(x: Tensor) -> Tensor:
    """[...] -> scalar in fp64, exact to about 1e-7.

    One fp32 norm over all elements is not: torch adds them up in a few fp32 lanes, and over 8 million gradients of
    wide spread the result is off by 4e-4. So each ROW has an fp32 norm of its own, and fp64 adds up the rows.
    """
    flat = x.reshape(-1)
    whole = flat.numel() // ROW * ROW
    if disk_of(x) is None:
        rows = _squares(flat[:whole].view(-1, ROW))
    else:  # piece by piece, and added up at once: the same number as of one in memory
        rows = torch.cat([_squares(piece.view(-1, ROW)) for piece in pieces_of(flat[:whole])] or [flat.new_empty(0)])
    return rows.sum() + _squares(in_memory(flat[whole:]).view(1, -1)).sum()


def _squares(rows: Tensor) -> Tensor:
    """[rows, n] -> [rows] in fp64."""
    return torch.linalg.vector_norm(rows, dim=1).double().square()
