"""A site's uncertainty bank: the teachers' uncertainty about each of its training cases (UFPS, eqs. 6 to 8).

It stays on the device, and reading it does not synchronise. It is site state and never travels; only its mean and
variance may leave a site.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from panorgan.errors import RunError
from panorgan.methods.protocol import Payload

PREFIX = "uncertainty/"


@dataclass(frozen=True)
class BankStatistics:
    """Statistics of a bank, each a tensor without axes; all 0 while the bank is empty.

    `variance` is the mean squared distance from the mean: the paper's σ is not a standard deviation.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    minimum: torch.Tensor
    maximum: torch.Tensor

    def normalised(self, uncertainty: torch.Tensor) -> torch.Tensor:
        """(U − μ)/(U_max − U_min), in any shape; 0 where the bank has no spread (empty, one case, all equal)."""
        spread = self.maximum - self.minimum
        flat = spread <= 0
        return ((uncertainty - self.mean) / spread.masked_fill(flat, 1.0)).masked_fill(flat, 0.0)


class UncertaintyBank:
    """The latest uncertainty of every training case.

    Parameters
    ----------
    cases : names of the site's training cases; the bank never holds more than one value for each.
    device : where the values lie.
    """

    def __init__(self, cases: Iterable[str], device: torch.device | str = "cpu") -> None:
        self._cases = frozenset(cases)
        # Cases get slots in order of arrival: the filled ones come first, and their number is known without the device.
        self._place: dict[str, int] = {}
        self._values = torch.zeros(len(self._cases), device=device)
        self._ordered: torch.Tensor | None = None

    def put(self, cases: Sequence[str], uncertainty: torch.Tensor) -> None:
        """Store the uncertainty [B] of a batch's cases; of a case that comes twice, the last."""
        self._ordered = None
        for case, value in zip(cases, uncertainty.detach().float(), strict=True):
            if case not in self._cases:
                raise RunError(
                    f"{case!r} is not among the training cases of the uncertainty bank.",
                    code="case-not-in-bank",
                    fix="Build the bank from the cases that batches are drawn from.",
                )
            self._values[self._place.setdefault(case, len(self._place))] = value

    def __len__(self) -> int:
        """The number of cases with a value."""
        return len(self._place)

    def statistics(self) -> BankStatistics:
        """Mean, variance, minimum and maximum of the values."""
        if not self._place:
            return BankStatistics(*self._values.new_zeros(4))
        values = self._sorted()
        variance, mean = torch.var_mean(values, correction=0)
        return BankStatistics(mean, variance, minimum=values[0], maximum=values[-1])

    def quantile(self, share: float) -> torch.Tensor:
        """The value below which this share of the bank lies, with linear interpolation; 0 while it is empty."""
        if not self._place:
            return self._values.new_zeros(())
        values, place = self._sorted(), share * (len(self) - 1)
        return torch.lerp(values[math.floor(place)], values[math.ceil(place)], place % 1)

    def _sorted(self) -> torch.Tensor:
        """The values, sorted: a sum that depended on the order of cases would make a resumed run differ in the last
        bit."""
        if self._ordered is None:
            self._ordered = self._values[: len(self)].sort().values
        return self._ordered

    def as_payload(self) -> Payload:
        """The bank as numbers `uncertainty/<case>`, for a rule's state."""
        values = self._values.tolist()
        return Payload(scalars={f"{PREFIX}{case}": values[place] for case, place in sorted(self._place.items())})

    @classmethod
    def from_payload(
        cls, payload: Payload, cases: Iterable[str], device: torch.device | str = "cpu"
    ) -> UncertaintyBank:
        """The inverse of `as_payload`; other numbers, and cases that no longer exist, are ignored."""
        bank = cls(cases, device)
        kept = [case for case in sorted(bank._cases) if f"{PREFIX}{case}" in payload.scalars]
        values = [payload.scalars[f"{PREFIX}{case}"] for case in kept]
        bank.put(kept, torch.tensor(values, dtype=torch.float32, device=device))
        return bank
