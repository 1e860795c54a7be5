"""What forward passes over a pool tell: input factors, outputs, scores, the loss, and probes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from laplace_debias.data.inputs import Inputs, Keys, concatenate, datum_shapes, size_of, take
from laplace_debias.debias.pairs import pair_scores
from laplace_debias.debias.spectrum import eigh_float64
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.factors import Factors

__all__ = ["PoolMoments"]

MOST_PROBES = 16
MOST_PROBE_NUMBERS = 2**25


class PoolMoments:
    """Sums over a pool that grows mini-batch by mini-batch; one forward pass per datum.

    Args:
        engine: Makes the passes, and counts them.

    Example:
        >>> moments = PoolMoments(Engine(torch.nn.Linear(2, 3), "classification"))
        >>> moments.add(torch.randn(5, 2), torch.arange(5) % 3)
        >>> moments.outputs.shape, moments.scores.shape, len(moments.decomposed())
        (torch.Size([5, 3]), torch.Size([5, 3]), 2)
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._parts: list[Factors] = []  # of every other mini-batch, for their difference
        self._outputs: list[Tensor] = []
        self._features: list[Tensor | None] = []
        self._first: Inputs | None = None
        self._sums: tuple[Tensor, Tensor] | None = None  # of tensor inputs and of their squares
        self._A: tuple[int, list[tuple[Tensor, Tensor] | None]] | None = None
        self.loss: Tensor = torch.zeros(())
        self.size = 0

    def add(self, X: Inputs, y: Tensor) -> None:
        """Pass a mini-batch."""
        new = self.engine.factors(X, y, outputs=False, rows_from=1)
        self.loss = self.loss.to(new.summed_loss) + new.summed_loss
        self._outputs.append(new.kept_outputs)
        kept = [rows for rows, last in zip(new.rows, new.at_output, strict=True) if last]
        self._features.append(next((rows for rows in kept if rows is not None), None))
        new = replace(new, outputs=None, rows=(None,) * len(new.names))
        # Halves of a mini-batch would need passes of their own: whole mini-batches take turns.
        if len(self._parts) < 2:
            self._parts.append(new)
        else:
            less = 0 if self._parts[0].n <= self._parts[1].n else 1
            self._parts[less] = self._parts[less] + new
        if self._first is None:
            self._first = X
        if isinstance(X, Tensor) and X.is_floating_point():
            x = X.double()
            sums = x.sum(0), x.square().sum(0)
            if self._sums is None:
                self._sums = sums
            elif self._sums[0].shape == sums[0].shape:
                self._sums = self._sums[0] + sums[0], self._sums[1] + sums[1]
        self.size += len(y)

    @property
    def inputs(self) -> Factors:
        """Input factors of the pool."""
        return self._parts[0] if len(self._parts) == 1 else self._parts[0] + self._parts[1]

    @property
    def outputs(self) -> Tensor:
        """The network's outputs, ``[n, C]``."""
        self._outputs = [torch.cat(self._outputs)]
        return self._outputs[0]

    @property
    def scores(self) -> Tensor:
        """Scores of all pairs, ``[n, C]``."""
        return pair_scores(self.outputs, self.engine.likelihood)

    @property
    def features(self) -> Tensor:
        """What tells similar data: the output layer's inputs, or the outputs, ``[n, d]``."""
        kept = [part for part in self._features if part is not None]
        if len(kept) < len(self._features):
            return self.outputs
        self._features = [torch.cat(kept)]
        return torch.cat(kept)

    @property
    def one_row(self) -> list[bool]:
        """For each parameter, whether its A has one row per datum."""
        return [n == self.size for n in self.inputs.n_rows]

    @property
    def dtype(self) -> torch.dtype:
        """Type of the factors."""
        return torch.promote_types(self.outputs.dtype, torch.float32)

    def decomposed(self) -> list[tuple[Tensor, Tensor] | None]:
        """Eigenvectors and eigenvalues of every A, ``None`` for biases; kept till the next pass."""
        if self._A is None or self._A[0] != self.size:
            inputs = self.inputs
            found: list[tuple[Tensor, Tensor] | None] = []
            for A, name in zip(inputs.A, inputs.names, strict=True):
                if A is None:
                    found.append(None)
                    continue
                lam, Q = eigh_float64(A, name)
                found.append((Q, lam.clamp(min=0)))
            self._A = (self.size, found)
        return self._A[1]

    def halves(self) -> list[Tensor | None]:
        """Half the difference of every A between two halves of the pool; of one mini-batch, none.

        Scaled to halves of equal size.
        """
        if len(self._parts) < 2:
            return [None for _ in self._parts[0].A]
        one, two = self._parts
        scale = (one.n * two.n) ** 0.5 / (one.n + two.n)
        return [
            None if a is None or b is None else scale * (a - b)
            for a, b in zip(one.A, two.A, strict=True)
        ]

    def probes(self, key: Keys = "input_ids") -> tuple[Inputs, Tensor]:
        """A few inputs of the pool, as many far ones, and a direction of the output for each.

        Far inputs are Gaussian, with the pool's mean and twice its standard deviation per feature;
        there are none for mappings and for inputs that are not floating point numbers.

        Args:
            key: Key of the inputs in a mapping.

        Returns:
            Inputs and directions ``[n, C]``, from a seed of their own.
        """
        assert self._first is not None  # a mini-batch was added
        n_params = sum(p.numel() for p in self.engine.root.parameters() if p.requires_grad)
        most = max(4, min(MOST_PROBES, MOST_PROBE_NUMBERS // (2 * max(n_params, 1))))
        n = min(size_of(self._first, key), most)
        X = take(self._first, slice(0, n), key)
        generator = torch.Generator().manual_seed(0)
        if (
            isinstance(X, Tensor)
            and self._sums is not None
            and datum_shapes(X)[0] == self._sums[0].shape
        ):
            mean = self._sums[0] / self.size
            deviation = (self._sums[1] / self.size - mean.square()).clamp(min=0).sqrt()
            noise = torch.randn(X.shape, generator=generator, dtype=torch.float64).to(X.device)
            X = concatenate([X, (mean + 2 * deviation * noise).to(X)], key)
        C = self.outputs.shape[1]
        directions = torch.randn(size_of(X, key), C, generator=generator, dtype=torch.float64)
        return X, torch.nn.functional.normalize(directions, dim=1).to(self.outputs)
