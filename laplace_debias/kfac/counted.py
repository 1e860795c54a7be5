"""A network as K-FAC sees it, with its passes counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from laplace_debias.kfac.engine import KFACFactors, kfac_factors
from laplace_debias.kfac.input_factors import InputFactors, input_factors, input_rows
from laplace_debias.network.capture import Inputs

__all__ = ["FitCost", "Network"]


@dataclass
class FitCost:
    """Passes through the network, counted per datum.

    Attributes:
        forward: Number of data times forward passes.
        backward: Number of data times backward passes.
    """

    forward: int = 0
    backward: int = 0


@dataclass
class Network:
    """A network as K-FAC sees it, with its passes counted.

    Attributes:
        root: The module whose parameters are Bayesian.
        embed: Turns a datum's inputs into inputs of ``root`` (features for a last layer).
        likelihood: ``"classification"`` or ``"regression"``.
        fisher: ``"ggn"``, ``"mc"`` or ``"ef"``, see `kfac_factors`.
        generator: Source of randomness for ``"mc"``.
    """

    root: nn.Module
    embed: Callable[[Inputs], Inputs]
    likelihood: str
    fisher: str = "ggn"
    generator: torch.Generator | None = None
    cost: FitCost = field(default_factory=FitCost)

    def factors(
        self, X: Inputs, y: Tensor, weights: Tensor | None = None, *, inputs: bool
    ) -> KFACFactors:
        """Output factors, and input factors on request, of some data."""
        factors = kfac_factors(
            self.root,
            self.embed(X),
            y,
            likelihood=self.likelihood,
            weights=weights,
            fisher=self.fisher,
            generator=self.generator,
            inputs=inputs,
        )
        self.cost.forward += len(y)
        self.cost.backward += len(y) * factors.n_passes
        return factors

    def inputs(self, X: Inputs, rows_from: float = math.inf) -> InputFactors:
        """Input factors and outputs of some data, from a forward pass; see `input_factors`."""
        factors = input_factors(self.root, self.embed(X), rows_from=rows_from)
        self.cost.forward += factors.n_data
        return factors

    def rows(self, X: Inputs, rows_from: float) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        """Outputs of some data and the rows of wide layers, from a forward pass; `input_rows`."""
        f, rows = input_rows(self.root, self.embed(X), rows_from=rows_from)
        self.cost.forward += len(f)
        return f, rows
