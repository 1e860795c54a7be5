r"""The two methods that take data as they come: one mini-batch for both roles, or one for each.

Both roles are scaled to N data, :math:`K_1 = U \Lambda U^\top` is decomposed in float64, and with
data of their own for the curvatures the eigenvalues are :math:`\mathrm{diag}(U^\top K_2 U)`, factor
by factor: the paper's method. Without, they are :math:`\Lambda`: the plain K-FAC of these data, and
with all data the full batch.

With this package's engine the curvatures' factors are never formed: once the directions are there,
only the squares of rotated rows are added up (:mod:`laplace_debias.kfac.rotations`).
"""

from __future__ import annotations

from collections.abc import Iterable

from laplace_debias.data.inputs import Batch
from laplace_debias.data.loaders import bar
from laplace_debias.data.processes import together
from laplace_debias.data.roles import CURVATURES, DIRECTIONS, TrainingData
from laplace_debias.debias.checkpoint import Checkpoint
from laplace_debias.debias.freeing import fit_freeing, n_batches, of_all
from laplace_debias.debias.spectrum import FitResult, decompose, rebuild, reevaluate
from laplace_debias.kfac.factors import Factors, merge
from laplace_debias.kfac.interface import EngineInterface, FactorEngine

__all__ = ["fit_factors", "fit_single", "fit_two_batch"]

_BOTH = (DIRECTIONS, CURVATURES)


def fit_single(
    engine: FactorEngine,
    data: TrainingData,
    *,
    past: FitResult | None = None,
    progress_bar: bool | None = None,
    checkpoint: Checkpoint | None = None,
) -> FitResult:
    """Fit on all data of the loader, which give directions and curvatures alike.

    Args:
        engine: Makes factors of mini-batches.
        data: The loader and N.
        past: An earlier fit to add to.
        progress_bar: Whether to show one, advanced by mini-batches.
        checkpoint: Where to keep what was done so far, and to go on from.

    Returns:
        The fit.

    Raises:
        ValueError: If the loader is empty, or holds more than N data.

    Example:
        >>> import torch
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(torch.nn.Linear(2, 3), "classification")
        >>> batch = (torch.randn(8, 2), torch.arange(8) % 3)
        >>> fit = fit_single(engine, TrainingData(batch, None, 100, torch.device("cpu")))
        >>> fit.n_data, fit.lam is fit.lam_tilde
        (100, True)
    """
    batches = ((DIRECTIONS, batch) for batch in data.read())
    if past is None:
        return fit_freeing(
            engine, data, batches, progress_bar, roles=(DIRECTIONS,), checkpoint=checkpoint
        )
    roles = _accumulate(engine, data, batches, progress_bar, (DIRECTIONS,))
    data.check_seen({role: total.n for role, total in roles.items()}, disjoint=True)
    with engine.cost.stage("decompositions"):
        return fit_factors(roles[DIRECTIONS], None, data.n_data, past)


def fit_two_batch(
    engine: FactorEngine,
    data: TrainingData,
    *,
    past: FitResult | None = None,
    progress_bar: bool | None = None,
    keep_factors: bool = False,
    checkpoint: Checkpoint | None = None,
) -> FitResult:
    """Fit with directions from some data and curvatures from others: the paper's method.

    Args:
        engine: Makes factors of mini-batches.
        data: One or two loaders and N, see :meth:`TrainingData.in_roles`.
        past: An earlier fit to add to.
        progress_bar: Whether to show one, advanced by mini-batches.
        keep_factors: Whether to form and keep the curvatures' factors, which a later fit can be
            added to.
        checkpoint: Where to keep what was done so far, and to go on from.

    Returns:
        The fit.

    Raises:
        ValueError: If there are too few mini-batches, or more than N data.

    Example:
        >>> import torch
        >>> from laplace_debias.kfac.engine import Engine
        >>> engine = Engine(torch.nn.Linear(2, 3), "classification")
        >>> batches = [(torch.randn(8, 2), torch.arange(8) % 3) for _ in range(2)]
        >>> fit = fit_two_batch(engine, TrainingData(batches, None, 100, torch.device("cpu")))
        >>> [len(values) for values in fit.lam_tilde[0]]
        [3, 2]
    """
    if past is not None and not past.curvatures:
        raise ValueError(
            "Expected an earlier fit that kept the factors of its curvatures' data, got one that "
            "only measured along its directions. Remedy: make every fit with `override=False`, the "
            "first as well."
        )
    if keep_factors or past is not None or not isinstance(engine, EngineInterface):
        roles = _accumulate(engine, data, data.in_roles(), progress_bar, _BOTH)
        counts = {role: total.n for role, total in roles.items()}
        data.check_seen(counts, disjoint=data.curvature_loader is None)
        with engine.cost.stage("decompositions"):
            return fit_factors(roles[DIRECTIONS], roles[CURVATURES], data.n_data, past)
    return fit_freeing(
        engine, data, data.in_roles(), progress_bar, roles=_BOTH, checkpoint=checkpoint
    )


def fit_factors(
    directions: Factors,
    curvatures: Factors | None,
    n_data: int,
    past: FitResult | None = None,
) -> FitResult:
    r"""Scale both roles to N data, decompose the directions, re-evaluate along them.

    .. math:: \tilde\lambda = \mathrm{diag}(U^\top K_2 U), \qquad K_1 = U \Lambda U^\top,

    factor by factor, with :math:`K_1, K_2` the blocks of both roles times N / M. Data of an earlier
    fit that stood for N' are merged into their role first. The loss is that of all data seen,
    ``N (loss_1 + loss_2) / (M_1 + M_2)``.

    Args:
        directions: Factors of the directions' data.
        curvatures: Factors of the curvatures' data, ``None`` if nothing is to be re-evaluated.
        n_data: Number N of training data that each role stands for.
        past: An earlier fit to add to.

    Returns:
        The fit, eigenvectors in the factors' dtype and eigenvalues in float64.

    Example:
        >>> import torch
        >>> D = torch.diag(torch.tensor([1.0, 3.0]))
        >>> one, two = (
        ...     Factors.from_blocks(["bias"], [[B]], 1, 2, torch.tensor(0.5))
        ...     for B in (torch.eye(2), D)
        ... )
        >>> fit_factors(one, two, n_data=10).lam_tilde[0][0].tolist()
        [10.0, 30.0]
    """
    seen = [directions] if curvatures is None else [directions, curvatures]
    K_1 = directions.scaled_to(n_data)
    K_2 = [] if curvatures is None else curvatures.scaled_to(n_data)
    losses = [role.summed_loss for role in seen]
    loss = sum(losses[1:], losses[0]) * (n_data / sum(role.n for role in seen))
    total = n_data
    if past is not None:
        K_1 = merge(rebuild(past.Q, past.lam), past.n_data, K_1, n_data)
        K_2 = merge(past.curvatures, past.n_data, K_2, n_data)
        loss, total = loss + past.loss, n_data + past.n_data
    dtype = directions.blocks[0][0].dtype
    Q, lam = decompose(K_1, directions.names)
    lam_tilde = reevaluate(Q, K_2, directions.names) if K_2 else lam
    return FitResult(
        [[Q_f.to(dtype) for Q_f in block] for block in Q],
        lam,
        lam_tilde,
        [[factor.to(dtype) for factor in block] for block in K_2],
        loss,
        total,
        directions.n_outputs,
    )


def _accumulate(
    engine: FactorEngine,
    data: TrainingData,
    batches: Iterable[tuple[str, Batch]],
    progress_bar: bool | None,
    roles: tuple[str, ...],
) -> dict[str, Factors]:
    """Factors of every role, added up over its mini-batches and over processes."""
    found: dict[str, Factors] = {}
    total = n_batches(data, roles)
    with bar(total=total, shown=progress_bar, unit="batch") as shown, together("its passes"):
        for role, (X, y) in batches:
            shown.set_description(f"[K-FAC: {role}]", refresh=False)
            new = engine.factors(X, y)
            found[role] = found[role] + new if role in found else new
            shown.update()
    return {role: of_all(found.get(role), role, data) for role in roles}
