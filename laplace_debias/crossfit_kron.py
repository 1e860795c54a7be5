"""A posterior's curvature from folds: every Kronecker factor cross-fitted on its own data."""

from __future__ import annotations

from collections.abc import Sequence

from laplace.utils import KronDecomposed
from torch import Tensor

from laplace_debias.crossfit import crossfit_factor, eigh_float64
from laplace_debias.kfac import InputFactors, KFACFactors


def crossfit_kron(
    outputs: Sequence[KFACFactors],
    inputs: Sequence[InputFactors] | None = None,
    *,
    n_data: int,
    output_hessian: Tensor | None = None,
) -> KronDecomposed:
    """Cross-fitted curvature of N data from folds of a few.

    Output factors B come from the folds `outputs`, scaled by `n_data` over their number of data,
    and input factors A from the folds `inputs`, which may be other data, more data and another
    number of folds. Each factor is cross-fitted on its own
    (`laplace_debias.crossfit.crossfit_factor`), and a block's eigenvalues are the products of its
    factors' eigenvalues.

    Args:
        outputs: Factors of each fold; their sums over data stand for `n_data` data.
        inputs: Input factors of each fold; by default those within `outputs`.
        n_data: Number N of data that the curvature stands for.
        output_hessian: Mean loss Hessian `[C, C]` over a large pool. It is B of the layer at the
            network's output, if `inputs` know one, and replaces what the few data of the folds
            give.

    Returns:
        The curvature, one block per parameter, in the factors' type.

    Raises:
        ValueError: With fewer than two folds, folds of different parameters, or factors with NaN.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from laplace_debias.kfac import kfac_factors
        >>> model, x = nn.Linear(3, 2), torch.randn(20, 3)
        >>> folds = [kfac_factors(model, part, likelihood="regression") for part in x.split(10)]
        >>> H = crossfit_kron(folds, n_data=1000)
        >>> [[len(lam) for lam in block] for block in H.eigenvalues]
        [[2, 3], [2]]
    """
    names = {fold.names for fold in (*outputs, *(inputs or ()))}
    if len(names) != 1:
        raise ValueError(
            f"Expected folds of the same parameters, got {len(names)} different sets; compute all "
            f"folds with the same model and the same `params`."
        )
    eigenvectors, eigenvalues = [], []
    for i, name in enumerate(outputs[0].names):
        B_folds = [fold.blocks[i][0] for fold in outputs]
        if inputs is not None:
            A_folds, A_sizes = [fold.A[i] for fold in inputs], [fold.n_data for fold in inputs]
        else:
            A_folds = [fold.blocks[i][1] if len(fold.blocks[i]) > 1 else None for fold in outputs]
            A_sizes = [fold.n_data for fold in outputs]
        at_output = inputs is not None and all(fold.is_output[i] for fold in inputs)
        if output_hessian is not None and at_output:
            lam, Q = eigh_float64(output_hessian, f"B of {name}")
            pairs = [(n_data * lam.clamp(min=0), Q)]
        else:
            sizes = [fold.n_data for fold in outputs]
            means = [B / size for B, size in zip(B_folds, sizes, strict=True)]
            lam, Q = crossfit_factor(means, sizes, name=f"B of {name}")
            pairs = [(n_data * lam, Q)]
        if A_folds[0] is not None:
            pairs.append(crossfit_factor(A_folds, A_sizes, name=f"A of {name}"))
        dtype = B_folds[0].dtype
        eigenvalues.append([lam.to(dtype) for lam, _ in pairs])
        eigenvectors.append([Q.to(dtype) for _, Q in pairs])
    return KronDecomposed(eigenvectors, eigenvalues)
