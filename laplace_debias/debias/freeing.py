"""Fits that hold one set of factors at a time: bases take their place.

The factors of the directions are decomposed one by one and freed; those of the curvatures are never
formed, only measured along the bases. Several processes sum theirs in between; a checkpoint keeps
what was done so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

from torch import Tensor
from tqdm import tqdm

from laplace_debias.data.inputs import Batch
from laplace_debias.data.loaders import bar
from laplace_debias.data.processes import processes, together
from laplace_debias.data.roles import CURVATURES, DIRECTIONS, TrainingData
from laplace_debias.debias.checkpoint import Checkpoint
from laplace_debias.debias.eigen import check_finite
from laplace_debias.debias.spectrum import FitResult, eigenbasis
from laplace_debias.kfac.counts import FitCost
from laplace_debias.kfac.factors import Block, Factors
from laplace_debias.kfac.interface import EngineInterface, FactorEngine
from laplace_debias.kfac.sums import factors_of_all

__all__ = ["fit_freeing", "n_batches", "of_all"]


def fit_freeing(
    engine: FactorEngine,
    data: TrainingData,
    batches: Iterator[tuple[str, Batch]],
    progress_bar: bool | None = None,
    *,
    roles: tuple[str, ...],
    checkpoint: Checkpoint | None = None,
) -> FitResult:
    """Decompose the directions' factors, then measure the curvatures along them, if asked to.

    Args:
        engine: Makes factors of mini-batches; for curvatures this package's own.
        data: N, and how to read.
        batches: Mini-batches with their roles, all directions first.
        progress_bar: Whether to show one, in rank 0.
        roles: The directions, or both roles.
        checkpoint: Where to keep what was done so far, and to go on from.

    Returns:
        The fit, of the data of all processes.

    Raises:
        ValueError: If a role has no data, or more than N.

    Example:
        >>> import torch
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(torch.nn.Linear(2, 3), "classification")
        >>> batch = (torch.ones(4, 2), torch.arange(4) % 3)
        >>> data = TrainingData(batch, None, 9, torch.device("cpu"))
        >>> batches = ((DIRECTIONS, batch) for batch in data.read())
        >>> fit_freeing(engine, data, batches, roles=(DIRECTIONS,)).n_data
        9
    """
    kept: dict[str, Any] = {}
    if checkpoint is not None:
        batches, kept = checkpoint.following(batches), checkpoint.content
        checkpoint.begin(engine.cost)
    # one, or none if there are no data; the basis takes it out
    directions: list[Factors] = [kept.pop("directions")] if kept.get("directions") else []
    curvatures: Factors | None = kept.get("curvatures")
    basis = _Basis(*kept["basis"]) if kept.get("basis") else None
    later: list[Batch] = []
    with _watched(n_batches(data, roles), progress_bar, engine.cost) as shown:
        shown.set_description(f"[K-FAC: {DIRECTIONS}]", refresh=False)
        with together("its passes for the directions"):
            for role, (X, y) in batches:
                if role != DIRECTIONS:
                    later.append((X, y))
                    break
                with shown.batch(len(y)):
                    if isinstance(engine, EngineInterface):
                        new = engine.factors(X, y, few_rows=True)
                    else:
                        new = engine.factors(X, y)
                directions = [directions.pop() + new if directions else new]
                del new
                if checkpoint is not None:
                    checkpoint.processed(engine.cost, directions=directions[0])
        if basis is None:
            shown.set_description("[K-FAC: eigendecompositions]", refresh=False)
            basis = _Basis.of(directions, data, engine.cost, shown.update)
            if checkpoint is not None:
                checkpoint.turn(engine.cost, basis=basis.content())
        if CURVATURES not in roles:
            return basis.fit(data)
        shown.set_description(f"[K-FAC: {CURVATURES}]", refresh=False)
        with together("its passes for the curvatures"):
            for X, y in chain(later, (batch for _, batch in batches)):
                with shown.batch(len(y)):
                    rotated = cast(EngineInterface, engine).factors(X, y, along=basis.Q)
                curvatures = rotated if curvatures is None else curvatures + rotated
                if checkpoint is not None:
                    checkpoint.processed(engine.cost, basis=basis.content(), curvatures=curvatures)
    return basis.fit(data, of_all(curvatures, CURVATURES, data))


class _Progress:
    """A bar over mini-batches and the eigendecompositions, which count as one more.

    It moves with every backward vector of a mini-batch and with every eigendecomposition.
    """

    def __init__(self, shown: tqdm, cost: FitCost) -> None:
        self.set_description, self._bar, self._cost = shown.set_description, shown, cost

    def update(self, step: float) -> None:
        """Move on, but not beyond the total by rounding."""
        total = self._bar.total
        self._bar.update(step if total is None else min(step, total - self._bar.n))

    @contextmanager
    def batch(self, n: int) -> Iterator[None]:
        """One mini-batch of n data: what its passes did not show is added at its end."""
        left = 1.0

        def passed(n_data: float) -> None:
            nonlocal left
            step = min(left, n_data / n)
            left -= step
            self.update(step)

        self._cost.watched = passed
        try:
            yield
        finally:
            self._cost.watched = None
        self.update(left)


@contextmanager
def _watched(total: int | None, shown: bool | None, cost: FitCost) -> Iterator[_Progress]:
    """The progress of a fit."""
    steps = None if total is None else total + 1
    with bar(total=steps, shown=shown, unit="batch") as made:
        made.unit_scale = True  # two digits for parts of a mini-batch
        yield _Progress(made, cost)


def n_batches(data: TrainingData, roles: tuple[str, ...]) -> int | None:
    """Number of mini-batches that a fit is going to read, if it can be told.

    Args:
        data: The loaders.
        roles: The roles they serve.

    Example:
        >>> import torch
        >>> n_batches(TrainingData([], None, 9, torch.device("cpu")), (DIRECTIONS, CURVATURES))
        2
    """
    first_two = CURVATURES in roles and data.curvature_loader is None
    return 2 if first_two else data.n_batches()


def of_all(factors: Factors | None, role: str, data: TrainingData) -> Factors:
    """Factors of a role, of all processes.

    Args:
        factors: Those of this one, or ``None``.
        role: Which, for the error.
        data: Where the factors are to be.

    Returns:
        The sum.

    Raises:
        ValueError: If no process has any data for the role.

    Example:
        >>> import torch
        >>> data = TrainingData([], None, 9, torch.device("cpu"))
        >>> factors = Factors.from_blocks(["bias"], [[torch.eye(2)]], 1, 2)
        >>> of_all(factors, DIRECTIONS, data) is factors
        True
    """
    summed = factors if processes() is None else factors_of_all(factors, data.device)
    if summed is None:
        raise ValueError(
            f"Expected data for the {role} in at least one process, got none. Remedy: check the "
            "loaders; with one loader per process, its second mini-batch gives the curvatures."
        )
    return summed


@dataclass(frozen=True)
class _Basis:
    """The eigenbasis of the directions, in the place of their factors.

    Attributes:
        Q: Eigenvectors.
        lam: Eigenvalues of the directions' own data.
        names: Of the parameters.
        n: Number of the directions' data.
        n_outputs: Number of outputs of the network.
        loss: Summed over the directions' data.
    """

    Q: list[Block]
    lam: list[list[Tensor]]
    names: tuple[str, ...]
    n: int
    n_outputs: int
    loss: Tensor

    @classmethod
    def of(
        cls,
        directions: list[Factors],
        data: TrainingData,
        cost: FitCost,
        watched: Callable[[float], object],
    ) -> _Basis:
        """Decompose the factors of all processes, which are taken out of the list."""
        with cost.stage("decompositions"):
            seen = of_all(directions.pop() if directions else None, DIRECTIONS, data)
            blocks, weight, names = seen.blocks, seen.weight, seen.names
            n, n_outputs, loss = seen.n, seen.n_outputs, seen.summed_loss
            del seen
            scale, dtype = data.n_data / weight, blocks[0][0].dtype
            Q, lam = eigenbasis(blocks, names, scale, dtype, processes(), watched)
        return cls(Q, lam, names, n, n_outputs, loss)

    def content(self) -> tuple[Any, ...]:
        """What it consists of, for a file."""
        return (self.Q, self.lam, self.names, self.n, self.n_outputs, self.loss)

    def fit(self, data: TrainingData, curvatures: Factors | None = None) -> FitResult:
        """The fit, from the curvatures that other data measured along the basis, if any."""
        counts, loss, lam_tilde = {DIRECTIONS: self.n}, self.loss, self.lam
        if curvatures is not None:
            counts[CURVATURES] = curvatures.n
            loss = loss + curvatures.summed_loss
            lam_tilde = curvatures.scaled_to(data.n_data)
        data.check_seen(counts, disjoint=data.curvature_loader is None)
        for name, block in zip(self.names, lam_tilde, strict=True):
            for values in block:
                check_finite(values, name)
        loss = loss * (data.n_data / sum(counts.values()))
        return FitResult(self.Q, self.lam, lam_tilde, [], loss, data.n_data, self.n_outputs)
