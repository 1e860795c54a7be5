"""Names of the methods, and the options of automatic and cross-fitted fits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from laplace_debias.debias.curvature_recorder import CurvatureRecorder
from laplace_debias.debias.sampling import checked_scores

__all__ = [
    "AUTO",
    "CROSSFIT",
    "SINGLE",
    "TWO_BATCH",
    "AutoOptions",
    "CrossfitOptions",
    "ResolvedOptions",
    "debias_mode",
    "method_options",
]

TWO_BATCH, SINGLE, CROSSFIT, AUTO = "two-batch", "single", "crossfit", "auto"

SAMPLINGS = ("uniform", "curvature")
MIN_PASSES = 8
"""Fewest backward passes of an automatic fit: two for each of its four groups."""


def debias_mode(debias: bool | str) -> str:
    """The name of a debiasing method.

    Args:
        debias: ``True`` or ``"two-batch"``, ``"auto"``, ``"crossfit"``, or ``"single"``.

    Returns:
        ``"two-batch"``, ``"auto"``, ``"crossfit"`` or ``"single"``.

    Raises:
        ValueError: For anything else.

    Example:
        >>> debias_mode(True)
        'two-batch'
    """
    if debias is True:
        return TWO_BATCH
    if isinstance(debias, str) and debias in (TWO_BATCH, SINGLE, CROSSFIT, AUTO):
        return debias
    raise ValueError(
        "Expected `debias` to be 'auto' (as many passes as a tolerance needs), True or 'two-batch' "
        "(directions from one mini-batch, curvatures from another), 'crossfit' (directions from "
        "all data drawn, curvatures from folds that did not choose them), 'single' (one "
        "mini-batch for both, biased) or False (laplace-torch's own class), got "
        f"{debias!r}. Remedy: `Laplace(model, ..., debias=True)`."
    )


@dataclass(frozen=True)
class AutoOptions:
    """Options of ``debias="auto"``.

    Attributes:
        tolerance: Estimated distance to the full-batch posterior at which the fit may stop;
            ``None`` spends ``n_passes`` instead.
        n_passes: Most backward passes, by default as many as the tolerance needs.
        max_seconds: No round of passes is begun that would end later.
        n_pool: Number of data in forward passes, for the input factors and the scores; by default
            8 per backward pass, at least 2,048, or all there are.
        scores: Scores of all data of the dataset, from training, by which data are drawn instead
            (map-style datasets only), or the
            :class:`~laplace_debias.debias.curvature_recorder.CurvatureRecorder` that has them.
        generator: Source of the draws.

    Raises:
        ValueError: If a number or a combination is impossible.

    Example:
        >>> AutoOptions(tolerance=None, n_passes=576).pool_size(576)
        4608
    """

    tolerance: float | None = 0.05
    n_passes: int | None = None
    max_seconds: float | None = None
    n_pool: int | None = None
    scores: Tensor | Sequence[float] | CurvatureRecorder | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without data."""
        limits = (("tolerance", 1.0, "0.05 is 5 % off"), ("max_seconds", math.inf, "leave it out"))
        for name, below, remedy in limits:
            value = getattr(self, name)
            if value is not None and not (isinstance(value, Real) and 0 < float(value) < below):
                what = f"`{name}` below {below:g}"
                raise ValueError(f"Expected a positive {what}, got {value!r}. Remedy: {remedy}.")
        for name, least in (("n_passes", MIN_PASSES), ("n_pool", MIN_PASSES)):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and value >= least):
                raise ValueError(
                    f"Expected `{name}` as a whole number of at least {least}, got {value!r}. "
                    "Remedy: pass a larger one, or leave it out."
                )
        if self.tolerance is None and self.n_passes is None:
            raise ValueError(
                "Expected `n_passes` with tolerance=None, got neither. Remedy: pass one of them."
            )
        if self.scores is not None:
            scores = getattr(self.scores, "scores", self.scores)  # a recorder's
            object.__setattr__(self, "scores", checked_scores(torch.as_tensor(scores)))

    def pool_size(self, n_passes: int) -> int:
        """Number of data in forward passes for so many backward passes."""
        return self.n_pool or max(2048, 8 * n_passes)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the options of this method, as the posteriors' constructors take them."""
        return tuple(f.name for f in fields(cls) if f.name != "generator")


@dataclass(frozen=True)
class CrossfitOptions:
    """Options of ``debias="crossfit"``.

    Attributes:
        n_folds: Number K of folds.
        sampling: ``"uniform"`` takes data as the loader yields them; ``"curvature"`` scores a pool
            by a forward pass and draws by score.
        n_curvature: Number M of data with backward passes, for the output factors. By default K
            mini-batches. Exact vectors take several passes per datum.
        n_passes: Most backward passes, instead of M: one per datum (``fisher="mc"``, the default
            with it), or as many as a datum has exact vectors.
        n_input: Number of data for the input factors, forward passes only. By default M
            (uniform) or 4 M (curvature). Linear layers of at least ``2 * n_input`` inputs that see
            one row per datum take the rows of more scored data, up to half their number of inputs.
        n_pool: Number of data that are scored, by default 16 M or all there are. At least
            ``n_input`` are.
        scores: Non-negative scores of all data of the dataset, which replace the scoring pass
            (curvature, map-style datasets only).
        generator: Source of the draws.

    Raises:
        ValueError: If a number or a combination is impossible.

    Example:
        >>> CrossfitOptions(sampling="curvature", n_curvature=32).resolved(batch_size=100).n_pool
        512
    """

    n_folds: int = 2
    sampling: str = "uniform"
    n_curvature: int | None = None
    n_input: int | None = None
    n_pool: int | None = None
    scores: Tensor | Sequence[float] | None = None
    generator: torch.Generator | None = None
    n_passes: int | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without data."""
        if self.sampling not in SAMPLINGS:
            raise ValueError(
                f"Expected `sampling` to be one of {SAMPLINGS}, got {self.sampling!r}. Remedy: "
                "'curvature' for classifiers, 'uniform' otherwise."
            )
        for name in ("n_folds", "n_curvature", "n_passes", "n_input", "n_pool"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise ValueError(
                    f"Expected `{name}` to be a whole number, got {value!r}. Remedy: pass an int."
                )
        if self.n_folds < 2:
            raise ValueError(
                f"Expected `n_folds` of at least 2, got {self.n_folds}: each fold measures along "
                "directions that the others chose. Remedy: n_folds=2."
            )
        for name in ("n_curvature", "n_passes", "n_input", "n_pool"):
            value = getattr(self, name)
            if value is not None and value < self.n_folds:
                raise ValueError(
                    f"Expected `{name}` of at least `n_folds`={self.n_folds}, got {value}. Remedy: "
                    "pass a larger number, or leave it out."
                )
        if self.sampling == "uniform" and (self.n_pool is not None or self.scores is not None):
            raise ValueError(
                "Expected no `n_pool` and no `scores` with sampling='uniform', which scores "
                "nothing, got some. Remedy: sampling='curvature'."
            )
        if self.n_passes is not None and self.n_curvature is not None:
            both = f"{self.n_passes} and {self.n_curvature}"
            raise ValueError(f"Expected n_passes or n_curvature, got {both}. Remedy: pass one.")
        if self.scores is not None:
            object.__setattr__(self, "scores", checked_scores(torch.as_tensor(self.scores)))
        M, pool = self.n_curvature, self.n_pool
        if M is not None and pool is not None and pool < M:
            raise ValueError(
                f"Expected a pool of at least {M} data to draw from, got n_pool={pool}. Remedy: "
                "score more data, or draw fewer."
            )

    @property
    def sized(self) -> bool:
        """Whether the number of data with backward passes was asked for."""
        return (self.n_curvature or self.n_passes) is not None

    def resolved(self, batch_size: int) -> ResolvedOptions:
        """The same options with every default replaced by its number, ``n_passes`` apart.

        Args:
            batch_size: Number of data in the first mini-batch.

        Returns:
            Options without a number missing.
        """
        M = self.n_curvature or self.n_folds * batch_size
        n_input = self.n_input or (4 * M if self.sampling == "curvature" else M)
        scores = None if self.scores is None else torch.as_tensor(self.scores)
        pool = max(self.n_pool or 16 * M, n_input) if self.sampling == "curvature" else 0
        return ResolvedOptions(self.n_folds, M, n_input, pool, scores, self.generator)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the options of this method alone, as the posteriors' constructors take them."""
        return tuple(f.name for f in fields(cls) if f.name != "generator")


@dataclass(frozen=True)
class ResolvedOptions:
    """Options of one fit, with every number known; see :class:`CrossfitOptions`.

    Attributes:
        n_folds: Number K of folds.
        n_curvature: Number M of data with backward passes.
        n_input: Number of data for the input factors.
        n_pool: Number of data that are scored, 0 if none are.
        scores: Scores of all data of the dataset, if they were given.
        generator: Source of the draws.
    """

    n_folds: int
    n_curvature: int
    n_input: int
    n_pool: int
    scores: Tensor | None = None
    generator: torch.Generator | None = None


def method_options(
    debias: str, kwargs: dict[str, Any], generator: torch.Generator | None
) -> AutoOptions | CrossfitOptions | None:
    """Take the options of a method out of a constructor's arguments.

    Args:
        debias: The method.
        kwargs: The arguments, from which they are removed.
        generator: Source of the draws.

    Returns:
        The method's options, ``None`` for a method that has none.

    Raises:
        ValueError: If there are options of another method.

    Example:
        >>> method_options("auto", {"tolerance": 0.1}, None).tolerance
        0.1
    """
    kinds: dict[str, type[AutoOptions] | type[CrossfitOptions]]
    kinds = {AUTO: AutoOptions, CROSSFIT: CrossfitOptions}
    given = {n: kwargs.pop(n) for kind in kinds.values() for n in kind.names() if n in kwargs}
    own = kinds[debias].names() if debias in kinds else ()
    wrong = [name for name in given if name not in own]
    if wrong:
        fitting = " or ".join(
            f"debias={word!r}" for word, kind in kinds.items() if {*wrong} <= {*kind.names()}
        )
        raise ValueError(
            f"Expected {', '.join(map(repr, wrong))} with {fitting or 'other methods'} only, got "
            f"debias={debias!r}. Remedy: leave them out, or choose the method they belong to."
        )
    return kinds[debias](generator=generator, **given) if debias in kinds else None
