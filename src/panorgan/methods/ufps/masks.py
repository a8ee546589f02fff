"""Masks for sUSAM: which weights of a model are perturbed, exact selection among millions, and masks on the wire.

Equation numbers are those of UFPS. Masks are flat, [n] bool, in the order of `shared.sharpness`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch

from panorgan.errors import ConfigError, MessageError, RunError
from panorgan.methods.shared.sharpness import pieces

# -- which weights move ----------------------------------------------------------------------------------------------


def largest(values: torch.Tensor, share: float) -> torch.Tensor:
    """M_L: true at exactly the round(share·n) entries of largest magnitude; of equal ones the first, [n] bool.

    NaN counts as larger than anything. The exact answer takes little more than one pass: a sample estimates the limit,
    everything above is in, and only the few entries near it are sorted. A GPU sorts them all.
    """
    values = values.detach()
    count = _count(share, len(values))
    if count in (0, len(values)):
        return torch.full(values.shape, count > 0, dtype=torch.bool, device=values.device)
    if values.is_cuda:
        return _largest_by_sorting(values, count)
    low, high = _bracket(values, count)
    mask = torch.empty(values.shape, dtype=torch.bool, device=values.device)
    above, places, doubtful = 0, [], []
    for start, piece in pieces(values, _PIECE):
        keys = _magnitude(piece)
        sure = _compare(torch.ge, keys, high)
        mask[start : start + len(piece)] = sure
        inside = _places(_compare(torch.gt, keys, low).gt_(sure).bool())
        above += int(sure.sum(dtype=torch.int32))
        places.append(inside + start)
        doubtful.append(keys[inside])
    place, key = torch.cat(places), torch.cat(doubtful)
    missing = count - above
    if 0 < missing <= len(key):
        limit = key.sort().values[len(key) - missing]
        larger = key > limit
        mask[place[larger]] = True
        mask[place[key == limit][: missing - int(larger.count_nonzero())]] = True
        return mask
    # Too many values equal the limit, or the sample was not representative.
    return _at_limit(values, count, _limit(values, count, high if missing <= 0 else low))


def extra(local: torch.Tensor, global_: torch.Tensor, share: float, generator: torch.Generator) -> torch.Tensor:
    """M_E: a random part of what is in M_G and not in M_L (eq. 13), exactly min(round(share·n), all of it), [n] bool.

    Every subset of that size is equally likely. `M_L | extra(...)` is the mask of eq. 14. Every position draws one of
    128 lots, the highest are in, and only those that share the last lot draw again. The generator may live on the CPU
    while the masks do not: then every device gives the same mask. With a generator of its own a GPU sorts long lots.
    """
    chosen = global_ > local
    if generator.device.type == "cuda":
        return _part_by_sorting(chosen, _count(share, len(local)), generator)
    available = int(chosen.count_nonzero())
    count = min(_count(share, len(local)), available)
    if count == available:
        return chosen
    winning = chosen.view(torch.uint8)  # the same memory; fresh memory would cost more than the arithmetic
    lots = _random_bytes(len(local), generator).to(chosen.device).bitwise_and_(127)
    lots.add_(winning, alpha=128)  # positions that may not be chosen stay below 128
    lot = 255 - 128 * count // available  # estimate of the last lot that wins, from 128 to 255
    torch.gt(lots, lot, out=winning)
    while (missing := count - int(chosen.count_nonzero())) < 0:
        lot += 1
        torch.gt(lots, lot, out=winning)
    while len(equals := _places_of(lots, lot)) <= missing:
        chosen[equals] = True
        missing -= len(equals)
        lot -= 1
    order = torch.randperm(len(equals), generator=generator, device=generator.device)
    chosen[equals[order[:missing].to(equals.device)]] = True
    return chosen


class Momentum:
    """The running mean of |g|, a site's long-term ranking of weights (eq. 11).

    It starts at zero, so that the first gradient weighs no more than a later one. It is a mean of magnitudes: signed
    gradients that oscillate would cancel, and the most important weights would appear unimportant.
    """

    def __init__(self, factor: float = 0.9) -> None:
        self.factor = factor
        self.values: torch.Tensor | None = None
        """[n], or nothing before the first update."""

    def update(self, gradient: torch.Tensor) -> None:
        """G ← α·G + (1 − α)·|g| for a flat gradient [n]."""
        magnitude = gradient.detach().abs()
        if self.values is None:
            self.values = torch.zeros_like(magnitude, dtype=torch.promote_types(magnitude.dtype, torch.float32))
        self.values.mul_(self.factor).add_(magnitude, alpha=1 - self.factor)

    def mask(self, share: float) -> torch.Tensor:
        """M_{L,mo}: the largest entries of the running mean, [n] bool."""
        if self.values is None:
            raise RunError("A mask was requested before the momentum has seen a gradient.", code="no-gradient-yet")
        return largest(self.values, share)

    def state(self) -> dict[str, torch.Tensor]:
        """What must survive a restart."""
        return {} if self.values is None else {"momentum": self.values}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state` returned."""
        self.values = state["momentum"].clone() if "momentum" in state else None


# -- masks on the wire -----------------------------------------------------------------------------------------------


def pack(mask: torch.Tensor) -> torch.Tensor:
    """[n] bool as bits, [ceil(n/8)] uint8; position i is bit i % 8 of byte i // 8, unused bits are 0."""
    return torch.from_numpy(np.packbits(mask.cpu().numpy(), bitorder="little")).to(mask.device)


def unpack(bits: torch.Tensor, n: int) -> torch.Tensor:
    """The [n] bool that `pack` was given. It runs in every step, so it stays on the GPU."""
    _check_length(bits, n)
    table = (torch.arange(256, device=bits.device)[:, None] >> torch.arange(8, device=bits.device)) & 1
    words = table.bool().view(torch.int64).squeeze(1)
    return words[bits.int()].view(torch.bool)[:n]


def global_mask(masks: Iterable[torch.Tensor], n: int) -> torch.Tensor:
    """M_G: weights that are in some sites' masks but not in all (eq. 12); packed masks in, one packed mask out."""
    some = every = None
    for bits in masks:
        _check_length(bits, n)
        some = bits if some is None else some | bits
        every = bits if every is None else every & bits
    if some is None or every is None:
        return torch.zeros(_bytes_for(n), dtype=torch.uint8)
    disputed = some & ~every
    if n % 8:
        disputed[-1] &= (1 << n % 8) - 1  # a site may have set bits that belong to no weight
    return disputed


def _bytes_for(n: int) -> int:
    return -(-n // 8)


def _check_length(bits: torch.Tensor, n: int) -> None:
    if bits.shape != (_bytes_for(n),) or bits.dtype != torch.uint8:
        raise MessageError(
            "A packed mask has the wrong size.",
            code="packed-mask-size",
            why=f"{n} positions need {_bytes_for(n)} bytes; these are {list(bits.shape)} of {bits.dtype}.",
        )


# -- exact selection among millions ----------------------------------------------------------------------------------

_SAMPLE = 1 << 18
"""Entries that are sorted to estimate the limit."""
_PIECE = 1 << 19
"""Entries processed at once on a CPU, few enough to stay in its cache."""


def _count(share: float, n: int) -> int:
    if not 0 <= share <= 1:
        raise ConfigError(f"A share of the weights must lie between 0 and 1, not {share}.", code="share-out-of-range")
    return round(share * n)


# A GPU sorts millions in the time of a few passes. Asking it for a count would synchronise, so nothing is asked here.


def _largest_by_sorting(values: torch.Tensor, count: int) -> torch.Tensor:
    """`largest`; of equal entries the first are chosen."""
    order = _magnitude(values).sort(descending=True, stable=True).indices
    return torch.zeros(values.shape, dtype=torch.bool, device=values.device).index_fill_(0, order[:count], True)


def _part_by_sorting(chosen: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """A random subset of that size of the chosen entries, [n] bool, or all. No two lots of 62 bits are equal."""
    lots = torch.randint(1 << 62, chosen.shape, generator=generator, device=chosen.device)
    order = torch.where(chosen, lots, -1).sort(descending=True).indices
    wins = torch.arange(len(chosen), device=chosen.device) < chosen.count_nonzero().clamp(max=count)
    return torch.zeros_like(chosen).index_copy_(0, order, wins)


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    """Integers in the order of |values|: the bits of a float without its sign. Unlike floats they also order NaN."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return values.view(kind) & torch.iinfo(kind).max


def _places(mask: torch.Tensor) -> torch.Tensor:
    """`mask.nonzero()` of a sparse mask, eight at a time."""
    whole = len(mask) // 8 * 8
    words = mask[:whole].view(torch.int64).nonzero().squeeze(1)
    row, column = mask[:whole].view(-1, 8)[words].nonzero().unbind(1)
    return torch.cat([words[row] * 8 + column, mask[whole:].nonzero().squeeze(1) + whole])


def _places_of(values: torch.Tensor, value: int) -> torch.Tensor:
    """Where bytes have a rare value."""
    found = ((start, _compare(torch.eq, piece, value).view(torch.bool)) for start, piece in pieces(values, _PIECE))
    return torch.cat([_places(mask) + start for start, mask in found])


def _bracket(values: torch.Tensor, count: int) -> tuple[int, int]:
    """Two magnitudes between which the count-th largest very probably lies."""
    step = max(1, len(values) // _SAMPLE) | 1  # odd, so as not to align with the shapes of layers
    sample = _magnitude(values[::step].contiguous()).sort().values
    expected = len(sample) * (1 - count / len(values))
    margin = 2 + 5 * math.sqrt(expected * count / len(values))
    first, last = math.floor(expected - margin), math.ceil(expected + margin)
    low = int(sample[first]) if first >= 0 else -1
    high = int(sample[last]) if last < len(sample) else torch.iinfo(sample.dtype).max
    return low, high


def _limit(values: torch.Tensor, count: int, guess: int) -> int:
    """The magnitude of the count-th largest entry. Fast if it is `guess`."""

    def reached(magnitude: int) -> bool:
        return (
            sum(int((_magnitude(piece) >= magnitude).count_nonzero()) for _, piece in pieces(values, _PIECE)) >= count
        )

    low, high = 0, torch.iinfo(_magnitude(values[:1]).dtype).max
    if reached(guess):
        low = max(guess, 0)
    else:
        high = guess - 1
    middle = min(low + 1, high)  # if the guess is right, the next value is too high
    while low < high:
        low, high = (middle, high) if reached(middle) else (low, middle - 1)
        middle = (low + high + 1) // 2
    return low


def _at_limit(values: torch.Tensor, count: int, limit: int) -> torch.Tensor:
    """True above the limit and at the first entries equal to it, `count` in all."""
    mask = torch.cat([_magnitude(piece) > limit for _, piece in pieces(values, _PIECE)])
    missing = count - int(mask.count_nonzero())
    for start, piece in pieces(values, _PIECE):
        equals = (_magnitude(piece) == limit).nonzero().squeeze(1)[:missing]
        mask[equals + start] = True
        missing -= len(equals)
        if missing == 0:
            break
    return mask


def _compare(how: Callable[..., torch.Tensor], values: torch.Tensor, limit: int) -> torch.Tensor:
    """A comparison as 0 and 1 in the type of the values: several times faster than one that returns bools."""
    return how(values, limit, out=torch.empty_like(values))


def _random_bytes(n: int, generator: torch.Generator) -> torch.Tensor:
    """[n] uint8; eight at a time, because drawing one number costs the same whatever its size."""
    words = torch.empty(_bytes_for(n), dtype=torch.int64, device=generator.device)
    return words.random_(-(2**63), None, generator=generator).view(torch.uint8)[:n]
