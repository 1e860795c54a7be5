"""From mini-batches with roles to the parts of a debiased posterior."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from laplace.utils import KronDecomposed
from torch import Tensor
from tqdm.auto import tqdm

from laplace_debias.data.reading import CURVATURES, DIRECTIONS
from laplace_debias.kfac.factors import (
    Block,
    DataFactors,
    decompose,
    merge,
    rebuild,
    reevaluate,
    rescale,
)

__all__ = ["Fitted", "accumulate_roles", "check_seen", "fit_factors", "scaled_loss"]


@dataclass(frozen=True)
class Fitted:
    """What a fit leaves behind, in the precision it was computed in.

    Attributes:
        Q: Eigenvectors of the directions' factors.
        lam: Their eigenvalues on the same data, biased.
        lam_tilde: Curvatures along ``Q`` that the posterior uses (``lam`` if nothing was
            re-evaluated).
        curvatures: Undecomposed factors of the curvatures' data, empty if there are none.
    """

    Q: list[Block]
    lam: list[list[Tensor]]
    lam_tilde: list[list[Tensor]]
    curvatures: list[Block]

    def decomposed(self, dtype: torch.dtype, damping: bool = False) -> KronDecomposed:
        """The curvature as laplace-torch holds it.

        Args:
            dtype: Its type, the model's.
            damping: laplace-torch's switch.

        Returns:
            ``Q diag(lam_tilde) Q^T``, block by block.
        """
        Q = [[Q_f.to(dtype) for Q_f in block] for block in self.Q]
        lam = [[values.to(dtype) for values in block] for block in self.lam_tilde]
        return KronDecomposed(Q, lam, damping=damping)


def accumulate_roles(
    batches: Iterator[tuple[str, Any]],
    factors_of: Callable[[Any], DataFactors],
    progress_bar: bool = False,
) -> dict[str, DataFactors]:
    """Compute and merge the factors of every mini-batch, role by role.

    Args:
        batches: Pairs of role and mini-batch.
        factors_of: Turns a mini-batch into its factors.
        progress_bar: Whether to show one, advanced by mini-batches.

    Returns:
        One total per role that occurred.

    Example:
        >>> import torch
        >>> one = lambda batch: DataFactors([[batch * torch.eye(1)]], 1, torch.tensor(0.5), 1)
        >>> roles = accumulate_roles(iter([("directions", 2.0), ("directions", 3.0)]), one)
        >>> roles["directions"].blocks[0][0].item(), roles["directions"].n
        (5.0, 2)
    """
    roles: dict[str, DataFactors] = {}
    with tqdm(disable=not progress_bar, unit="batch") as bar:
        for role, batch in batches:
            bar.set_description(f"[K-FAC: {role}]")
            new = factors_of(batch)
            if role in roles:
                old = roles[role]
                blocks = merge(old.blocks, old.n, new.blocks, new.n)
                new = DataFactors(blocks, old.n + new.n, old.loss + new.loss, new.n_outputs)
            roles[role] = new
            bar.update()
    return roles


def check_seen(N: int, roles: dict[str, DataFactors], disjoint: bool) -> None:
    """Raise if more data were seen than there are training data.

    Args:
        N: Number of training data.
        roles: Totals per role.
        disjoint: Whether the roles are known to share no datum.

    Raises:
        ValueError: If the roles hold more data (together if disjoint, else one of them) than N.

    Example:
        >>> import torch
        >>> check_seen(2, {"directions": DataFactors([], 2, torch.zeros(()), 1)}, disjoint=True)
    """
    counts = {name: role.n for name, role in roles.items()}
    seen = sum(counts.values()) if disjoint else max(counts.values())
    if seen > N:
        raise ValueError(
            f"Expected `n_data` of at least {seen}, the number of data seen ({counts}), got {N}. "
            "Remedy: pass the number of data in the whole training set as `n_data`."
        )


def scaled_loss(roles: dict[str, DataFactors], N: int) -> Tensor:
    """Loss of all N training data, from the data seen in any role.

    Args:
        roles: Totals per role.
        N: Number of training data.

    Returns:
        ``N (loss_1 + loss_2) / (M_1 + M_2)``.

    Example:
        >>> import torch
        >>> float(scaled_loss({"directions": DataFactors([], 2, torch.tensor(3.0), 1)}, 10))
        15.0
    """
    seen = sum(role.n for role in roles.values())
    return sum(role.loss for role in roles.values()) * (N / seen)


def fit_factors(
    roles: dict[str, DataFactors],
    N: int,
    names: Sequence[str],
    past: tuple[Fitted, int] | None = None,
) -> Fitted:
    r"""Scale both roles to N data, decompose the directions, re-evaluate along them.

    .. math:: \tilde\lambda = \mathrm{diag}(U^\top K_2 U), \qquad K_1 = U \Lambda U^\top,

    factor by factor, with :math:`K_1, K_2` the blocks of both roles times N / M. Data of an earlier
    fit that stood for N' are merged into their role first.

    Args:
        roles: Totals of the directions and, unless nothing is to be re-evaluated, the curvatures.
        N: Number of training data that each role stands for.
        names: One name per block, for error messages.
        past: An earlier fit to add to, with the number of data it stood for.

    Returns:
        The decomposition, eigenvectors in the factors' dtype and eigenvalues in float64.

    Example:
        >>> import torch
        >>> zero = torch.zeros(())
        >>> roles = {
        ...     "directions": DataFactors([[torch.eye(2)]], 1, zero, 2),
        ...     "curvatures": DataFactors([[torch.diag(torch.tensor([1.0, 3.0]))]], 1, zero, 2),
        ... }
        >>> fit_factors(roles, N=10, names=["bias"]).lam_tilde[0][0].tolist()
        [10.0, 30.0]
    """
    scaled = {name: rescale(role.blocks, N / role.n) for name, role in roles.items()}
    if past is not None:
        old, n_old = past
        before = {DIRECTIONS: rebuild(old.Q, old.lam), CURVATURES: old.curvatures}
        scaled = {role: merge(before[role], n_old, new, N) for role, new in scaled.items()}
    directions, curvatures = scaled[DIRECTIONS], scaled.get(CURVATURES, [])
    dtype = roles[DIRECTIONS].blocks[0][0].dtype
    Q, lam = decompose(directions, names)
    lam_tilde = reevaluate(Q, curvatures, names) if curvatures else lam
    Q = [[Q_f.to(dtype) for Q_f in block] for block in Q]
    curvatures = [[factor.to(dtype) for factor in block] for block in curvatures]
    return Fitted(Q, lam, lam_tilde, curvatures)
