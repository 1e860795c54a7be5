"""What a fit computes with, an engine and its data, and what it leaves behind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.data.inputs import Inputs
from laplace_debias.data.loaders import is_main
from laplace_debias.data.roles import TrainingData
from laplace_debias.debias.options import TWO_BATCH
from laplace_debias.debias.spectrum import FitResult
from laplace_debias.kfac.budget import within_budget
from laplace_debias.kfac.engine import Engine
from laplace_debias.kfac.interface import FactorEngine
from laplace_debias.kfac.upstream import BackendEngine
from laplace_debias.network.features import computing_model, detached_features, first_output
from laplace_debias.network.last_layer import verify_last_layer
from laplace_debias.network.loss import likelihood_name, looks_normalised
from laplace_debias.network.ownership import transposed_parameters
from laplace_debias.network.remembered import forget
from laplace_debias.network.upstream import (
    backend_of,
    device_of,
    dtype_of,
    is_last_layer,
    last_layer_of,
    posterior_params,
    row_keys,
)
from laplace_debias.network.verify import verify_layers
from laplace_debias.posterior.options import check_parameters

__all__ = ["check_fit", "engine_of", "posterior_of", "training_data"]

Computing = tuple[FactorEngine, Callable[[Any], Any], Callable[[Inputs], None]]
"""An engine, what casts inputs and targets for it, and what checks the model on a few inputs."""


def check_fit(debias: str, *, curvature_loader: Any, override: bool, draws: bool) -> None:
    """Raise unless a method can do what a fit is asked for.

    Args:
        debias: The method.
        curvature_loader: Data for the curvatures alone, or ``None``.
        override: Whether earlier fits are forgotten.
        draws: Whether the method draws its data.

    Raises:
        ValueError: If it cannot.

    Example:
        >>> check_fit("single", curvature_loader=None, override=False, draws=False)
    """
    if curvature_loader is not None and debias != TWO_BATCH:
        raise ValueError(
            f"Expected no `curvature_loader` with debias={debias!r}, which takes all data "
            "from `train_loader`; got one. Remedy: use debias=True."
        )
    if not override and draws:
        raise ValueError(
            f"Expected `override=True` with debias={debias!r}, whose draws are gone after "
            "a fit; got False. Remedy: fit on all data at once, or use debias=True."
        )


@contextmanager
def engine_of(la: Any, *, ours: bool) -> Iterator[Computing]:
    """The engine of a fit, while the model may be written to; it is put back at the end.

    Args:
        la: A debiased Laplace approximation; for a last layer one that knows it.
        ours: Whether its backend is one of this package's, whose factors its own engine makes.

    Yields:
        The engine, what casts inputs and targets for it, and what checks the model on a few inputs.

    Raises:
        ValueError: If other parameters require a gradient than when ``la`` was built.

    Example:
        >>> import torch
        >>> from laplace_debias import Laplace
        >>> la = Laplace(nn.Linear(2, 3), "classification", "all", "kron", debias=True)
        >>> with engine_of(la, ours=True) as (engine, cast, check):
        ...     check(torch.randn(4, 2))
        ...     engine.names
        ('weight', 'bias')
    """
    last = is_last_layer(la)
    with computing_model(la.model, last) as (model, cast):
        if la.selected_parameters is not None:
            for name, p in model.named_parameters():
                p.requires_grad_(name in la.selected_parameters)  # put back with all else
        engine: Engine | BackendEngine
        engine = _own(la, model, last=last) if ours else _foreign(la, model, last=last)
        check_parameters(engine.names, la.parameter_names)
        yield engine, cast, partial(_verify, la, engine, model)


def training_data(
    la: Any,
    computing: Computing,
    loaders: tuple[Iterable[Any], Iterable[Any] | None],
    n_data: int,
    memory_budget: int | None = None,
) -> TrainingData:
    """The data of a fit, which are read, cast and checked when they are needed.

    Args:
        la: A debiased Laplace approximation.
        computing: What :func:`engine_of` gave.
        loaders: Those of the directions and the curvatures.
        n_data: Number N of training data.
        memory_budget: Bytes that the fit may add to what is there.

    Example:
        >>> from laplace_debias import Laplace
        >>> la = Laplace(nn.Linear(2, 3), "classification", "all", "kron", debias="single")
        >>> batch = (torch.randn(4, 2), torch.arange(4) % 3)
        >>> with engine_of(la, ours=True) as computing:
        ...     training_data(la, computing, (batch, None), 100).n_data
        100
    """
    engine, cast, check = computing
    checks = check if la.verify else None
    if memory_budget is not None:
        n_folds = getattr(la.options, "n_folds", 0)
        checks = within_budget(engine, memory_budget, row_keys(la), check, la.verify, n_folds)
    keys = (row_keys(la), la.dict_key_y)
    return TrainingData(*loaders, n_data, device_of(la), *keys, cast, checks, la.dict_key_w)


def posterior_of(la: Any, fitted: FitResult) -> tuple[Any, Tensor]:
    """What laplace-torch reads of a fit: the decomposed curvature and the mean, in its dtype.

    Args:
        la: A debiased Laplace approximation.
        fitted: What a method of fitting returned.

    Returns:
        The curvature, and the mean ``[P]``.

    Raises:
        ValueError: If eigenvalues do not fit into the model's dtype.

    Example:
        >>> from laplace_debias import Laplace
        >>> from laplace_debias.debias.two_batch import fit_factors
        >>> from laplace_debias.kfac.engine import kfac_factors
        >>> net = nn.Linear(2, 1)
        >>> factors = kfac_factors(
        ...     net, torch.randn(4, 2), torch.randn(4, 1), likelihood="regression"
        ... )
        >>> la = Laplace(net, "regression", "all", "kron", debias="single")
        >>> H, mean = posterior_of(la, fit_factors(factors, None, 100))
        >>> len(H), mean.shape
        (2, torch.Size([3]))
    """
    dtype, params = dtype_of(la), posterior_params(la)
    H = fitted.decomposed(dtype, la.damping, transposed_parameters(la.model, params))
    for name, block in zip(la.parameter_names, H.eigenvalues, strict=True):
        if not all(torch.isfinite(values).all() for values in block):
            raise ValueError(
                f"Expected the curvature of '{name}' to fit into {dtype}, got eigenvalues "
                "beyond its range. Remedy: use bfloat16 or float32 for the model."
            )
    mean = torch.cat([p.reshape(-1) for p in params])
    return H, mean if la.enable_backprop else mean.detach()


def _own(la: Any, model: nn.Module, *, last: bool) -> Engine:
    """This package's engine; that of a last layer is fed with features."""
    return Engine(
        last_layer_of(model).requires_grad_(True) if last else model,
        likelihood_name(la.likelihood),
        la.fisher,
        la.kfac_approx,
        la.sampler,
        la.generator,
        embed=partial(detached_features, model) if last else None,
        objective=la.objective,
        exact_up_to=la.exact_up_to,
    )


def _foreign(la: Any, model: nn.Module, *, last: bool) -> BackendEngine:
    """One of laplace-torch's backends, which knows the keys of mini-batches."""
    backend, backend_kwargs, kron_kwargs = backend_of(la)
    keys = {"dict_key_x": la.dict_key_x, "dict_key_y": la.dict_key_y}
    return BackendEngine(
        backend,
        model,
        likelihood_name(la.likelihood),
        last_layer=last,
        backend_kwargs=keys | backend_kwargs,
        kron_kwargs=kron_kwargs,
    )


def _verify(la: Any, engine: FactorEngine, model: nn.Module, X: Inputs) -> None:
    """Check the model that an engine computes with, on a few data."""
    keys = (row_keys(la), la.dict_key_y)
    with engine.cost.stage("verification"):
        forget(model)
        reached: set[str] = set()
        if is_last_layer(la):
            verify_last_layer(model, X, *keys)
        else:
            reached = verify_layers(model, X, *keys, inside=isinstance(engine, Engine))
        if isinstance(engine, Engine):
            engine.reached |= reached
            engine.first_output = first_output(model, X, keys[0])
            classes = likelihood_name(la.likelihood) == "classification"
            if classes and looks_normalised(engine.first_output) and is_main():
                warnings.warn(
                    "Expected logits as outputs of the model, got numbers that add up to one, like "
                    "probabilities. Remedy: leave out the model's softmax; the loss and the "
                    "predictions have one of their own.",
                    stacklevel=5,
                )
