r"""Directional slopes and curvatures on the mini-batch that chose the directions, and on others.

For directions :math:`d_p` chosen on mini-batch :math:`\mathcal{B}_s` (top eigenvectors, or the
search directions of CG), the study measures on every mini-batch :math:`\mathcal{B}_m`

.. math::
    \partial_{d_p} q(\theta_p; \mathcal{B}_m) = d_p^\top \nabla q(\theta_p; \mathcal{B}_m),
    \qquad
    \partial^2_{d_p} q(\theta_p; \mathcal{B}_m) = d_p^\top H_{\mathcal{B}_m} d_p,

with :math:`\theta_p = \theta_0` for eigenvectors and the p-th iterate for CG. Over a partition into
mini-batches of equal size the averages are the full-batch values (for the GGN and the Hessian; the
K-FAC approximation of all data is not the average of those of the mini-batches).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laplace_debias.data.chunks import Chunk
from laplace_debias.data.progress import bar
from laplace_debias.quadratics.cg import cg
from laplace_debias.quadratics.directions import top_eigenvectors
from laplace_debias.quadratics.quadratic import Quadratic
from laplace_debias.storage.cells import CellStore
from laplace_debias.storage.export import tidy
from laplace_debias.storage.results import SavedResult

KINDS = ("slopes", "curvatures", "magnitudes")
DIRECTIONS = ("eigenvectors", "cg")


@dataclass(frozen=True)
class DirectionalBias(SavedResult):
    """Slopes and curvatures along K directions, on M mini-batches, for S choices of directions.

    Where CG stopped before K directions, the rest is NaN.

    Attributes:
        directions: ``"eigenvectors"`` or ``"cg"``.
        curvature: ``"ggn"``, ``"hessian"`` or ``"kfac"``.
        batch_size: Number of data per mini-batch.
        chosen: The S mini-batches that chose directions.
        slopes: Directional slopes, shape ``[S, M, K]``.
        curvatures: Directional curvatures, shape ``[S, M, K]``.
    """

    directions: str
    curvature: str
    batch_size: int
    chosen: tuple[int, ...]
    slopes: Tensor
    curvatures: Tensor

    def rows(self) -> tuple[list[str], list[list[Any]]]:
        """Return names of columns, and one row per choice, mini-batch and direction."""
        _, M, K = self.slopes.shape
        labels = {"chosen": self.chosen, "mini_batch": range(M), "direction": range(K)}
        return tidy(labels, {"slope": self.slopes, "curvature": self.curvatures})

    @property
    def magnitudes(self) -> Tensor:
        """Update magnitudes ``tau = - slope / curvature``, shape ``[S, M, K]``."""
        return -self.slopes / self.curvatures

    def same(self, kind: str = "curvatures") -> Tensor:
        """Return the values on the mini-batch that chose the directions, shape ``[S, K]``."""
        return self._values(kind)[range(len(self.chosen)), list(self.chosen)]

    def others(self, kind: str = "curvatures") -> Tensor:
        """Return the values on all other mini-batches, shape ``[S, M - 1, K]``."""
        values = self._values(kind)
        keep = [[m for m in range(values.shape[1]) if m != s] for s in self.chosen]
        return torch.stack([v[index] for v, index in zip(values, keep, strict=True)])

    def full(self, kind: str = "curvatures") -> Tensor:
        """Return the values on the whole set, shape ``[S, K]``.

        They are the averages over the mini-batches, for ``"magnitudes"`` minus the ratio of
        averages. With K-FAC they are averages only.
        """
        if kind == "magnitudes":
            return -self.full("slopes") / self.full("curvatures")
        return self._values(kind).mean(1)

    def relative_errors(self, kind: str = "curvatures") -> Tensor:
        """Return ``|same - full| / |full|``, shape ``[S, K]``."""
        return (self.same(kind) - self.full(kind)).abs() / self.full(kind).abs()

    def percentiles(
        self, kind: str = "curvatures", percent: Sequence[float] = (25, 50, 75)
    ) -> Tensor:
        """Return percentiles of relative errors over directions, shape ``[S, len(percent)]``."""
        errors = self.relative_errors(kind)
        levels = torch.tensor(percent, dtype=errors.dtype) / 100
        return errors.nanquantile(levels, dim=1).T

    def _values(self, kind: str) -> Tensor:
        """Return the measured values by name."""
        if kind not in KINDS:
            raise ValueError(f"Expected kind in {KINDS}, got {kind!r}. Remedy: pass one of them.")
        values: Tensor = getattr(self, kind)
        return values


def choose_directions(
    quadratic: Quadratic, directions: str, k: int
) -> tuple[Tensor, Tensor | None]:
    """Choose k unit directions that are extreme for a quadratic.

    Args:
        quadratic: The quadratic.
        directions: ``"eigenvectors"`` (top k) or ``"cg"`` (at most k search directions).
        k: How many.

    Returns:
        Directions ``[P, K]``, and for CG the steps ``[K]`` of the path through them, else ``None``.

    Example:
        >>> q = Quadratic(nn.Linear(2, 1), nn.MSELoss(), (torch.eye(2), torch.ones(2, 1)), l2=0.1)
        >>> D, steps = choose_directions(q, "cg", 2)
        >>> D.shape, steps.shape
        (torch.Size([3, 2]), torch.Size([2]))
    """
    if directions == "eigenvectors":
        return top_eigenvectors(quadratic, k).vectors, None
    if directions == "cg":
        solution = cg(quadratic, max_iter=k, rtol=0.0)
        return solution.unit_directions, solution.magnitudes
    raise ValueError(
        f"Expected directions in {DIRECTIONS}, got {directions!r}. Remedy: pass one of them."
    )


def directional_bias(
    model: nn.Module,
    loss: nn.Module,
    batches: Sequence[Chunk],
    *,
    directions: str = "eigenvectors",
    k: int = 100,
    chosen: Sequence[int] = (0, 1, 2),
    folder: str | Path | None = None,
    data_id: str | None = None,
    progress_bar: bool | None = None,
    **quadratic_options: Any,
) -> DirectionalBias:
    """Measure slopes and curvatures on all mini-batches along directions chosen on a few.

    Args:
        model: The network.
        loss: Loss with ``reduction="mean"``.
        batches: The M mini-batches, disjoint and of equal size; see :func:`partition`.
        directions: ``"eigenvectors"`` or ``"cg"``.
        k: Number of directions.
        chosen: Which mini-batches choose directions.
        folder: Keeps finished mini-batches, and the same call resumes from there.
        data_id: Stands for the data in the folder, which are then not compared. Change it when
            they change.
        progress_bar: Show one; by default on a terminal, if it takes some seconds.
        **quadratic_options: ``curvature``, ``l2``, ``regularize_biases``, ``chunk_size`` and
            ``max_columns`` of :class:`Quadratic`.

    Returns:
        The measured values.

    Raises:
        ValueError: If the mini-batches differ in size, or ``chosen`` is out of range.

    Example:
        >>> X = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
        >>> batches = [(X[:4], X[:4, :1]), (X[4:], X[4:, 1:])]
        >>> bias = directional_bias(nn.Linear(2, 1), nn.MSELoss(), batches, k=2, chosen=(0,))
        >>> bias.curvatures.shape, bool((bias.same() >= bias.full()).any())
        (torch.Size([1, 2, 2]), True)
    """
    sizes = {len(y) for _, y in batches}
    if len(sizes) != 1:
        raise ValueError(
            f"Expected mini-batches of one size, got sizes {sorted(sizes)}: averages are "
            "full-batch values only for equal sizes. Remedy: use partition(data, batch_size)."
        )
    if not chosen or not all(0 <= s < len(batches) for s in chosen):
        raise ValueError(
            f"Expected chosen in 0..{len(batches) - 1}, got {tuple(chosen)}. "
            "Remedy: number the mini-batches from 0."
        )
    options = {"directions": directions, "k": k, **quadratic_options}
    options |= {"n_batches": len(batches), "batch_size": max(sizes)}
    study = CellStore.for_run(
        folder, model, {"data": batches}, loss=loss, options=options, data_id=data_id
    )
    slopes, curvatures = [], []
    with bar(title=directions, total=len(chosen) * len(batches), shown=progress_bar) as shown:
        for s in chosen:
            part = f"batch {s}"
            if part in study:
                shown.update(len(batches))
            measured = study.get(
                part,
                partial(_measure, model, loss, batches, s, directions, k, shown, quadratic_options),
            )
            slopes.append(measured["slopes"])
            curvatures.append(measured["curvatures"])
    return DirectionalBias(
        directions=directions,
        curvature=quadratic_options.get("curvature", "ggn"),
        batch_size=sizes.pop(),
        chosen=tuple(chosen),
        slopes=torch.stack(slopes),
        curvatures=torch.stack(curvatures),
    )


def _measure(
    model: nn.Module,
    loss: nn.Module,
    batches: Sequence[Chunk],
    s: int,
    directions: str,
    k: int,
    shown: Any,
    quadratic_options: dict[str, Any],
) -> dict[str, Tensor]:
    """Choose directions on mini-batch ``s`` and measure on all; each result ``[M, k]``."""
    D, steps = choose_directions(
        Quadratic(model, loss, batches[s], **quadratic_options), directions, k
    )
    padding = D.new_full((k - D.shape[1],), float("nan"))
    rows: dict[str, list[Tensor]] = {"slopes": [], "curvatures": []}
    for batch in batches:
        if D.shape[1]:
            restricted = Quadratic(model, loss, batch, **quadratic_options).restrict(D)
            values = (restricted.slopes(steps), restricted.curvatures())
        else:
            values = (padding[:0], padding[:0])
        for name, value in zip(rows, values, strict=True):
            rows[name].append(torch.cat([value, padding]))
        shown.update()
    return {name: torch.stack(values) for name, values in rows.items()}
