"""Fit a posterior from Kronecker factors that were computed elsewhere, before, or piece by piece.

For factors that take hours: accumulate them in a file (``merge``), go on
after an interruption, and hand the total over here.
"""

from __future__ import annotations

import math

from laplace_debias.debias.options import SINGLE, TWO_BATCH
from laplace_debias.debias.two_batch import fit_factors
from laplace_debias.kfac.factors import Factors
from laplace_debias.network.upstream import posterior_params
from laplace_debias.posterior.kron import DebiasedKronLaplace

__all__ = ["fit_from_factors"]


def fit_from_factors(
    la: DebiasedKronLaplace,
    directions: Factors,
    n_data: int,
    curvatures: Factors | None = None,
) -> None:
    r"""Fit ``la`` as ``la.fit`` would on the data behind the factors.

    Both roles are scaled to N data, :math:`K_1 = U \Lambda U^\top` is decomposed in float64, and
    with ``curvatures`` the eigenvalues are :math:`\mathrm{diag}(U^\top K_2 U)`.

    Args:
        la: A posterior with ``debias="single"`` (no ``curvatures``) or ``debias=True``.
        directions: Factors that give the directions, B a sum and A a mean over their data.
        n_data: Number N of training data.
        curvatures: Factors that give the curvatures along them.

    Raises:
        ValueError: If roles, shapes or numbers of data do not fit.

    Example:
        >>> import torch
        >>> from laplace_debias import Laplace
        >>> from laplace_debias.kfac.engine import kfac_factors
        >>> net = torch.nn.Linear(2, 3)
        >>> X, y = torch.randn(8, 2), torch.arange(8) % 3
        >>> factors = kfac_factors(net, X, y, likelihood="classification")
        >>> la = Laplace(net, "classification", "all", "kron", debias="single")
        >>> fit_from_factors(la, factors, n_data=100)
        >>> la.n_data, la(X).shape
        (100, torch.Size([8, 3]))
    """
    expected = {SINGLE: False, TWO_BATCH: True}.get(la.debias)
    if expected is None or expected != (curvatures is not None):
        raise ValueError(
            "Expected `curvatures` with debias=True and none with debias='single', got "
            f"debias={la.debias!r} {'without' if curvatures is None else 'with'} curvatures. "
            "Remedy: choose `debias` by the factors you have."
        )
    wanted = [_sizes(list(p.shape)) for p in posterior_params(la)]
    for role, factors in (("directions", directions), ("curvatures", curvatures)):
        if factors is None:
            continue
        got = [[len(factor) for factor in block] for block in factors.blocks]
        if got != wanted:
            raise ValueError(
                f"Expected factors of sizes {wanted} for the parameters {la.parameter_names}, got "
                f"{got} in the role of {role}. Remedy: freeze the same parameters for both."
            )
        if factors.n > n_data:
            raise ValueError(
                f"Expected `n_data` of at least {factors.n}, the number of data behind the "
                f"{role}, got {n_data}. Remedy: pass the number of data in the whole training set."
            )
    la.take_over(fit_factors(directions, curvatures, n_data))


def _sizes(shape: list[int]) -> list[int]:
    """Sizes of a parameter's factors: ``[d_out, d_in]`` for a weight, ``[d]`` for a bias."""
    return shape if len(shape) == 1 else [shape[0], math.prod(shape[1:])]
