r"""Kronecker factors of a set of data: THE type, how two of them add up, and their conventions.

Conventions (stated here once, used everywhere):

* A *block* belongs to one trainable parameter. For a weight it is ``[B, A]`` and stands for the
  matrix ``kron(B, A)``: ``B`` ``[d_out, d_out]`` from output gradients, ``A`` ``[d_in, d_in]`` from
  layer inputs (convolution: ``d_in = C_in / groups * k * k``). For a bias it is ``[B]``.
  A list of blocks, one per trainable parameter in the order of ``model.parameters()``, is what
  laplace-torch's ``Kron`` holds.
* K-FAC-expand: ``B`` is the SUM over data and positions of :math:`g g^\top`, ``A`` the MEAN over
  data and positions of :math:`a a^\top`. Only their product counts: for regression some backends
  put a root of 1/2 on each factor, so one backend's ``A`` must not meet another one's ``B``.
* laplace-torch's precision is ``H + prior_precision * I`` with ``H`` a sum over the ``N`` training
  data; the paper's is ``N (K + beta I)`` with ``K`` a mean. Hence
  ``prior_precision = N * beta``.
* The ``M`` data of a role (directions, curvatures) stand for ``N``: every block, weight or bias, is
  multiplied by ``N / M`` exactly once, on ``B`` (:meth:`Factors.scaled_to`). The mini-batches of
  one role are first added: ``B`` adds up, ``A`` is averaged with weights ``m / M`` (where data
  differ in their numbers of rows, as with routing: by the numbers of rows).
* Debiased block: with ``A = Q_A diag(lam_A) Q_A^T`` and ``B = Q_B diag(lam_B) Q_B^T`` from the
  directions' data and ``C``, ``D`` the same factors from the curvatures' data,
  ``lam~_A = diag(Q_A^T C Q_A)``, ``lam~_B = diag(Q_B^T D Q_B)``, and the block is
  ``kron(Q_B, Q_A) diag(lam~_B x lam~_A) kron(Q_B, Q_A)^T``. Along every column of
  ``kron(Q_B, Q_A)`` its curvature is that of ``kron(D, C)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import TypeVar

import torch
from torch import Tensor

from laplace_debias.kfac.counts import RowCount
from laplace_debias.kfac.few_rows import added, averaged, scaled

__all__ = ["Block", "Factors", "merge"]

T = TypeVar("T")

Block = list[Tensor]
"""``[B, A]`` or ``[B]``; the same layout holds eigenvectors and eigenvalues of the factors."""


@dataclass(frozen=True)
class Factors:
    """Kronecker factors of a set of n data, what was seen on the way, and what it cost.

    Attributes:
        names: Name of each parameter, in the order of ``model.parameters()``.
        B: Output factor of each parameter, a sum over data; ``None`` if it was not computed.
        A: Input factor of each weight, a mean over data; ``None`` for a bias, or if not computed.
            A factor is a matrix ``[d, d]``, or where that was asked for its few rows ``[r, d]``
            (:mod:`laplace_debias.kfac.few_rows`), or curvatures ``[d]`` along a basis.
        n: Number of data.
        n_outputs: Number C of outputs of the network.
        weight: Number of data that ``B`` stands for: n, or for weighted data what the weights say.
        loss: Loss summed over the data, ``None`` without targets.
        forward: Number of forward passes, one per datum.
        backward: Number of backward passes, one per datum and vector.
        outputs: The network's outputs ``[n, C]``, if they were kept.
        rows: The rows ``[n, d_in]`` behind each ``A``, where they were kept; or nothing at all.
        at_output: For each parameter, whether its layer's output is the network's output. Its ``B``
            is then a sum of loss Hessians, which takes no backward pass; or nothing at all.
        row_counts: For each parameter the rows behind ``B`` and behind ``A`` (``None`` where there
            is no such factor), if they were counted; or nothing at all.
        n_rows: For each parameter, how much its ``A`` counts when factors are added: the number of
            rows that were averaged; or nothing at all, then numbers of data decide.
    """

    names: tuple[str, ...]
    B: tuple[Tensor | None, ...]
    A: tuple[Tensor | None, ...]
    n: int
    n_outputs: int
    weight: float
    loss: Tensor | None = None
    forward: int = 0
    backward: int = 0
    outputs: Tensor | None = None
    rows: tuple[Tensor | None, ...] = ()
    at_output: tuple[bool, ...] = ()
    row_counts: tuple[tuple[RowCount | None, RowCount | None], ...] = ()
    n_rows: tuple[int, ...] = ()

    @classmethod
    def from_blocks(
        cls,
        names: Sequence[str],
        blocks: Sequence[Sequence[Tensor]],
        n: int,
        n_outputs: int,
        loss: Tensor | None = None,
    ) -> Factors:
        """Factors that were computed elsewhere.

        Args:
            names: One name per block.
            blocks: ``[B, A]`` or ``[B]`` each, ``B`` a sum and ``A`` a mean over the n data.
            n: Number of data.
            n_outputs: Number of outputs of the network.
            loss: Loss summed over the data.

        Returns:
            The factors, without any record of passes.

        Example:
            >>> blocks = [[torch.eye(2), torch.eye(3)], [torch.eye(2)]]
            >>> Factors.from_blocks(["weight", "bias"], blocks, n=5, n_outputs=2).A[1] is None
            True
        """
        B = tuple(block[0] for block in blocks)
        A = tuple(block[1] if len(block) == 2 else None for block in blocks)
        return cls(tuple(names), B, A, n, n_outputs, weight=n, loss=loss)

    @property
    def blocks(self) -> list[Block]:
        """``[B, A]`` or ``[B]`` per parameter.

        Raises:
            ValueError: If output factors were not computed.
        """
        blocks = []
        for name, B, A in zip(self.names, self.B, self.A, strict=True):
            if B is None:
                raise ValueError(
                    f"Expected output factors, got none for '{name}', because only forward passes "
                    "were made. Remedy: compute them with `outputs=True`."
                )
            blocks.append([B] if A is None else [B, A])
        return blocks

    @property
    def summed_loss(self) -> Tensor:
        """The loss, summed over the data.

        Raises:
            ValueError: If the factors were computed without targets.
        """
        if self.loss is None:
            raise ValueError(
                "Expected factors with a loss, got some that were computed without targets. "
                "Remedy: pass `y`."
            )
        return self.loss

    @property
    def kept_outputs(self) -> Tensor:
        """The network's outputs ``[n, C]``, by which data are drawn.

        Raises:
            ValueError: If they were not kept, or have positions.
        """
        if self.outputs is None:
            raise ValueError(
                "Expected factors with the network's outputs, got some with output factors in "
                "their stead. Remedy: compute them with `outputs=False`."
            )
        if self.outputs.ndim > 2:
            raise ValueError(
                "Expected outputs [n, C] to draw data by their curvature, as debias='auto' and "
                f"sampling='curvature' do, got {list(self.outputs.shape)}: positions (tokens, "
                "pixels). Remedy: debias=True, 'single', or 'crossfit' with sampling='uniform'."
            )
        return self.outputs

    def scaled_to(self, n_data: float) -> list[Block]:
        """Blocks that stand for N data: every ``B`` times ``n_data / weight``, exactly once.

        Args:
            n_data: The number N.

        Returns:
            New blocks; each ``A`` is shared.

        Example:
            >>> factors = Factors.from_blocks(["bias"], [[torch.eye(2)]], n=5, n_outputs=2)
            >>> factors.scaled_to(50)[0][0].trace()
            tensor(20.)
        """
        return [[scaled(block[0], n_data / self.weight), *block[1:]] for block in self.blocks]

    def with_inputs(self, other: Factors) -> Factors:
        """The same output factors with the input factors of other data (more of them, say).

        Args:
            other: Factors of the same parameters.

        Returns:
            Factors with each ``A`` replaced.

        Raises:
            ValueError: If the two do not belong to the same parameters.
        """
        self._check_names(other)
        return replace(self, A=other.A, n_rows=other.n_rows)

    def __add__(self, other: Factors) -> Factors:
        """Factors of the data of both: B, losses and passes added, A averaged by numbers of data.

        Example:
            >>> one, two = (
            ...     Factors.from_blocks(["w"], [[v * torch.eye(1), v * torch.eye(1)]], n, 1)
            ...     for v, n in ((2.0, 1), (6.0, 3))
            ... )
            >>> [factor.item() for factor in (one + two).blocks[0]]
            [8.0, 5.0]
        """
        self._check_names(other)
        ours, theirs = self.n_rows, other.n_rows
        if not (ours and theirs):  # rows of one only: count data, which both know
            ours, theirs = ((each.n,) * len(self.names) for each in (self, other))
        shares = [b / max(a + b, 1) for a, b in zip(ours, theirs, strict=True)]
        return Factors(
            self.names,
            tuple(_both(one, two, added) for one, two in zip(self.B, other.B, strict=True)),
            tuple(
                None if one is None or two is None else averaged(one, two, share)
                for one, two, share in zip(self.A, other.A, shares, strict=True)
            ),
            self.n + other.n,
            self.n_outputs,
            self.weight + other.weight,
            _both(self.loss, other.loss, torch.add),
            self.forward + other.forward,
            self.backward + other.backward,
            _both(self.outputs, other.outputs, _stacked),
            tuple(
                _both(one, two, _stacked) for one, two in zip(self.rows, other.rows, strict=False)
            ),
            tuple(a and b for a, b in zip(self.at_output, other.at_output, strict=False)),
            tuple(
                (_both(B, D, add), _both(A, C, add))
                for (B, A), (D, C) in zip(self.row_counts, other.row_counts, strict=False)
            ),
            tuple(a + b for a, b in zip(self.n_rows, other.n_rows, strict=False)),
        )

    def _check_names(self, other: Factors) -> None:
        """Factors belong together only if they are of the same parameters."""
        if self.names != other.names:
            raise ValueError(
                f"Expected factors of the parameters {self.names}, got {other.names}. Remedy: "
                "compute both with the same model and the same `params`."
            )


def _both(one: T | None, two: T | None, operation: Callable[[T, T], T]) -> T | None:
    """Combine two of a kind, or nothing where one is missing."""
    return None if one is None or two is None else operation(one, two)


def _stacked(one: Tensor, two: Tensor) -> Tensor:
    """Rows of both."""
    return torch.cat([one, two])


def merge(
    first: Sequence[Block], n_first: float, second: Sequence[Block], n_second: float
) -> list[Block]:
    r"""Blocks of two disjoint sets of data taken together.

    .. math::
        B = B_1 + B_2, \qquad A = \frac{n_1 A_1 + n_2 A_2}{n_1 + n_2}

    Args:
        first: Blocks of the first set.
        n_first: Number of data behind ``first`` (or the number they stand for).
        second: Blocks of the second set, of the same shapes.
        n_second: Number of data behind ``second``.

    Returns:
        New blocks of the same shapes; the arguments are left as they are.

    Example:
        >>> one = [[torch.tensor([[2.0]]), torch.tensor([[1.0]])], [torch.tensor([[2.0]])]]
        >>> two = [[torch.tensor([[6.0]]), torch.tensor([[5.0]])], [torch.tensor([[6.0]])]]
        >>> [[factor.item() for factor in block] for block in merge(one, 1, two, 3)]
        [[8.0, 4.0], [8.0]]
    """
    n = n_first + n_second
    return [
        [
            block1[0] + block2[0],
            *(
                A1 * (n_first / n) + A2.to(A1.dtype) * (n_second / n)
                for A1, A2 in zip(block1[1:], block2[1:], strict=True)
            ),
        ]
        for block1, block2 in zip(first, second, strict=True)
    ]
