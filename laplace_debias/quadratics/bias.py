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

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from laplace_debias.data.chunks import Chunk
from laplace_debias.data.loaders import bar
from laplace_debias.quadratics.chosen import kept_directions
from laplace_debias.quadratics.quadratic import Quadratic
from laplace_debias.storage.cells import CellStore
from laplace_debias.storage.export import tidy
from laplace_debias.storage.results import SavedResult

KINDS = ("slopes", "curvatures", "magnitudes")


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


def directional_bias(
    model: nn.Module,
    loss: nn.Module,
    batches: Sequence[Chunk],
    *,
    directions: str = "eigenvectors",
    k: int = 100,
    chosen: Sequence[int] = (0, 1, 2),
    folder: str | Path | None = None,
    directions_folder: str | Path | None = None,
    data_id: str | None = None,
    progress_bar: bool | None = None,
    solver_options: Mapping[str, Any] | None = None,
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
        folder: Keeps what is finished (products, directions, values on a mini-batch), and the same
            call resumes from there.
        directions_folder: Keeps the directions for good, for other studies of the same
            mini-batches. ``None``: they are deleted when all values along them are known.
        data_id: Stands for the data in the folder, which are then not compared. Change it when
            they change.
        progress_bar: Show a progress bar; by default on a terminal, if it takes some seconds.
        solver_options: Of :func:`top_eigenvectors` or :func:`cg`, e.g. ``tol``.
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
    if solver_options:
        options["solver"] = dict(solver_options)
    study = CellStore.for_run(
        folder, model, {"data": batches}, loss=loss, options=options, data_id=data_id
    )
    slopes, curvatures = [], []
    with bar(title=directions, total=len(chosen) * len(batches), shown=progress_bar) as shown:
        for s in chosen:
            parts = None if study.folder is None else study.folder / f"parts of {s}"
            kept = parts if directions_folder is None else Path(directions_folder)
            choose = partial(
                kept_directions,
                model,
                loss,
                batches[s],
                directions,
                k,
                folder=None if kept is None else kept / f"{directions} of {s}",
                data_id=None if data_id is None else f"{data_id}, mini-batch {s}",
                progress_bar=progress_bar,
                solver_options=solver_options,
                **quadratic_options,
            )
            part = f"batch {s}"
            if part in study:
                shown.update(len(batches))
            cells = CellStore(None if part in study else parts, study.config)
            quadratics = partial(Quadratic, model, loss, **quadratic_options)
            measured = study.get(
                part, partial(_measure, quadratics, batches, choose, k, shown, cells)
            )
            if parts is not None:
                shutil.rmtree(parts, ignore_errors=True)
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
    quadratics: Callable[[Chunk], Quadratic],
    batches: Sequence[Chunk],
    choose: Callable[[], dict[str, Tensor]],
    k: int,
    shown: tqdm,
    cells: CellStore,
) -> dict[str, Tensor]:
    """Choose directions and measure along them on all mini-batches; each result ``[M, k]``."""
    chosen = choose()
    D, steps = chosen["D"], chosen.get("steps")
    padding = D.new_full((k - D.shape[1],), float("nan"))

    def measure(batch: Chunk) -> dict[str, Tensor]:
        values = {"slopes": padding[:0], "curvatures": padding[:0]}
        if D.shape[1]:
            restricted = quadratics(batch).restrict(D)
            values = {"slopes": restricted.slopes(steps), "curvatures": restricted.curvatures()}
        return {name: torch.cat([value, padding]) for name, value in values.items()}

    rows = []
    for m, batch in enumerate(batches):
        rows.append(cells.get(f"on {m}", partial(measure, batch)))
        shown.update()
    return {name: torch.stack([row[name] for row in rows]) for name in ("slopes", "curvatures")}
