"""Sizes of the pieces in which large tensors are worked on where no kernel fuses the operations, by device.

A CPU is fastest while a piece stays in the cache of a core, and starting an operator costs it next to nothing. A GPU
has no such cache, each operator costs it some microseconds however small, and a piece must fill all its processors. So
a GPU's pieces are as large as memory that is free in any case allows: some hundred megabytes.
"""

from typing import NamedTuple


class ChunkSizes(NamedTuple):
    """Bytes of the fp32 scores of a block of attention with dropout, and the queries that it has at most.

    And elements of a quantised matrix, and elements of logits in 16 bits, that are worked on at once.
    """

    score_bytes: int
    score_queries: int
    quantised: int
    logits: int


CPU = ChunkSizes(score_bytes=4 * 2**20, score_queries=64, quantised=2**20, logits=2**20)
GPU = ChunkSizes(score_bytes=256 * 2**20, score_queries=2048, quantised=2**24, logits=2**26)


def chunk_sizes(device_type: str) -> ChunkSizes:
    """Those of a CPU, or of any other device."""
    return CPU if device_type == "cpu" else GPU


LARGE_MATRIX = 4_000_000
"""Elements of an expert's matrix from which on one GEMM for each expert, which adds to a sum in fp32, is worth its
launches: a GEMM for all, rounded, and an addition move 4 bytes an element more. By an H100's memory, 3.35 TB/s, that is
5 us for so many, about what a launch takes; it has not been measured."""
