"""Input factors of a pool: of all its data where that is cheap, else of some and of all pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from laplace_debias.data.processes import processes
from laplace_debias.debias.shared_eigen import eigh_shared
from laplace_debias.debias.transport import carried, pixel_block
from laplace_debias.kfac.factors import Factors

__all__ = ["PoolInputs", "least_patches"]

MOST_MULTIPLICATIONS = 1e12
"""Most multiplications for the input factors of layers with several rows (positions) per datum."""
LEAST_DATA = 2048
"""Data that such layers see at least: their input factors cost about as much as the pass."""
MOST_FOR_PATCHES = 5e11
"""As ``MOST_MULTIPLICATIONS``, for patches of several pixels, which cost several times the pass."""
LEAST_PATCHES = 256
"""Data whose patches are seen at least."""
ERROR_OF_PATCHES = 0.22
"""Above the root of n times the distance that A of n data's patches and all pixels adds."""
ROWS_PER_DIMENSION = 8
"""Patches per dimension of A that are seen at least, in no more than ``LEAST_DATA`` data."""


def least_patches(tolerance: float | None, n_passes: int | None) -> int:
    r"""Number of data whose patches give the input factors of convolutions, at least.

    Their error falls with the root of this number; it is to stay below that of the backward passes
    for a given number of them, or else below the tolerance.

    Args:
        tolerance: Distance to the full batch at which a fit may stop, if there is one.
        n_passes: Backward passes of a fit without a tolerance.

    Example:
        >>> least_patches(None, 2304), least_patches(0.05, None)
        (1152, 256)
    """
    if tolerance is None:
        return max(LEAST_PATCHES, (n_passes or 0) // 2)
    return max(LEAST_PATCHES, math.ceil((ERROR_OF_PATCHES / tolerance) ** 2))


class PoolInputs:
    """Input factors of a pool that grows mini-batch by mini-batch, in two halves.

    Args:
        n_patches: See :func:`least_patches`; by default of all data.
        n_pixels: Number of pixels in the patches of weights that have some.

    Attributes:
        parts: Factors of every other mini-batch, for their difference.
        pixels: Covariances of the pixels of all data, for weights with several pixels per patch.
        per_datum: For each parameter, rows per datum in the first mini-batch.

    Example:
        >>> import torch
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(torch.nn.Linear(3, 2), "classification")
        >>> inputs = PoolInputs()
        >>> inputs.add(engine.factors(torch.ones(5, 3), outputs=False), set())
        >>> [None if A is None else A.shape for A in inputs.A], inputs.share(0, 10)
        ([torch.Size([3, 3]), None], 0.5)
    """

    def __init__(
        self, n_patches: float = math.inf, n_pixels: Mapping[str, int] | None = None
    ) -> None:
        self.n_patches, self._k = n_patches, n_pixels or {}
        self.parts: list[Factors] = []
        self.pixels: Factors | None = None
        self.per_datum: list[float] = []
        self._A: list[tuple[Tensor, Tensor] | None] | None = None

    @property
    def begun(self) -> bool:
        """Whether both halves have data, by which to tell what layers cost."""
        return len(self.parts) == 2

    def wanted(self, size: int) -> tuple[bool | set[str], set[str]]:
        """What the passes of further data are to give.

        Args:
            size: Number of data so far.

        Returns:
            Names of the weights with an A, or all, and of those with the pixels' covariance alone.
        """
        if not self.begun:
            return True, set()
        first, work, least = self.parts[0], [0.0, 0.0], self.n_patches
        positions, patches = set[str](), set[str]()
        for name, A, per_datum in zip(first.names, first.A, self.per_datum, strict=True):
            if A is None or per_datum <= 1:
                continue
            in_patches = self._k.get(name, 1) > 1
            (patches if in_patches else positions).add(name)
            work[in_patches] += len(A) ** 2 * per_datum
            if in_patches:
                rows = ROWS_PER_DIMENSION * len(A)
                least = max(least, min(rows / per_datum, LEAST_DATA))
        enough = size >= max(LEAST_DATA, MOST_MULTIPLICATIONS / max(work[0], 1.0))
        positions = positions if enough else set()
        enough = size >= max(least, MOST_FOR_PATCHES / max(work[1], 1.0))
        patches = patches if enough else set()
        if not positions and not patches:
            return True, set()
        return {name for name in first.names if name not in positions}, patches

    def parted(self, new: Factors, pixels: set[str]) -> tuple[Factors, Factors | None]:
        """A mini-batch's input factors, and apart from them the covariances of its pixels.

        Args:
            new: Factors of :meth:`wanted`.
            pixels: Names of weights whose A is the pixels' covariance.

        Returns:
            Factors without A where there are only pixels, and factors whose A are covariances.
        """
        if not any(self._k.get(name, 1) > 1 for name in new.names):
            return new, None
        A, G = list[Tensor | None](), list[Tensor | None]()
        for name, M in zip(new.names, new.A, strict=True):
            k, alone = self._k.get(name, 1), name in pixels
            if M is None or k == 1:
                G.append(None)
            else:
                G.append(M if alone else pixel_block(M, len(M) // k))
            A.append(None if alone else M)
        return replace(new, A=tuple(A)), replace(new, A=tuple(G))

    def add(self, new: Factors, pixels: set[str]) -> None:
        """Add a mini-batch to the smaller half.

        Args:
            new: Factors of :meth:`wanted`.
            pixels: Names of weights whose A is the pixels' covariance.
        """
        half = len(self.parts)
        if half == 2:
            half = 0 if self.parts[0].n <= self.parts[1].n else 1
        own, covariances = self.parted(new, pixels)
        self.add_halves([own if half == i else None for i in (0, 1)], covariances)

    def add_halves(self, halves: list[Factors | None], pixels: Factors | None) -> None:
        """Add factors to either half, and covariances of pixels.

        Args:
            halves: Input factors of new data of both halves.
            pixels: Covariances of their pixels.
        """
        self._A = None
        if not self.parts and halves[0] is not None:
            self.per_datum = [n / halves[0].n for n in halves[0].n_rows]
        for half, new in enumerate(halves):
            if new is not None:
                there = half < len(self.parts)
                new = self.parts[half] + self.filled(new, half) if there else new
                self.parts[half:] = [new, *self.parts[half + 1 :]]
        if pixels is not None:
            self.pixels = pixels if self.pixels is None else self.pixels + pixels

    def filled(self, new: Factors, half: int) -> Factors:
        """New factors that count for nothing where their A was not computed.

        Args:
            new: Factors of a mini-batch.
            half: Which half they are to be added to.
        """
        if half >= len(self.parts):
            return new
        pairs = list(zip(new.A, self.parts[half].A, new.n_rows, strict=True))
        # sums over processes write into what they are given
        blank = torch.zeros_like if processes() is not None else (lambda o: o)
        A = tuple(blank(o) if a is None and o is not None else a for a, o, _ in pairs)
        n_rows = tuple(0 if a is None and o is not None else n for a, o, n in pairs)
        return replace(new, A=A, n_rows=n_rows)

    @property
    def n_rows(self) -> list[int]:
        """For each parameter, the number of rows behind its A."""
        return [sum(n) for n in zip(*(part.n_rows for part in self.parts), strict=True)]

    @property
    def A(self) -> list[Tensor | None]:
        """Input factors, ``None`` for biases; carried to the pixels of all data."""
        both = self.parts[0] if len(self.parts) == 1 else self.parts[0] + self.parts[1]
        return [self._carried(i, A) for i, A in enumerate(both.A)]

    def _carried(self, i: int, A: Tensor | None) -> Tensor | None:
        """An A, or what a half of its data makes of it, carried if there are more pixels."""
        G = self._more_pixels(i)
        return A if A is None or G is None else carried(A, G, self.parts[0].names[i])

    def _more_pixels(self, i: int) -> Tensor | None:
        """Covariance of the pixels of a weight, if more data have shown them than patches."""
        if self.pixels is None or self.pixels.n_rows[i] <= self.n_rows[i]:
            return None
        return self.pixels.A[i]

    def share(self, i: int, size: int) -> float:
        """Part of the pool's data that the A of a parameter has seen.

        Args:
            i: Number of the parameter.
            size: Number of data in the pool.
        """
        if any(part.A[i] is None for part in self.parts):
            return 1.0
        if self.pixels is not None and self.pixels.A[i] is not None:
            n_all = self.pixels.n_rows[i]
            return self.n_rows[i] / n_all if n_all else 1.0
        per_datum = self.per_datum[i]
        return min(1.0, self.n_rows[i] / (per_datum * size)) if per_datum else 1.0

    def decomposed(self) -> list[tuple[Tensor, Tensor] | None]:
        """Eigenvectors and eigenvalues of every A, ``None`` for biases; kept till the next pass."""
        if self._A is None:
            known = list(zip(self.A, self.parts[0].names, strict=True))
            jobs = [(A, name) for A, name in known if A is not None]
            pairs = iter(eigh_shared(*map(list, zip(*jobs, strict=True))) if jobs else ())
            self._A = []
            for A, _ in known:
                pair = None if A is None else next(pairs)
                self._A.append(None if pair is None else (pair[1], pair[0].clamp(min=0)))
        return self._A

    def noises(self, size: int, n_data: int) -> list[list[Tensor | None]]:
        r"""What the A of each weight may be off: half its difference between halves of its data.

        An A of few data's patches and all data's pixels is off by the halves' difference once both
        are carried to these pixels, and by what the pool itself is off, for which their plain
        difference stands.

        Args:
            size: Number of data in the pool.
            n_data: Number N of data that the pool stands for, for what drawing without replacement
                saves.

        Returns:
            Independent noises, each with matrices like A; ``None`` for biases, and where nothing
            is left to chance.
        """
        names = self.parts[0].names
        plain: list[Tensor | None] = [None] * len(names)
        if len(self.parts) < 2:
            return [plain]
        of_patches = list(plain)
        one, two = self.parts
        for i, (a, b) in enumerate(zip(one.A, two.A, strict=True)):
            n, m, seen = one.n_rows[i], two.n_rows[i], self.share(i, size)
            if a is None or b is None or not n + m:
                continue
            variance, rare, G = n * m / (n + m) ** 2, 1 - seen * size / n_data, self._more_pixels(i)
            if G is not None:
                left_out = (variance * (1 - seen)) ** 0.5
                of_patches[i] = left_out * (carried(a, G, names[i]) - carried(b, G, names[i]))
                variance, rare = variance * seen, 1 - size / n_data
            if rare > 1e-9:
                plain[i] = (variance * rare) ** 0.5 * (a - b)
        return [plain] if all(x is None for x in of_patches) else [plain, of_patches]
