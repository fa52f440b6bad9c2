"""Definitions of the measured collectives: their names, what counts as their bytes, and what a link carries of these.

They are those of nccl-tests. `bytes` is S in the table; algbw = S / t; busbw = algbw x factor is what the slowest link
carries in an optimal algorithm, so it can be compared with the link's own bandwidth for any number of ranks n. HCCL's
names are those of its interface; its tool prints no bus bandwidth.

    all_reduce              S on a rank                             2 (n - 1) / n
    all_gather              S of the output (n parts)               (n - 1) / n
    reduce_scatter          S of the input (n parts)                (n - 1) / n
    broadcast, reduce       S                                       1
    scatter, gather         S on the root (n parts)                 (n - 1) / n
    all_to_all              S that a rank sends, to itself too      (n - 1) / n
    all_to_all_v            the largest S that a rank sends         1 - share that it keeps
    send_recv               S each way, to the next rank            1
"""

HCCL = {
    "all_reduce": "HcclAllReduce",
    "all_gather": "HcclAllGather",
    "reduce_scatter": "HcclReduceScatter",
    "broadcast": "HcclBroadcast",
    "reduce": "HcclReduce",
    "scatter": "HcclScatter",
    "gather": "-",
    "all_to_all": "HcclAlltoAll",
    "all_to_all_v": "HcclAlltoAllV",
    "send_recv": "HcclSend, HcclRecv",
}
COLLECTIVES = tuple(HCCL)

DTYPES = {"fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of an element."""

_WHOLE = ("broadcast", "reduce", "send_recv")


def bus_factor(collective: str, num_ranks: int) -> float:
    """busbw / algbw on so many ranks."""
    if collective == "all_reduce":
        return 2 * (num_ranks - 1) / num_ranks
    if collective in _WHOLE:
        return 1.0
    if collective == "all_to_all_v":
        row = max(uneven(num_ranks), key=sum)
        kept = max(each[rank] for rank, each in enumerate(uneven(num_ranks)) if sum(each) == sum(row))
        return 1 - kept / sum(row)
    return (num_ranks - 1) / num_ranks


def uneven(num_ranks: int) -> list[list[int]]:
    """Parts that rank i (row) sends to rank j (column) in all_to_all_v: 1 or 2, in a symmetric pattern."""
    return [[1 + (i + j) % 2 for j in range(num_ranks)] for i in range(num_ranks)]


def num_elements(collective: str, num_bytes: int, *, dtype: str, num_ranks: int) -> int:
    """Elements of S bytes, or of fewer so that every part is whole; at least one a part."""
    parts = 1 if collective in ("all_reduce", *_WHOLE) else num_ranks
    if collective == "all_to_all_v":
        parts = max(map(sum, uneven(num_ranks)))
    return max(num_bytes // DTYPES[dtype] // parts, 1) * parts
