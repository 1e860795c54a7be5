r"""Why curvature is biased: the eigenspaces of two mini-batches are not aligned.

With eigenpairs :math:`(\tilde\lambda_p, \tilde u_p)` of another mini-batch, the curvature along
:math:`u_i` there is a weighted mean of that mini-batch's eigenvalues,

.. math::
    u_i^\top \tilde H u_i = \sum_p \tilde\lambda_p \Omega_{i,p}, \qquad
    \Omega_{i,p} = (u_i^\top \tilde u_p)^2, \qquad \sum_p \Omega_{i,p} = 1,

so weight on lower eigenvalues makes a top direction less extreme than it was at home.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.data.chunks import Chunk
from laplace_debias.data.loaders import bar
from laplace_debias.quadratics.chosen import kept_directions
from laplace_debias.storage.cells import CellStore
from laplace_debias.storage.export import tidy
from laplace_debias.storage.results import SavedResult


def eigenspace_overlaps(U: Tensor, U_tilde: Tensor) -> Tensor:
    """Return ``Omega[i, p] = (u_i^T u~_p)^2`` of two sets of orthonormal vectors.

    Args:
        U: Orthonormal columns, shape ``[P, K]``.
        U_tilde: Orthonormal columns, shape ``[P, L]``.

    Returns:
        Overlaps in ``[0, 1]``, shape ``[K, L]``. Rows sum to 1 over a full basis ``U_tilde``.

    Example:
        >>> eigenspace_overlaps(torch.eye(2), torch.eye(2).flip(1))
        tensor([[0., 1.],
                [1., 0.]])
    """
    if U.ndim != 2 or U_tilde.ndim != 2 or len(U) != len(U_tilde):
        raise ValueError(
            f"Expected two sets of columns in one space, [P, K] and [P, L], got {tuple(U.shape)} "
            f"and {tuple(U_tilde.shape)}. Remedy: take both from the same model, one vector per "
            "column."
        )
    return (U.T @ U_tilde) ** 2


@dataclass(frozen=True)
class EigenspaceOverlaps(SavedResult):
    """Overlaps between the top eigenspaces of S mini-batches.

    Attributes:
        curvature: ``"ggn"``, ``"hessian"`` or ``"kfac"``.
        batch_size: Number of data per mini-batch (of the first).
        overlaps: ``Omega`` for each pair of mini-batches, shape ``[S, S, K, K]``.
        values: Eigenvalues of each mini-batch, shape ``[S, K]``.
    """

    curvature: str
    batch_size: int
    overlaps: Tensor
    values: Tensor

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and one row per pair of mini-batches and of directions."""
        S, _, K, _ = self.overlaps.shape
        labels = {
            "mini_batch": range(S),
            "other_mini_batch": range(S),
            "direction": range(K),
            "other_direction": range(K),
        }
        return tidy(labels, {"overlap": self.overlaps})

    def alignment(self) -> Tensor:
        """Return the mean weight that stays in the other's top space, in ``[0, 1]``, ``[S, S]``."""
        return self.overlaps.sum(-1).mean(-1)


def overlap_study(
    model: nn.Module,
    loss: nn.Module,
    batches: Sequence[Chunk],
    *,
    k: int = 100,
    folder: str | Path | None = None,
    directions_folder: str | Path | None = None,
    data_id: str | None = None,
    progress_bar: bool | None = None,
    solver_options: Mapping[str, Any] | None = None,
    **quadratic_options: Any,
) -> EigenspaceOverlaps:
    """Compare the top-k eigenspaces of a few mini-batches.

    Args:
        model: The network.
        loss: Loss with ``reduction="mean"``.
        batches: The S mini-batches (or larger sets) to compare, each with each.
        k: Number of eigenvectors.
        folder: Keeps the overlaps; if it has them, nothing is computed again.
        directions_folder: Keeps the eigenvectors (and, until they are done, their products), and
            takes those that :func:`directional_bias` has kept there.
        data_id: Stands for the data in the folder, which are then not compared. Change it when
            they change.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.
        solver_options: Of :func:`top_eigenvectors`, e.g. ``tol``.
        **quadratic_options: ``curvature``, ``l2``, ``regularize_biases``, ``chunk_size`` and
            ``max_columns`` of :class:`Quadratic`.

    Returns:
        The overlaps.

    Example:
        >>> X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
        >>> batches = [(X[:4], X[:4, :1]), (X[4:], X[4:, 1:])]
        >>> result = overlap_study(nn.Linear(2, 1), nn.MSELoss(), batches, k=3)
        >>> torch.allclose(result.overlaps.sum(-1), torch.ones(2, 2, 3), atol=1e-4)
        True
    """
    if not batches:
        raise ValueError(
            "Expected at least one mini-batch, got none. Remedy: use partition(data, batch_size)."
        )
    options = {"k": k, "batch_sizes": [len(y) for _, y in batches], **quadratic_options}
    if solver_options:
        options["solver"] = dict(solver_options)
    study = CellStore.for_run(
        folder, model, {"data": batches}, loss=loss, options=options, data_id=data_id
    )
    kept = folder if directions_folder is None else directions_folder

    def measure() -> dict[str, Tensor]:
        chosen = [
            kept_directions(
                model,
                loss,
                batch,
                "eigenvectors",
                k,
                folder=None if kept is None else Path(kept) / f"eigenvectors of {m}",
                data_id=None if data_id is None else f"{data_id}, mini-batch {m}",
                progress_bar=progress_bar,
                solver_options=solver_options,
                **quadratic_options,
            )
            for m, batch in enumerate(bar(batches, "eigenspaces", shown=progress_bar))
        ]
        omega = [
            torch.stack([eigenspace_overlaps(one["D"], other["D"]) for other in chosen])
            for one in chosen
        ]
        return {
            "overlaps": torch.stack(omega),
            "values": torch.stack([one["values"] for one in chosen]),
        }

    return EigenspaceOverlaps(
        curvature=quadratic_options.get("curvature", "ggn"),
        batch_size=len(batches[0][1]),
        **study.get("overlaps", measure),
    )
