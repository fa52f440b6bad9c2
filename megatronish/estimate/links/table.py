"""Text tables of measured collectives and of their fits."""

from megatronish.estimate.links.fit import LinkFit
from megatronish.estimate.links.measure import LinkTimes

HEADER = (
    f"{'axis':<6}{'ranks':>6}{'nodes':>6}  {'collective':<15}{'HCCL':<21}{'dtype':<6}{'bytes':>11}"
    f"{'min us':>11}{'median us':>11}{'max us':>11}{'algbw GB/s':>12}{'busbw GB/s':>12}  checked"
)


def row_line(row: LinkTimes) -> str:
    """Line of one row, under HEADER."""
    micros = "".join(f"{1e6 * seconds:>11.1f}" for seconds in (row.seconds_min, row.seconds_median, row.seconds_max))
    return (
        f"{row.axis:<6}{row.ranks:>6}{row.nodes:>6}  {row.collective:<15}{row.hccl:<21}{row.dtype:<6}{row.bytes:>11}"
        f"{micros}{row.algbw / 1e9:>12.3f}{row.busbw / 1e9:>12.3f}  {'right' if row.checked else 'WRONG'}"
    )


FIT_HEADER = (
    f"{'axis':<6}{'ranks':>6}  {'collective':<15}{'from bytes':>11}{'to bytes':>11}{'alpha us':>11}{'B GB/s':>9}"
    f"{'error':>7}  for planning"
)


def fit_line(row: LinkTimes, fit: LinkFit) -> str:
    """Line of one fit, under FIT_HEADER."""
    left_out = (
        f" without {fit.num_left_out} noisy size{'s' if fit.num_left_out > 1 else ''}" if fit.num_left_out else ""
    )
    verdict = f"accepted{left_out}" if fit.accepted else f"refused: {fit.reason}"
    return (
        f"{row.axis:<6}{row.ranks:>6}  {row.collective:<15}{fit.bytes_min:>11}{fit.bytes_max:>11}"
        f"{1e6 * fit.alpha_s:>11.1f}{fit.bandwidth_bytes_per_s / 1e9:>9.3f}{fit.mean_error:>7.0%}  "
        f"{verdict}"
    )
