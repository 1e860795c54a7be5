"""A posterior's curvature from folds: every Kronecker factor cross-fitted on its own data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from laplace_debias.data.processes import processes, shared_out, together
from laplace_debias.debias.eigen import eigh_float64
from laplace_debias.debias.few_rows import ROW_FOLDS, crossfit_rows
from laplace_debias.debias.folds import crossfit_spectrum
from laplace_debias.debias.spectrum import FitResult, same_output
from laplace_debias.kfac.factors import Factors

__all__ = ["crossfit_kron"]

Spectrum = tuple[Tensor, Tensor, Tensor]
"""Eigenvectors of a pooled factor, its eigenvalues, and the cross-fitted ones."""


def crossfit_kron(
    outputs: Sequence[Factors],
    inputs: Sequence[Factors] | None = None,
    *,
    n_data: int,
    loss: Tensor | float = 0.0,
    output_hessian: Tensor | None = None,
    rows: Sequence[Tensor | None] | None = None,
) -> FitResult:
    """Cross-fitted curvature of N data from folds of a few.

    Output factors B come from the folds ``outputs``, scaled by ``n_data`` over their number of
    data, and input factors A from the folds ``inputs``, which may be other data, more data and
    another number of folds. Each factor is cross-fitted on its own (``crossfit_factor``), and a
    block's eigenvalues are the products of its factors' eigenvalues. An input factor whose rows
    were kept is cut into ``ROW_FOLDS`` folds at least (``crossfit_rows``).

    Args:
        outputs: Factors of each fold; their sums over data stand for ``n_data`` data.
        inputs: Input factors of each fold; by default those within ``outputs``.
        n_data: Number N of data that the curvature stands for.
        loss: Mean loss per datum.
        output_hessian: Mean loss Hessian ``[C, C]`` over a large pool. It is B of the layer at the
            network's output, if ``inputs`` know one, and replaces what the few data of the folds
            give.
        rows: For each parameter the input rows ``[n, d_in]`` of a wide layer, or None. They may be
            of more data than ``inputs``, whose A they replace; by default those that ``inputs``
            kept.

    Returns:
        The decomposition, one block per parameter: eigenvectors of the pooled factors in the
        factors' type, their eigenvalues and the cross-fitted ones in float64.

    Raises:
        ValueError: With fewer than two folds, folds of different parameters, or factors with NaN.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias.kfac.engine import kfac_factors
        >>> model, x = nn.Linear(3, 2), torch.randn(20, 3)
        >>> folds = [kfac_factors(model, part, likelihood="regression") for part in x.split(10)]
        >>> fitted = crossfit_kron(folds, n_data=1000)
        >>> [[len(lam) for lam in block] for block in fitted.lam_tilde]
        [[2, 3], [2]]
    """
    names = {fold.names for fold in (*outputs, *(inputs or ()))}
    if len(names) != 1:
        raise ValueError(
            f"Expected folds of the same parameters, got {len(names)} different sets. Remedy: "
            "compute all folds with the same model and the same `params`."
        )
    sizes, folds = [fold.weight for fold in outputs], [fold.blocks for fold in outputs]
    if rows is None and inputs is not None:
        rows = [_all_rows(parts) for parts in zip(*(fold.rows for fold in inputs), strict=True)]
    sources = outputs if inputs is None else inputs
    jobs: list[tuple[float, Callable[[], Spectrum]]] = []
    layout: list[list[int]] = []
    previous: list[list[Tensor]] = [[] for _ in outputs]
    for i, name in enumerate(outputs[0].names):
        at_output = inputs is not None and all(fold.at_output[i] for fold in inputs)
        if output_hessian is not None and at_output:
            jobs.append((len(output_hessian) ** 3, partial(_exact, output_hessian, n_data, name)))
            numbers = [len(jobs) - 1]
        else:
            blocks = [fold[i][:1] for fold in folds]
            if not all(map(same_output, blocks, previous)):
                cost = (1 + len(blocks)) * len(blocks[0][0]) ** 3
                jobs.append((cost, partial(_outputs, blocks, sizes, n_data, name)))
                B_number = len(jobs) - 1
            numbers, previous = [B_number], blocks
        A = [factor for fold in sources if (factor := fold.A[i]) is not None]
        if A:
            kept = None if rows is None else rows[i]
            if kept is not None:
                n_folds = max(ROW_FOLDS, len(sources))
                fit = partial(crossfit_rows, kept, n_folds, name=f"A of {name}")
                jobs.append((n_folds * len(kept) ** 2 * kept.shape[1], fit))
            else:
                cost = (1 + len(A)) * len(A[0]) ** 3
                jobs.append((cost, partial(_input_spectrum, sources, i, name)))
            numbers.append(len(jobs) - 1)
        layout.append(numbers)
    parts = _done(jobs, outputs[0].blocks[0][0].device)
    dtypes = [block[0].dtype for block in folds[0]]
    Q = [[parts[n][0].to(t) for n in numbers] for numbers, t in zip(layout, dtypes, strict=True)]
    lam, lam_tilde = ([[parts[n][f] for n in numbers] for numbers in layout] for f in (1, 2))
    loss = torch.as_tensor(loss) * n_data
    return FitResult(Q, lam, lam_tilde, [], loss, n_data, outputs[0].n_outputs)


def _done(
    jobs: Sequence[tuple[float, Callable[[], Spectrum]]], device: torch.device
) -> list[Spectrum]:
    """Results of jobs, which several processes share out by their cost."""
    group = processes()
    ranks = shared_out([cost for cost, _ in jobs], group)
    mine = [group is None or rank == group.rank for rank in ranks]
    with together("the eigendecompositions"):
        found = {i: job() for i, (_, job) in enumerate(jobs) if mine[i]}
    if group is not None:
        shapes = group.gather({i: tuple(Q.shape) for i, (Q, _, _) in found.items()})
        for i, rank in enumerate(ranks):
            if i not in found:
                d, r = shapes[rank][i]
                empty = (torch.empty(s, dtype=torch.float64) for s in ((d, r), (d,), (d,)))
                Q, lam, lam_tilde = (part.to(device) for part in empty)
                found[i] = (Q, lam, lam_tilde)
            Q, lam, lam_tilde = (group.broadcast_(t.contiguous(), rank) for t in found[i])
            found[i] = (Q, lam, lam_tilde)
    return [found[i] for i in range(len(jobs))]


def _exact(hessian: Tensor, n_data: int, name: str) -> Spectrum:
    """The known B of the layer at the output."""
    lam, Q = eigh_float64(hessian, f"B of {name}")
    lam = n_data * lam.clamp(min=0)
    return Q, lam, lam


def _outputs(
    blocks: Sequence[Sequence[Tensor]], sizes: Sequence[float], n_data: int, name: str
) -> Spectrum:
    """Cross-fit B, a sum over data, scaled to N of them."""
    B = [n_data / w * block[0] for w, block in zip(sizes, blocks, strict=True)]
    return crossfit_spectrum(B, sizes, name=f"B of {name}")


def _all_rows(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Rows of all folds, if every fold kept its own."""
    kept = [part for part in parts if part is not None]
    return torch.cat(kept) if len(kept) == len(parts) else None


def _input_spectrum(folds: Sequence[Factors], i: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-fit A, a mean over rows: folds count by their rows, which data may be routed past."""
    pairs = [(fold.A[i], fold.n_rows[i] if fold.n_rows else fold.n) for fold in folds]
    A = [(factor, n_rows) for factor, n_rows in pairs if factor is not None and n_rows > 0]
    if len(A) < 2:
        raise ValueError(
            f"Expected data of at least two folds to reach the layer of '{name}', got {len(A)}. "
            "Remedy: take larger mini-batches or more data (`n_input`), or freeze the layer."
        )
    return crossfit_spectrum([M for M, _ in A], [n for _, n in A], name=f"A of {name}")
