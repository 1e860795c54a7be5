"""How a comparison's methods and baselines are fitted, and turned into predictions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from laplace.baselaplace import BaseLaplace, KronLaplace
from torch import Tensor, nn
from torch.utils.data import DataLoader

from laplace_debias.comparison.baselines import best_temperature
from laplace_debias.comparison.draws import (
    dealt_out,
    draw_generator,
    draw_loaders,
    n_outputs,
    whole_loader,
)
from laplace_debias.comparison.options import CustomMethod, Prediction, Reference
from laplace_debias.comparison.rows import (
    AUTO,
    CROSSFIT,
    DIAGONAL,
    FULL,
    LARGE,
    LAST_LAYER,
    PLAIN,
    PRIOR_ONLY,
    SINGLE,
    TEMPERATURE,
    TWO_BATCH,
)
from laplace_debias.comparison.runs import Run, plain_run, predictor_run
from laplace_debias.data.reading import read
from laplace_debias.data.targets import IGNORED
from laplace_debias.debias.options import AutoOptions, CrossfitOptions
from laplace_debias.debias.spectrum import FitResult
from laplace_debias.evaluation.distance import diagonal_predictives, log_ratio_of_deviations
from laplace_debias.network.loss import Likelihood
from laplace_debias.network.upstream import device_of, posterior_params
from laplace_debias.posterior.debiased import DebiasedPosterior
from laplace_debias.predictive.diagonal import DiagonalPredictor, diagonal_ggn
from laplace_debias.predictive.predictor import StructuredPredictor

__all__ = ["Cost", "Fitting", "prior_only"]

Cost = dict[str, float]


@dataclass(frozen=True)
class Fitting:
    """Everything that decides how a posterior is made from a method, a budget and a draw.

    Attributes:
        factory: Makes approximations that are not fitted yet: :func:`laplace_debias.Laplace`.
        model: The trained network.
        train_loader: Loader over all N training data.
        val_loader: Validation data, for a temperature.
        likelihood: ``"classification"`` or ``"regression"``.
        laplace: Arguments of the Laplace approximation.
        custom: Methods of one's own by name.
        reference: Another reference than all the data.
        prediction: Link function and its samples.
        grid: The prior precisions.
        seed: Decides draws and random numbers.
    """

    factory: Callable[..., BaseLaplace]
    model: nn.Module
    train_loader: DataLoader[Any]
    val_loader: Iterable[Any] | None
    likelihood: Likelihood
    laplace: Mapping[str, Any]
    custom: Mapping[str, CustomMethod]
    reference: Reference
    prediction: Prediction
    grid: list[float]
    seed: int

    @property
    def n_data(self) -> int:
        """Number N of training data."""
        return len(self.train_loader.dataset)  # type: ignore[arg-type]

    @property
    def key_y(self) -> str:
        """Key of the targets in mini-batches that are mappings."""
        return str(self.laplace.get("dict_key_y", "labels"))

    def run_of(
        self, cells: Sequence[tuple[str, int, int]]
    ) -> tuple[Run, list[Cost | None], list[StructuredPredictor]]:
        """Fit some cells ``(method, budget, draw)`` that share passes; return their predictions.

        Returns:
            The run, numbered ``cell * k + i``, what each fit cost, and the predictors of those
            that have a posterior.
        """
        method = cells[0][0]
        if method in (PLAIN, TEMPERATURE):
            start, T = time.perf_counter(), 1.0
            if method == TEMPERATURE and self.val_loader is not None:
                T = best_temperature(
                    self.model,
                    self.val_loader,
                    self.key_y,
                    self.laplace.get("ignore_index", IGNORED),
                )
            seconds = time.perf_counter() - start
            cost: Cost = {"forward": 0, "backward": 0, "seconds": seconds}
            return plain_run(self.model, self.key_y, self.likelihood, T), [cost], []
        fitted = [self._predictor(*cell) for cell in cells]
        predictors, prediction = [predictor for predictor, _ in fitted], self.prediction
        link, n_samples = prediction.link_approx, prediction.n_samples
        run = predictor_run(predictors, link, n_samples, self.seed)
        return run, [cost for _, cost in fitted], predictors

    def distances(
        self, predictors: Sequence[StructuredPredictor], loader: Iterable[Any]
    ) -> list[float]:
        """Distance of each posterior to the reference at each prior precision.

        Args:
            predictors: See :meth:`run_of`; of none, of the plain network, the distance is infinite.
            loader: Its first mini-batch has the inputs.

        Returns:
            Distances, numbered ``cell * k + i``.
        """
        if not predictors:
            return [float("inf")]
        reference, _ = self._reference_fit
        batch = next(iter(read(loader, device_of(reference.la), self.key_y)))
        results = diagonal_predictives([*predictors, reference], batch[0])
        exact = results[-1].covariance  # [k, n, C]
        found = [log_ratio_of_deviations(result.covariance, exact) for result in results[:-1]]
        values: list[float] = torch.cat(found).tolist()
        return values

    @cached_property
    def _reference_fit(self) -> tuple[StructuredPredictor, Cost | None]:
        """The reference, fitted once if every posterior is held against it."""
        _, method, size = self.reference.cell(self.n_data)
        return self._posterior_predictor(method, size, -1)

    def _predictor(
        self, method: str, budget: int, draw: int
    ) -> tuple[StructuredPredictor, Cost | None]:
        """A fitted posterior's predictions over the grid, and what the fit cost."""
        start = time.perf_counter()
        if method in (PRIOR_ONLY, DIAGONAL):
            la = self._laplace(SINGLE)
            prior_only(la, self.n_data, n_outputs(self.model, self.train_loader, self.key_y))
            if method == PRIOR_ONLY:
                return StructuredPredictor(la, self.grid, keep_graph=False), _cost(0, start)
            loader = whole_loader(self.train_loader)
            h = diagonal_ggn(self.model, la.parameter_names, loader, self.likelihood)
            C = la.n_outputs - (self.likelihood == "classification")
            return DiagonalPredictor(la, h, self.grid), _cost(self.n_data, start, C)
        if method in (FULL, LARGE) and self.reference.distance:
            return self._reference_fit
        return self._posterior_predictor(method, budget, draw)

    def _posterior_predictor(
        self, method: str, budget: int, draw: int
    ) -> tuple[StructuredPredictor, Cost | None]:
        """The same of a Kron posterior."""
        posterior = self.posterior(method, budget, draw)
        cost = getattr(posterior, "fit_cost", None)
        found = cost and {
            "forward": cost.forward,
            "backward": cost.backward,
            "seconds": sum(cost.seconds.values()),
        }
        return StructuredPredictor(posterior, self.grid, keep_graph=False), found

    def posterior(self, method: str, budget: int, draw: int) -> KronLaplace:
        """Fit a Kron posterior on a draw of the data, or on all of them."""
        if method in (FULL, LARGE) and self.reference.posterior is not None:
            return self.reference.posterior
        if method in self.custom:
            return self.custom[method].fit(budget, draw)
        generator = draw_generator(self.seed, draw)
        N = self.n_data
        if method == LAST_LAYER:
            la = self._laplace(SINGLE, generator=generator, subset_of_weights="last_layer")
            la.fit(dealt_out(whole_loader(self.train_loader)), n_data=N)
            return la
        if method == CROSSFIT:  # draws for itself, from all data
            la = self._laplace(CROSSFIT, n_curvature=budget, generator=generator)
            la.fit(dealt_out(whole_loader(self.train_loader, generator)), n_data=N)
            return la
        if method == AUTO:  # so does this, with the passes that M data take
            one = self.laplace.get("fisher", "exact") != "exact"
            C = n_outputs(self.model, self.train_loader, self.key_y)
            n_vectors = 1 if one else C - int(self.likelihood == "classification")
            passes = max(8, budget * n_vectors)
            la = self._laplace(AUTO, tolerance=None, n_passes=passes, generator=generator)
            la.fit(dealt_out(whole_loader(self.train_loader, generator)), n_data=N)
            return la
        n_roles = 2 if method == TWO_BATCH else 1
        drawn = draw_generator(self.seed, draw)
        first, *second = map(dealt_out, draw_loaders(self.train_loader, budget, n_roles, drawn))
        la = self._laplace(SINGLE if method in (FULL, LARGE) else method, generator=generator)
        la.fit(first, curvature_loader=second[0] if second else None, n_data=N)
        return la

    def _laplace(self, debias: str, **defaults: Any) -> DebiasedPosterior:
        """An approximation that is not fitted yet; options of a method reach that method alone."""
        own = {CROSSFIT: set(CrossfitOptions.names()), AUTO: set(AutoOptions.names())}
        others = set().union(*own.values()) - own.get(debias, set())
        if debias == AUTO:  # draws vectors of its own
            others |= {"fisher", "sampler"}
        given = {k: v for k, v in self.laplace.items() if k not in others}
        if defaults.get("subset_of_weights") is not None:
            given.pop("subset_of_weights", None)
        kwargs = {**defaults, **given}
        kwargs |= {"hessian_structure": "kron", "debias": debias}
        la = self.factory(self.model, self.likelihood, **kwargs)
        if not isinstance(la, DebiasedPosterior):
            raise TypeError(
                f"Expected a debiased Kron posterior, got {type(la).__name__}. Remedy: leave "
                "`debias` out of `laplace`."
            )
        return la


def _cost(n: int, start: float, n_vectors: int = 0) -> Cost:
    """Passes over n data with some backward vectors each, and the time since ``start``."""
    return {
        "forward": n,
        "backward": n * n_vectors,
        "seconds": time.perf_counter() - start,
    }


def prior_only(la: DebiasedPosterior, n_data: int, n_outputs: int) -> None:
    r"""Give ``la`` a posterior without any curvature: the prior, precision :math:`\delta I`.

    The predictive covariance is :math:`J J^\top / \delta`. arXiv 2312.10464 claims that it suffices
    to tell data out of distribution.

    Args:
        la: A Kron approximation with ``debias="single"``; it is fitted afterwards.
        n_data: Number N of training data.
        n_outputs: Number C of outputs.

    Example:
        >>> from laplace_debias import Laplace
        >>> la = Laplace(nn.Linear(2, 1), "regression", "all", "kron", debias="single")
        >>> prior_only(la, n_data=10, n_outputs=1)
        >>> la(torch.tensor([[1.0, 2.0]]))[1].squeeze()  # 1 + 4 + 1 for the bias
        tensor(6.)
    """
    Q, lam = [], []
    for p in posterior_params(la):
        sizes = [len(p)] if p.ndim == 1 else [len(p), p[0].numel()]
        Q.append([torch.eye(d, dtype=p.dtype, device=p.device) for d in sizes])
        lam.append([torch.zeros(d, dtype=p.dtype, device=p.device) for d in sizes])
    nothing: Tensor = torch.zeros((), dtype=Q[0][0].dtype, device=Q[0][0].device)
    la.take_over(FitResult(Q, lam, lam, [], nothing, n_data, n_outputs))
