r"""The local quadratic of a regularised loss, on curvlinops' linear operators.

.. math::
    q(\theta; \mathcal{B}) = \tfrac{1}{2} (\theta - \theta_0)^\top H_\mathcal{B} (\theta - \theta_0)
    + (\theta - \theta_0)^\top g_\mathcal{B} + c_\mathcal{B}

Conventions: the loss is a MEAN over the data plus ``l2 / 2 * ||theta||^2``, so ``l2`` is the
paper's ``beta``. Vectors are flat, ``[P]``, many vectors are columns, ``[P, K]``, in the order of
``model.parameters()`` (those that require gradients). ``H`` is the GGN, the Hessian or K-FAC of the
mean loss, plus ``l2`` on the diagonal.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from laplace_debias.data.chunks import Chunk, Chunks
from laplace_debias.network.preserve import evaluation_mode, parameters_kept
from laplace_debias.quadratics.directions import normalize_directions
from laplace_debias.quadratics.operators import (
    Curvature,
    check_loss,
    check_targets,
    curvature_operator,
    ggn_gram,
)
from laplace_debias.quadratics.restriction import RestrictedQuadratic


class Quadratic:
    """The quadratic of a model's regularised loss on any amount of data, around its parameters.

    Nothing is computed before it is needed; gradient and constant are computed once. The model is
    evaluated in evaluation mode and left as it was. Its parameters must not change as long as the
    quadratic is in use: every call checks this.

    Args:
        model: The network. Parameters that do not require gradients are constants.
        loss: Loss module with ``reduction="mean"`` over the data.
        data: A pair ``(X, y)``, or a re-iterable of such pairs (list, ``DataLoader``).
        curvature: ``"ggn"``, ``"hessian"`` or ``"kfac"`` (K-FAC-expand of the type-2 Fisher).
        l2: Strength ``beta`` of the regulariser ``beta / 2 * ||theta||^2``.
        regularize_biases: Whether the regulariser acts on parameters whose name ends in ``bias``.
        chunk_size: Largest number of data that go through the model at once.
        max_columns: Largest number of vectors that are multiplied at once; memory grows with
            ``chunk_size * max_columns``.

    Attributes:
        shape: ``(P, P)``.
        n_data: Number of data.
        n_products: How many vectors the curvature was multiplied onto so far.

    Raises:
        ValueError: For an unknown curvature, a loss that is not a plain mean, a negative ``l2``, a
            model without trainable parameters or in half precision, or (when first computed) a
            loss, gradient or product that is not finite.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> q = Quadratic(model, nn.MSELoss(), (torch.eye(2), torch.zeros(2, 1)), l2=0.5)
        >>> q @ torch.eye(2)
        tensor([[1.5000, 0.0000],
                [0.0000, 1.5000]])
        >>> q.n_products
        2
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        data: Chunk | Iterable[Chunk],
        *,
        curvature: Curvature = "ggn",
        l2: float = 0.0,
        regularize_biases: bool = True,
        chunk_size: int | None = None,
        max_columns: int = 16,
    ):
        """Check the input and keep references; see the class."""
        check_loss(loss)
        if not 0 <= l2 < float("inf"):
            raise ValueError(
                f"Expected a finite l2 >= 0, got {l2}. Remedy: pass 0 for no regulariser."
            )
        if max_columns < 1:
            raise ValueError(f"Expected max_columns >= 1, got {max_columns}. Remedy: leave it out.")
        names = [name for name, p in model.named_parameters() if p.requires_grad]
        if not names:
            raise ValueError(
                "Expected a model with parameters that require gradients, got none. "
                "Remedy: call requires_grad_(True) on those the quadratic shall live in."
            )
        # K-FAC hooks into the modules, and would leave its hooks there if the model raised.
        self._model = copy.deepcopy(model) if curvature == "kfac" else model
        parameters = dict(self._model.named_parameters())
        self._params = [parameters[name] for name in names]
        self._source_params = [p for p in model.parameters() if p.requires_grad]
        self.dtype, self.device = self._params[0].dtype, self._params[0].device
        if self.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"Expected a model in float32 or float64, got {self.dtype}. Remedy: model.float()."
            )
        self._loss = loss
        self._chunks = Chunks(data, chunk_size)
        check_targets(loss, self._chunks)
        self._max_columns = max_columns
        self.curvature = curvature
        self.n_data = self._chunks.n_data
        self.n_products = 0
        self.theta0 = _flatten(self._source_params)  # [P]
        self.shape = (len(self.theta0), len(self.theta0))
        self._l2_diagonal = torch.cat(
            [  # [P]
                self.theta0.new_full((p.numel(),), l2 * (regularize_biases or name[-4:] != "bias"))
                for name, p in zip(names, self._params, strict=True)
            ]
        )
        # the mean loss's, without the regulariser
        self._operator = curvature_operator(
            curvature, self._model, loss, self._params, self._chunks, self.n_data
        )
        self._gradient_and_constant: tuple[Tensor, Tensor] | None = None

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Refuse a model that has moved, then evaluate it without dropout and batch statistics."""
        if not torch.equal(_flatten(self._source_params), self.theta0):
            raise RuntimeError(
                "Expected the parameters the quadratic was built around, got others: the model has "
                "changed. Remedy: build a new Quadratic, or copy the model before training on."
            )
        with evaluation_mode(self._model), parameters_kept(self._model), torch.enable_grad():
            yield

    def _evaluate_loss(self) -> tuple[Tensor, Tensor]:
        """Compute gradient and constant once."""
        if self._gradient_and_constant is not None:
            return self._gradient_and_constant
        with self._evaluating():
            parts, loss = self._operator.gradient_and_loss()
        gradient = _flatten(parts)
        if not (torch.isfinite(loss) and torch.isfinite(gradient).all()):
            raise ValueError(
                f"Expected a finite loss and gradient, got a loss of {float(loss)}. "
                "Remedy: look for NaN or infinity in the data and the parameters."
            )
        self._gradient_and_constant = (
            gradient + self._l2_diagonal * self.theta0,
            loss + 0.5 * (self._l2_diagonal * self.theta0**2).sum(),
        )
        return self._gradient_and_constant

    @property
    def gradient(self) -> Tensor:
        """Gradient ``g`` of the regularised loss at ``theta_0``, shape ``[P]``."""
        return self._evaluate_loss()[0]

    @property
    def constant(self) -> Tensor:
        """Regularised loss ``c`` at ``theta_0``, a scalar tensor."""
        return self._evaluate_loss()[1]

    def __matmul__(self, V: Tensor) -> Tensor:
        """Multiply ``H`` onto one vector ``[P]`` or many ``[P, K]``."""
        self._check_vectors(V)
        columns = V.detach().reshape(len(V), -1)
        with self._evaluating():
            HV = torch.cat([self._product(v) for v in columns.split(self._max_columns, 1)], 1)
        self.n_products += columns.shape[1]
        HV = HV.detach() + self._l2_diagonal[:, None] * columns
        _check_finite(HV)
        return HV.reshape(V.shape)

    def _product(self, V: Tensor) -> Tensor:
        """Multiply the curvature of the mean loss onto ``[P, K]``."""
        with parameters_kept(self._model):
            return self._operator @ V

    def gram(self, D: Tensor) -> Tensor:
        """Return ``D^T H D`` for vectors ``D`` of shape ``[P, K]``, shape ``[K, K]``.

        For the GGN this needs the model's Jacobian only (no backward pass), for the others one
        product per column. It counts as ``K`` products.
        """
        self._check_vectors(D)
        D = D.detach()
        if self.curvature != "ggn":
            gram = torch.cat([D.T @ (self @ v) for v in D.split(self._max_columns, 1)], 1)
            return (gram + gram.T) / 2
        with self._evaluating():
            gram = ggn_gram(
                self._model,
                self._loss,
                self._params,
                self._chunks,
                self.n_data,
                D,
                self._max_columns,
            )
        self.n_products += D.shape[1]
        _check_finite(gram)
        return gram + D.T @ (self._l2_diagonal[:, None] * D)

    def value(self, theta: Tensor) -> Tensor:
        """Evaluate ``q`` at ``theta``: ``[P]`` gives a scalar, many ``[P, K]`` give ``[K]``."""
        self._check_vectors(theta)
        x = theta.reshape(len(theta), -1) - self.theta0[:, None]
        value = 0.5 * self.gram(x).diagonal() + self.gradient @ x + self.constant
        return value[0] if theta.ndim == 1 else value

    def gradient_at(self, theta: Tensor) -> Tensor:
        """Return ``grad q(theta) = H (theta - theta_0) + g``, shape ``[P]``."""
        return self @ (theta - self.theta0) + self.gradient

    def slopes(self, D: Tensor, theta: Tensor | None = None) -> Tensor:
        """Return the directional slopes ``d_p^T grad q(theta)`` along ``D`` ``[P, K]``, ``[K]``.

        ``theta`` is where to take them, ``None`` stands for ``theta_0``. Directions that are not
        normalised are normalised, with a warning.
        """
        D = self._directions(D)
        return D.T @ (self.gradient if theta is None else self.gradient_at(theta))

    def curvatures(self, D: Tensor) -> Tensor:
        """Return the directional curvatures ``d_p^T H d_p`` along ``D`` ``[P, K]``, shape ``[K]``.

        All in one pass over the data; directions that are not normalised are normalised, with a
        warning.
        """
        return self.gram(self._directions(D)).diagonal()

    def restrict(self, D: Tensor) -> RestrictedQuadratic:
        """Restrict ``q`` to the span of the directions ``D`` ``[P, K]`` through ``theta_0``.

        Directions that are not normalised are normalised, with a warning.
        """
        D = self._directions(D)
        return RestrictedQuadratic(self.gram(D), D.T @ self.gradient, self.constant)

    def _directions(self, D: Tensor) -> Tensor:
        """Check directions, and normalise them where they are not, saying so."""
        self._check_vectors(D)
        if D.ndim != 2:
            raise ValueError(
                f"Expected directions [P, K], got shape {tuple(D.shape)}. "
                "Remedy: put directions into columns."
            )
        D, changed = normalize_directions(D)
        if changed:
            warnings.warn(
                f"Normalised {changed} of {D.shape[1]} directions to unit length: slopes and "
                "curvatures are those along the unit vectors.",
                stacklevel=3,
            )
        return D

    def _check_vectors(self, V: Tensor) -> None:
        """Raise unless ``V`` is ``[P]`` or ``[P, K]`` in the quadratic's dtype and device."""
        P = self.shape[0]
        if V.ndim not in (1, 2) or V.shape[0] != P or V.numel() == 0:
            raise ValueError(
                f"Expected shape ({P},) or ({P}, K), got {tuple(V.shape)}. Remedy: pass flat "
                "vectors, one entry per trainable parameter; many vectors are columns."
            )
        if V.dtype != self.dtype or V.device != self.device:
            raise ValueError(
                f"Expected {self.dtype} on {self.device}, got {V.dtype} on {V.device}. "
                "Remedy: move the vectors with .to(quadratic.theta0)."
            )


def _flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one flat vector."""
    return torch.cat([t.detach().flatten() for t in tensors])


def _check_finite(product: Tensor) -> None:
    """Raise if a product is not finite."""
    if not torch.isfinite(product).all():
        raise ValueError(
            "Expected a finite product with the curvature, got NaN or infinity. "
            "Remedy: look for extreme parameters, data or vectors."
        )
