"""Single and two-batch posteriors of one draw from the same factors.

A draw is a random order of the training images. The single mini-batch of M images takes the first M
of them; the two-batch method takes the first M / 2 for directions, the next M / 2 for curvatures.
So the mini-batches of a draw contain each other, and the factors of the few pieces between their
borders give all of them: 1,024 images for six posteriors, not 2,688.
"""

import copy
from dataclasses import replace
from functools import reduce
from operator import add

import torch
from torch import nn

from examples.cifar10.data import Split
from examples.cifar10.reference import Curvature, factors_of
from laplace_debias.comparison.options import Fit
from laplace_debias.kfac.factors import Factors
from laplace_debias.posterior.from_factors import fit_from_factors
from laplace_debias.posterior.kron import DebiasedKronLaplace, Laplace


class NestedDraws:
    """Fits every method and budget of a draw; keeps the factors of the latest draw only.

    Args:
        model: The network, biases frozen. It is left as it was.
        split: The training images.
        budgets: Numbers M of images per posterior, even.
        dtype: Precision of the factors.
        seed: Decides the draws.
        chunk: Images per pass.
    """

    def __init__(
        self,
        model: nn.Module,
        split: Split,
        budgets: list[int],
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        chunk: int = 64,
        curvature: Curvature = Curvature(),  # noqa: B008
    ) -> None:
        """Keep the arguments; nothing is computed yet."""
        self.model, self.split, self.seed, self.chunk = model, split, seed, chunk
        self.curvature = curvature
        self.borders = sorted({0, *budgets, *(budget // 2 for budget in budgets)})
        self.n_images = 0  # whose factors were computed
        self._computing = copy.deepcopy(model).to(dtype)
        self._draw: int | None = None
        self._pieces: dict[int, Factors] = {}

    def order(self, draw: int) -> torch.Tensor:
        """Return the order of the training images in a draw."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + draw + 1)
        return torch.randperm(len(self.split), generator=generator)

    def factors(self, draw: int, start: int, stop: int) -> Factors:
        """Return the factors of the images ``start`` to ``stop`` (borders both) of a draw."""
        if not {start, stop} <= set(self.borders):
            raise ValueError(f"Expected two of the borders {self.borders}, got {start} to {stop}.")
        if draw != self._draw:
            self._draw, self._pieces = draw, {}
        order, parts = self.order(draw), []
        for low, high in zip(self.borders, self.borders[1:], strict=False):
            if start <= low and high <= stop:
                if low not in self._pieces:
                    rows = order[low:high]
                    curvature = replace(self.curvature, seed=self.seed * 1_009 + draw + 1)
                    self._pieces[low] = factors_of(
                        self._computing, self.split, rows, self.chunk, curvature
                    )
                    self.n_images += len(rows)
                parts.append(self._pieces[low])
        return reduce(add, parts)

    def single(self, budget: int, draw: int) -> DebiasedKronLaplace:
        """Fit the single mini-batch of ``budget`` images."""
        la = Laplace(self.model, "classification", "all", "kron", debias="single")
        fit_from_factors(la, self.factors(draw, 0, budget), len(self.split))
        return la

    def two_batch(self, budget: int, draw: int) -> DebiasedKronLaplace:
        """Fit the posterior of two mini-batches of ``budget / 2`` images."""
        half = budget // 2
        la = Laplace(self.model, "classification", "all", "kron", debias=True)
        directions, curvatures = self.factors(draw, 0, half), self.factors(draw, half, budget)
        fit_from_factors(la, directions, len(self.split), curvatures)
        return la

    @property
    def fits(self) -> dict[str, Fit]:
        """Both methods by name, for ``CustomMethod``."""
        return {"single": self.single, "two-batch": self.two_batch}
