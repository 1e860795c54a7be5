"""The rarely used options of a comparison, in groups that say what they are about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from laplace.baselaplace import KronLaplace

from laplace_debias.comparison.rows import FULL, LARGE, PLAIN
from laplace_debias.network.upstream import decomposed
from laplace_debias.predictive.links import check_link
from laplace_debias.storage.fingerprints import tensors_hash

__all__ = ["CustomMethod", "Fit", "Prediction", "Reference", "Work"]

Fit = Callable[[int, int], KronLaplace]
"""Fits a posterior for a budget and a draw."""


@dataclass(frozen=True)
class CustomMethod:
    """A method of one's own, to stand among the ``methods`` of a comparison.

    Attributes:
        name: What the result calls it. The name of a built-in method replaces that one.
        fit: ``fit(budget, draw)`` returns a fitted approximation around the compared model.
        settings: Whatever decides its numbers, JSON-compatible; kept with its finished cells,
            which are not mixed with those of other settings.

    Raises:
        ValueError: If the name is that of something that is not fitted to draws.

    Example:
        >>> CustomMethod("ours", lambda budget, draw: None, {"dtype": "float64"}).name
        'ours'
    """

    name: str
    fit: Fit
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse names that mean something else."""
        if self.name in (PLAIN, FULL, LARGE):
            raise ValueError(
                "Expected a name for a method that is fitted to draws, got "
                f"{self.name!r}. Remedy: choose another name; a reference of your own goes "
                "into `Reference(posterior=...)`."
            )


@dataclass(frozen=True)
class Prediction:
    """How posteriors become class probabilities, and these metrics.

    Attributes:
        link_approx: ``"probit"``, ``"mc"`` (the paper's), ``"bridge"`` or ``"bridge_norm"``; see
            :mod:`laplace_debias.predictive.links`.
        n_samples: Number of samples for ``"mc"``.
        n_bins: Number of bins of the ECE.

    Raises:
        ValueError: If the link is unknown, or a number is below 1.

    Example:
        >>> Prediction(link_approx="mc", n_samples=100).n_bins
        15
    """

    link_approx: str = "probit"
    n_samples: int = 40
    n_bins: int = 15

    def __post_init__(self) -> None:
        """Check the values."""
        check_link(self.link_approx)
        _at_least_one("n_samples", self.n_samples, "the paper's is 40")
        _at_least_one("n_bins", self.n_bins, "15 is usual")


@dataclass(frozen=True)
class Reference:
    """What the method ``"full"`` stands for, if not for a fit on all training data.

    Attributes:
        posterior: A fitted approximation to use as it is, e.g. one loaded from a file.
        size: Fit it on that many random data (or, with ``posterior``, it was); the reference is
            then called ``"large-batch"``.
        distance: Whether every posterior's ``posterior_distance`` to the reference is measured as
            well, on the first mini-batch of the test data, at each prior precision: the metric
            ``"distance"``. A call that makes any cell then fits the reference.

    Raises:
        ValueError: If the size is below 1.

    Example:
        >>> Reference(size=8000).posterior is None
        True
    """

    posterior: KronLaplace | None = None
    size: int | None = None
    distance: bool = False

    def __post_init__(self) -> None:
        """Check the size."""
        if self.size is not None:
            _at_least_one("size", self.size, "leave it out to use all data")

    def cell(self, N: int) -> tuple[str, str, int]:
        """Return a name that tells this reference from others, its method and its size.

        Args:
            N: Number of training data.

        Raises:
            ValueError: If there are fewer data than ``size``.

        Example:
            >>> Reference().cell(60), Reference(size=40).cell(60)
            (('full', 'full', 60), ('large-batch-40', 'large-batch', 40))
        """
        if self.size is not None and self.size >= N:
            raise ValueError(
                f"Expected a reference's size between 1 and N - 1 = {N - 1}, got {self.size}. "
                "Remedy: leave it out to use all data."
            )
        name, size = (FULL, N) if self.size is None else (LARGE, self.size)
        key = name if self.size is None else f"{name}-{size}"
        if self.posterior is not None:
            eigenvalues = decomposed(self.posterior).eigenvalues
            key += f"-{tensors_hash(values for block in eigenvalues for values in block)}"
        return key, name, size


@dataclass(frozen=True)
class Work:
    """How the work is shared out.

    Attributes:
        draws: Make these of the ``n_draws`` draws only, for instance one half in each of two
            processes that share a folder; a last call without it then collects all of them.
        n_shared: Number of posteriors that share each pass over the evaluation data: less time
            for more memory, and more to repeat after an interruption.

    Raises:
        ValueError: If there are no draws, or ``n_shared`` is below 1.

    Example:
        >>> Work(draws=range(3), n_shared=4).draws
        (0, 1, 2)
    """

    draws: Sequence[int] | None = None
    n_shared: int = 1

    def __post_init__(self) -> None:
        """Check the values."""
        _at_least_one("n_shared", self.n_shared, "1 shares nothing")
        if self.draws is not None:
            object.__setattr__(self, "draws", tuple(self.draws))
            if not self.draws:
                raise ValueError(
                    "Expected at least one draw, got none. Remedy: leave `draws` out to make all."
                )

    def of(self, n_draws: int) -> tuple[int, ...]:
        """Return the draws to make.

        Args:
            n_draws: Number of draws of the comparison.

        Raises:
            ValueError: If one of them does not exist.
        """
        if self.draws is None:
            return tuple(range(n_draws))
        if not set(self.draws) <= set(range(n_draws)):
            raise ValueError(
                f"Expected draws among 0 to {n_draws - 1}, got {list(self.draws)}. Remedy: correct "
                "the numbers, or raise n_draws."
            )
        return tuple(self.draws)


def _at_least_one(name: str, value: int, remedy: str) -> None:
    """Raise unless a number is at least 1."""
    if value < 1:
        raise ValueError(f"Expected {name} >= 1, got {value}. Remedy: {remedy}.")
