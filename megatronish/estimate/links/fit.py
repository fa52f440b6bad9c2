"""Fit of t = alpha + S / B to the times of a collective: what planning needs to know of it.

Relative errors count (weights 1 / t^2), for sizes range over six powers of ten. Times are the shortest of each size,
as others on the machine only add. Where one line is off by more than 20 % on average there are two: small sizes, where
latency counts, and large ones, where bandwidth does. What is too noisy is fitted, so that it can be shown, but not
accepted: planning must not be built on it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

LARGEST_ERROR = 0.25  # of an accepted fit, on average
LARGEST_ERROR_OF_ONE = 0.20  # of one line; with more there are two
LARGEST_SPREAD = 3.0  # of the slowest to the quickest run of one size
LEAST_GROWTH = 0.01  # of the time of the largest size, by its bytes: less is latency alone
FEWEST_SIZES = 3  # of a line: any line goes through two points


class SizeTimes(NamedTuple):
    """Runs of one size: its bytes, the shortest and the longest seconds."""

    num_bytes: int
    shortest: float
    longest: float

    @property
    def spread(self) -> float:
        """The longest in terms of the shortest."""
        return self.longest / self.shortest


@dataclass(frozen=True)
class LinkFit:
    """t = alpha_s + bytes / bandwidth, for sizes from bytes_min to bytes_max; `reason` says why it is not accepted.

    `num_left_out` counts the sizes, of all that were measured, whose runs differed too much.
    Where time does not grow with size, the bandwidth is a lower bound: with it, the largest size takes 1 % longer.
    """

    alpha_s: float
    bandwidth_bytes_per_s: float
    mean_error: float
    bytes_min: int
    bytes_max: int
    num_left_out: int = 0
    reason: str | None = None

    @property
    def accepted(self) -> bool:
        """Whether planning may use it."""
        return self.reason is None

    def seconds(self, num_bytes: float) -> float:
        """Time of a collective of so many bytes."""
        return self.alpha_s + num_bytes / self.bandwidth_bytes_per_s

    def as_json(self, **names: Any) -> dict[str, Any]:
        """`{"fit": ...}`, with `names` (collective, axis, ranks, ...) in front."""
        return {"fit": names | asdict(self) | {"accepted": self.accepted}}


def fits_of(sizes: Sequence[SizeTimes]) -> list[LinkFit]:
    """One line through the times of all sizes, or two that meet between two sizes; none of fewer than three sizes.

    Sizes whose runs differ too much are left out. If these are more than half, all are fitted and nothing is accepted.
    """
    sizes = sorted(sizes)
    if len(sizes) < FEWEST_SIZES:
        return []
    quiet = [size for size in sizes if size.spread <= LARGEST_SPREAD]
    if len(quiet) < max(FEWEST_SIZES, len(sizes) / 2):
        noisiest = max(sizes, key=lambda size: size.spread)
        reason = (
            f"at {len(sizes) - len(quiet)} of {len(sizes)} sizes the slowest run took more than {LARGEST_SPREAD:g} "
            f"times the quickest, at {noisiest.num_bytes} bytes {noisiest.spread:.1f} times"
        )
        return [replace(line, reason=reason) for line in _lines(sizes)]
    return [replace(_judged(line), num_left_out=len(sizes) - len(quiet)) for line in _lines(quiet)]


def _lines(sizes: Sequence[SizeTimes]) -> list[LinkFit]:
    """One line, or two where one is off by too much and there are sizes enough for two."""
    one = _line(sizes)
    cuts = range(FEWEST_SIZES, len(sizes) - FEWEST_SIZES + 1)
    if one.mean_error <= LARGEST_ERROR_OF_ONE or not cuts:
        grows = sizes[-1].num_bytes / one.bandwidth_bytes_per_s > 1.01 * LEAST_GROWTH * one.alpha_s
        return [one if grows else replace(one, reason="time does not grow with size")]
    pairs = [(_line(sizes[:cut]), _line(sizes[cut:])) for cut in cuts]
    total = [a.mean_error * cut + b.mean_error * (len(sizes) - cut) for (a, b), cut in zip(pairs, cuts, strict=True)]
    return list(pairs[total.index(min(total))])


def _line(sizes: Sequence[SizeTimes]) -> LinkFit:
    """Weighted least squares of t = a + S b: with x = 1 / t and y = S / t, a x + b y is to be 1."""
    pairs = [(1 / size.shortest, size.num_bytes / size.shortest) for size in sizes]
    xx, xy, yy = (sum(p[i] * p[j] for p in pairs) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(p[i] for p in pairs) for i in (0, 1))
    determinant = xx * yy - xy * xy
    alpha, slope = (x * yy - y * xy) / determinant, (xx * y - xy * x) / determinant
    if alpha < 0:  # no time is negative: bandwidth alone
        alpha, slope = 0.0, y / yy
    elif slope * sizes[-1].num_bytes <= LEAST_GROWTH * alpha:  # or latency alone, and a bound of the bandwidth
        alpha = x / xx
        slope = LEAST_GROWTH * alpha / sizes[-1].num_bytes
    error = sum(abs((alpha + slope * size.num_bytes) / size.shortest - 1) for size in sizes) / len(sizes)
    return LinkFit(alpha, 1 / slope, error, sizes[0].num_bytes, sizes[-1].num_bytes)


def _judged(line: LinkFit) -> LinkFit:
    if line.reason is not None or line.mean_error <= LARGEST_ERROR:
        return line
    reason = f"it is off by {line.mean_error:.0%} on average, more than {LARGEST_ERROR:.0%}"
    return replace(line, reason=reason)
