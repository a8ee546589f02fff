"""A site's uncertainty bank: how unsure teachers were about each of its training cases (UFPS, eqs. 6 to 8).

It stays on the device, and asking it makes nobody wait. It is site state and never travels; what may leave a site is
its mean and its variance.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from panorgan.errors import RunError
from panorgan.methods.exchange import Content

PREFIX = "uncertainty/"


@dataclass(frozen=True)
class BankStatistics:
    """Numbers of a bank, each a tensor without axes; all 0 while the bank is empty.

    `variance` is the mean squared distance from the mean: the paper's σ is not a standard deviation.
    """

    mean: torch.Tensor
    variance: torch.Tensor
    minimum: torch.Tensor
    maximum: torch.Tensor

    def normalised(self, uncertainty: torch.Tensor) -> torch.Tensor:
        """(U − μ)/(U_max − U_min), in any shape; 0 where the bank knows no spread (empty, one case, all alike)."""
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
        # Sorted: sums must not depend on which case came first, or a resumed run would differ in its last bit.
        self._place = {case: place for place, case in enumerate(sorted(set(cases)))}
        # Not a number: nothing yet. One more place than cases, so that there is always something to sum over.
        self._values = torch.full((len(self._place) + 1,), float("nan"), device=device)

    def put(self, cases: Sequence[str], uncertainty: torch.Tensor) -> None:
        """Remember the uncertainty [B] of a batch's cases; of a case that comes twice, the last."""
        for case, value in zip(cases, uncertainty.detach().float(), strict=True):
            if case not in self._place:
                raise RunError(
                    f"{case!r} is not among the training cases of the uncertainty bank.",
                    fix="Build the bank from the cases that batches are drawn from.",
                )
            self._values[self._place[case]] = value

    def __len__(self) -> int:
        """How many cases have a value; waits for the device."""
        return int((~self._values.isnan()).sum())

    def statistics(self) -> BankStatistics:
        """Mean, variance, minimum and maximum of what is there."""
        values, nothing = self._values, self._values.isnan()
        mean = values.nanmean()
        variance = ((values - mean) ** 2).nanmean()
        least = values.masked_fill(nothing, float("inf")).amin()
        most = values.masked_fill(nothing, float("-inf")).amax()
        empty = nothing.all()
        return BankStatistics(*(number.masked_fill(empty, 0.0) for number in (mean, variance, least, most)))

    def quantile(self, share: float) -> torch.Tensor:
        """The value below which this share of the bank lies, with linear interpolation; 0 while it is empty."""
        return self._values.nanquantile(share).nan_to_num(nan=0.0)

    def as_content(self) -> Content:
        """The bank as numbers `uncertainty/<case>`, for a rule's state."""
        values = self._values.tolist()
        return Content(numbers={f"{PREFIX}{c}": values[p] for c, p in self._place.items() if values[p] == values[p]})

    @classmethod
    def from_content(
        cls, content: Content, cases: Iterable[str], device: torch.device | str = "cpu"
    ) -> UncertaintyBank:
        """The inverse of `as_content`; other numbers, and cases that are no longer there, are left alone."""
        bank = cls(cases, device)
        kept = [content.numbers.get(f"{PREFIX}{case}", float("nan")) for case in bank._place]
        bank._values[:-1] = torch.tensor(kept, dtype=torch.float32)
        return bank
