"""Directions that are extreme on one mini-batch: top eigenvectors of its curvature.

The search directions of conjugate gradients, the other such set, come with :func:`cg`'s solution.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor


class SymmetricOperator(Protocol):
    """What the solvers need: a shape, products ``H @ v`` with ``[P]`` and ``[P, K]``, a dtype.

    A :class:`Quadratic`, a curvlinops operator and a symmetric matrix all are such operators.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device

    def __matmul__(self, V: Tensor) -> Tensor:
        """Multiply onto vectors."""


@dataclass(frozen=True)
class Eigenpairs:
    """Top eigenpairs of a symmetric operator.

    Attributes:
        values: Largest eigenvalues in descending order, shape ``[k]``.
        vectors: Orthonormal eigenvectors as columns, shape ``[P, k]``.
        residuals: ``||H u - lambda u||`` for each pair, shape ``[k]``.
        n_products: How many vectors the operator was multiplied onto.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    n_products: int


def normalize_directions(D: Tensor) -> tuple[Tensor, int]:
    """Scale columns to unit length, and count those that were not, beyond rounding.

    Args:
        D: Directions as columns, shape ``[P, K]``.

    Returns:
        The unit directions, shape ``[P, K]``, and how many columns were not of unit length.

    Raises:
        ValueError: If a column is zero or not finite.

    Example:
        >>> normalize_directions(torch.tensor([[3.0, 0.0], [4.0, 1.0]]))
        (tensor([[0.6000, 0.0000],
                [0.8000, 1.0000]]), 1)
    """
    norms = D.norm(dim=0, dtype=torch.float64)  # long columns: float32 would lose digits
    bad = ~torch.isfinite(norms) | (norms == 0)
    if bad.any():
        raise ValueError(
            f"Expected finite, non-zero directions, got {norms[bad].tolist()} as the norm of "
            f"column(s) {bad.nonzero().flatten().tolist()}. Remedy: leave them out."
        )
    off = (norms - 1).abs() > torch.finfo(D.dtype).eps ** 0.5
    return D / norms.to(D.dtype), int(off.sum())


def top_eigenvectors(
    H: SymmetricOperator,
    k: int,
    *,
    block_size: int = 8,
    tol: float | None = None,
    max_products: int | None = None,
    probes: int = 4,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    """Compute the eigenvectors to the ``k`` largest eigenvalues, matrix-free.

    Thick-restarted block Lanczos with full orthogonalisation: a Krylov basis grows by blocks of
    vectors that go through the model together, the Rayleigh-Ritz values in it give eigenpairs, and
    when the basis is full it is compressed to its leading Ritz vectors. At the end a few random
    vectors look for eigenvalues that were missed, as copies of a multiple one may be. All tensors
    stay on the operator's device. The basis holds about ``2 k`` vectors.

    Args:
        H: Symmetric operator, shape ``(P, P)``.
        k: Number of eigenpairs.
        block_size: Vectors per product.
        tol: Largest residual ``||H u - lambda u||``, relative to the largest absolute eigenvalue.
            ``None``: the dtype's epsilon to the power of 2/3.
        max_products: Give up after as many products; ``None``: ``40 k + 400``.
        probes: How many random vectors look for missed eigenvalues, at three products each, when
            ``block_size < k``. 0 saves them where a multiple eigenvalue is out of the question.
        generator: Where the start block comes from; ``None``: a fixed seed. The global random
            state is not touched.

    Returns:
        The eigenpairs, values in descending order.

    Raises:
        ValueError: If ``k`` is not in ``1..P`` or the operator is not square or not symmetric.
        RuntimeError: If ``max_products`` do not suffice.

    Example:
        >>> H = torch.diag(torch.tensor([1.0, 4.0, 2.0, 3.0]))
        >>> top_eigenvectors(H, 2).values
        tensor([4.0000, 3.0000])
    """
    P = H.shape[0]
    if tuple(H.shape) != (P, P):
        raise ValueError(
            f"Expected a square operator, got shape {tuple(H.shape)}. "
            "Remedy: pass a symmetric operator [P, P]."
        )
    if not 1 <= k <= P:
        raise ValueError(
            f"Expected 1 <= k <= {P} (the number of parameters), got k={k}. "
            "Remedy: ask for fewer eigenvectors."
        )
    if block_size < 1:
        raise ValueError(f"Expected block_size >= 1, got {block_size}. Remedy: leave it out.")
    tol = torch.finfo(H.dtype).eps ** (2 / 3) if tol is None else tol
    max_products = 40 * k + 400 if max_products is None else max_products
    if generator is None:
        generator = torch.Generator(H.device).manual_seed(0)
    b = min(block_size, P)
    capacity = min(P, max(2 * k + 2 * b, k + 6 * b))

    Q = torch.empty(P, capacity, dtype=H.dtype, device=H.device)
    T = torch.zeros(capacity, capacity, dtype=torch.float64, device=H.device)
    V = _random_block(Q[:, :0], b, generator)
    n = products = 0
    scale = 0.0  # of the operator, as far as it has been seen
    while True:
        m = V.shape[1]
        Q[:, n : n + m] = V
        W = H @ V  # [P, m]
        products += m
        C = Q[:, : n + m].T @ W  # [n + m, m]
        scale = max(scale, float(C[n:].norm()))
        _check_symmetric_block(C[n:], scale)
        T[: n + m, n : n + m] = C.double()
        T[n : n + m, : n + m] = T[: n + m, n : n + m].T.clone()
        T[n : n + m, n : n + m] = (C[n:] + C[n:].T).double() / 2
        n += m
        lam, S = torch.linalg.eigh(T[:n, :n])
        lam, S = lam.flip(0), S.flip(1)
        scale = max(scale, float(lam.abs().max()))
        # H Q = Q T + V_next B E^T, where E selects the last block
        W -= Q[:, :n] @ C
        V_next, B = _orthonormal_remainder(Q[:, :n], W, scale)
        residuals = (B.double() @ S[n - m :, :k]).norm(dim=0)  # [k], exact but for rounding
        if n == P or (n >= k and float(residuals.max()) <= tol * scale):
            U = Q[:, :n] @ S[:, :k].to(H.dtype)
            if n < P and b < k and probes > 0:
                outside, needed = _largest_outside(H, U, probes, generator)
                products += needed
                if outside > float(lam[k - 1]) + 100 * tol * scale:
                    # copies of a multiple eigenvalue are missing: a block finds as many as it has
                    # columns
                    again = top_eigenvectors(
                        H,
                        k,
                        block_size=2 * b,
                        tol=tol,
                        max_products=max_products,
                        probes=probes,
                        generator=generator,
                    )
                    return replace(again, n_products=again.n_products + products)
            return Eigenpairs(lam[:k].to(H.dtype), U, residuals.to(H.dtype), products)
        if products >= max_products:
            raise RuntimeError(
                f"Expected {k} eigenpairs within {max_products} products, got a largest relative "
                f"residual of {float(residuals.max()) / scale:.1e} > tol={tol:.1e}. "
                "Remedy: raise max_products or tol, or ask for fewer eigenvectors."
            )
        if n + b > capacity and capacity < P:
            keep = min(k + (capacity - k) // 2, n, capacity - b)
            Q[:, :keep] = Q[:, :n] @ S[:, :keep].to(H.dtype)
            T.zero_()
            T[range(keep), range(keep)] = lam[:keep]
            n = keep
        if V_next.shape[1] == 0:  # the basis is invariant: go on with new directions
            V_next = _random_block(Q[:, :n], min(b, P - n), generator)
        V = V_next[:, : capacity - n]


def _orthonormal_remainder(Q: Tensor, W: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Factor what is left of ``W`` outside of span(Q) into ``V B`` with V orthonormal."""
    W = W - Q @ (Q.T @ W)
    V, R = torch.linalg.qr(W)
    U, sigma, Vh = torch.linalg.svd(R)
    info = torch.finfo(W.dtype)
    rank = int((sigma > 10 * info.eps * max(scale, info.tiny)).sum())
    V = V @ U[:, :rank]
    V = V - Q @ (Q.T @ V)  # directions of small sigma carry rounding errors of W
    V, R = torch.linalg.qr(V)
    return V, R @ (sigma[:rank, None] * Vh[:rank])


def _largest_outside(
    H: SymmetricOperator, U: Tensor, probes: int, generator: torch.Generator
) -> tuple[float, int]:
    """Estimate the largest eigenvalue outside of span(U) from below, by 3 counted block steps."""
    V = _random_block(U, min(probes, len(U) - U.shape[1]), generator)
    basis, images = [], []
    for _ in range(3):
        W = H @ V
        basis.append(V)
        images.append(W)
        known = torch.cat([U, *basis], 1)
        W = W - known @ (known.T @ W)
        V = torch.linalg.qr(W - known @ (known.T @ W)).Q
    Q, HQ = torch.cat(basis, 1), torch.cat(images, 1)
    # eigenvalues of the pencil, so that columns of a vanished remainder do no harm
    gram, T = (Q.T @ Q).double(), (Q.T @ HQ).double()
    scale, basis_of_gram = torch.linalg.eigh(gram)
    root = basis_of_gram[:, scale > 0.5] / scale[scale > 0.5].sqrt()
    T = root.T @ (T + T.T) @ root / 2
    return float(torch.linalg.eigvalsh(T)[-1]), Q.shape[1]


def _random_block(Q: Tensor, b: int, generator: torch.Generator) -> Tensor:
    """Draw ``b`` orthonormal vectors that are orthogonal to the columns of ``Q``."""
    V = torch.randn(len(Q), b, generator=generator, dtype=Q.dtype, device=generator.device)
    V = V.to(Q.device)
    for _ in range(2):
        V = torch.linalg.qr(V - Q @ (Q.T @ V)).Q
    return V


def _check_symmetric_block(block: Tensor, scale: float) -> None:
    """Raise unless ``V^T H V`` is symmetric up to rounding, for an operator of norm ``scale``."""
    gap = float((block - block.T).norm())
    if not gap <= torch.finfo(block.dtype).eps ** 0.5 * scale:
        raise ValueError(
            f"Expected a symmetric operator, got V^T H V with an asymmetry of {gap:.1e} beside a "
            f"norm of {scale:.1e}. Remedy: symmetrise it, e.g. (H + H^T) / 2."
        )
