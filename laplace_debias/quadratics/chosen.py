"""Directions that one mini-batch chooses, by products that survive an interruption.

At real size a single product takes seconds to minutes, and a hundred eigenvectors some hundreds of
them. The solvers are deterministic, so a solver that is started again asks for the very same
products: :class:`RecordedProducts` hands out those that are in its folder.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from laplace_debias.data.chunks import Chunk
from laplace_debias.data.loaders import bar
from laplace_debias.quadratics.cg import cg
from laplace_debias.quadratics.directions import SymmetricOperator, top_eigenvectors
from laplace_debias.quadratics.quadratic import Quadratic
from laplace_debias.storage.atomic import write_atomically
from laplace_debias.storage.cells import CellStore

DIRECTIONS = ("eigenvectors", "cg")


class RecordedProducts:
    """An operator whose products are kept in a folder, in the order in which they are asked for.

    The n-th product is taken from its file if it was made with the very same vectors (their bytes
    are compared by a digest); from the first one that differs, products are computed and their
    files replaced. So a folder that belongs to something else costs time, never a wrong result,
    as long as it was made with the same operator: use a new folder for each. One product is in
    memory at a time.

    Args:
        H: The operator.
        folder: Where to keep the products, one file each; ``None`` keeps nothing.
        progress_bar: Show how many vectors were multiplied; by default on a terminal, if it
            takes some seconds.

    Attributes:
        n_products: How many vectors ``H`` was multiplied onto, those from files not counted.

    Example:
        >>> import tempfile
        >>> H, v = torch.eye(2), torch.ones(2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = RecordedProducts(H, folder) @ v
        ...     again = RecordedProducts(H, folder)
        ...     again @ v, again.n_products
        (tensor([1., 1.]), 0)
    """

    def __init__(
        self, H: SymmetricOperator, folder: str | Path | None, *, progress_bar: bool | None = None
    ) -> None:
        """Keep references; see the class."""
        self._H = H
        self._folder = None if folder is None else Path(folder)
        self._asked = 0
        self._bar = bar(title="products", shown=progress_bar, unit="vector")
        self.shape, self.dtype, self.device = (int(H.shape[0]), int(H.shape[1])), H.dtype, H.device
        self.n_products = 0

    @property
    def gradient(self) -> Tensor:
        """The operator's own gradient, ``[P]``, if it has one."""
        gradient: Tensor = self._H.gradient  # type: ignore[attr-defined]
        return gradient

    def __matmul__(self, V: Tensor) -> Tensor:
        """Multiply onto one vector ``[P]`` or many ``[P, K]``, or read the product."""
        path = None if self._folder is None else self._folder / f"{self._asked}.npz"
        self._asked += 1
        digest = "" if path is None else _digest(V)
        HV = None if path is None else _read(path, digest)
        n_vectors = 1 if V.ndim == 1 else V.shape[1]
        if HV is None:
            HV = self._H @ V
            self.n_products += n_vectors
            if path is not None:
                array, name = HV.detach().cpu().numpy(), np.array(digest)
                write_atomically(path, lambda file: np.savez(file, product=array, vectors=name))
        self._bar.update(n_vectors)
        return HV.to(self.device)

    def clear(self) -> None:
        """Delete the folder: whoever has the result needs its products no more."""
        self._bar.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _digest(V: Tensor) -> str:
    """Shape and bytes of vectors as a short text."""
    array = np.ascontiguousarray(V.detach().cpu().numpy())
    return f"{tuple(array.shape)} {hashlib.sha256(array.data).hexdigest()}"


def _read(path: Path, digest: str) -> Tensor | None:
    """The product in a file, if there is one that was made with these vectors."""
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as file:
        return torch.from_numpy(file["product"]) if str(file["vectors"]) == digest else None


def choose_directions(
    quadratic: SymmetricOperator, directions: str, k: int, **solver_options: Any
) -> dict[str, Tensor]:
    """Choose k unit directions that are extreme for a quadratic.

    Args:
        quadratic: A :class:`Quadratic`, or its :class:`RecordedProducts`.
        directions: ``"eigenvectors"`` (top k) or ``"cg"`` (at most k search directions).
        k: How many.
        **solver_options: Of :func:`top_eigenvectors` or :func:`cg`.

    Returns:
        ``"D"``, the directions ``[P, K]``; with eigenvectors their ``"values"`` ``[K]``, with CG
        the ``"steps"`` ``[K]`` of the path through them.

    Example:
        >>> q = Quadratic(nn.Linear(2, 1), nn.MSELoss(), (torch.eye(2), torch.ones(2, 1)), l2=0.1)
        >>> chosen = choose_directions(q, "cg", 2)
        >>> chosen["D"].shape, chosen["steps"].shape
        (torch.Size([3, 2]), torch.Size([2]))
    """
    if directions == "eigenvectors":
        pairs = top_eigenvectors(quadratic, k, **solver_options)
        return {"D": pairs.vectors, "values": pairs.values}
    if directions == "cg":
        solution = cg(quadratic, max_iter=k, **{"rtol": 0.0, **solver_options})
        return {"D": solution.unit_directions, "steps": solution.magnitudes}
    raise ValueError(
        f"Expected directions in {DIRECTIONS}, got {directions!r}. Remedy: pass one of them."
    )


def kept_directions(
    model: nn.Module,
    loss: nn.Module,
    batch: Chunk,
    directions: str,
    k: int,
    *,
    folder: str | Path | None = None,
    data_id: str | None = None,
    progress_bar: bool | None = None,
    solver_options: Mapping[str, Any] | None = None,
    **quadratic_options: Any,
) -> dict[str, Tensor]:
    """Choose directions on a mini-batch, or read those that are in the folder.

    While they are being computed the folder holds the products so far, and the same call goes on
    from them; then it holds the directions alone.

    Args:
        model: The network.
        loss: Loss with ``reduction="mean"``.
        batch: The mini-batch ``(X, y)``.
        directions: ``"eigenvectors"`` or ``"cg"``.
        k: How many.
        folder: Keeps them; ``None`` keeps nothing.
        data_id: Stands for the mini-batch in the folder, which is then not compared.
        progress_bar: Count products; by default on a terminal, if it takes some seconds.
        solver_options: Of :func:`top_eigenvectors` or :func:`cg`.
        **quadratic_options: As for :class:`Quadratic`.

    Returns:
        As :func:`choose_directions`, on the model's device.

    Example:
        >>> batch = (torch.eye(2), torch.ones(2, 1))
        >>> kept_directions(nn.Linear(2, 1), nn.MSELoss(), batch, "eigenvectors", 1)["D"].shape
        torch.Size([3, 1])
    """
    solver = dict(solver_options or {})
    options = {"directions": directions, "k": k, "solver": solver, **quadratic_options}
    store = CellStore.for_run(
        folder, model, {"data": [batch]}, loss=loss, options=options, data_id=data_id
    )
    quadratic = Quadratic(model, loss, batch, **quadratic_options)

    def choose() -> dict[str, Tensor]:
        return choose_directions(products, directions, k, **solver)

    products = RecordedProducts(
        quadratic, None if folder is None else Path(folder) / "products", progress_bar=progress_bar
    )
    chosen: dict[str, Tensor] = store.get("directions", choose)
    products.clear()
    return {name: value.to(quadratic.device) for name, value in chosen.items()}
