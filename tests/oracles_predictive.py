"""Dense float64 oracles for the linearised predictive; they share no code with the library."""

from __future__ import annotations

import copy

import torch
from laplace.baselaplace import KronLaplace
from laplace.utils.matrix import Kron, KronDecomposed
from torch import Tensor, nn
from torch.func import functional_call, jacrev


def random_laplace(
    model: nn.Module, n_outputs: int, likelihood: str = "classification", seed: int = 0, **kwargs
) -> KronLaplace:
    """A Laplace approximation with random orthogonal eigenvectors and positive eigenvalues.

    No fit: the predictive must be right for any posterior of this form, whatever the backend can
    fit.
    """
    generator = torch.Generator().manual_seed(seed)
    la = KronLaplace(model, likelihood, **kwargs)
    vectors, values = [], []
    for p in la.params:
        sizes = [p.shape[0]] if p.ndim == 1 else [p.shape[0], p[0].numel()]
        if p.numel() == 1:
            sizes = [1]
        like = {"dtype": p.dtype, "generator": generator}
        vectors.append([torch.linalg.qr(torch.randn(d, d, **like))[0] for d in sizes])
        values.append([4 * torch.rand(d, **like) for d in sizes])
    la.H = KronDecomposed(vectors, values)
    la.H_facs = Kron([])
    la.n_outputs, la.n_data = n_outputs, 50
    la.mean = nn.utils.parameters_to_vector(la.params).detach()
    return la


def dense_jacobian(model: nn.Module, x, params: list[Tensor]) -> Tensor:
    """Explicit Jacobian ``[n, C, P]`` at eval mode, one datum at a time."""
    names = {id(p): name for name, p in model.named_parameters()}
    theta = {names[id(p)]: p.detach() for p in params}
    twin = copy.deepcopy(model).eval()
    rows = []
    for i in range(len(x)):
        J = jacrev(lambda t, i=i: functional_call(twin, t, (x[i : i + 1],))[0])(theta)
        rows.append(torch.cat([J[names[id(p)]].flatten(1) for p in params], dim=1))
    return torch.stack(rows)


def dense_precision(la: KronLaplace, params: list[Tensor], delta) -> Tensor:
    """Explicit ``h H + delta I`` from Kronecker products of dense factors."""
    blocks = []
    delta = torch.as_tensor(delta, dtype=torch.float64).expand(len(params))
    h = 1 / (float(la.sigma_noise) ** 2 * la.temperature)
    for Qs, lams, p, d in zip(la.H.eigenvectors, la.H.eigenvalues, params, delta, strict=True):
        factors = [(Q @ torch.diag(lam) @ Q.T).double() for Q, lam in zip(Qs, lams, strict=True)]
        H = factors[0] if len(factors) == 1 else torch.kron(factors[0], factors[1])
        blocks.append(h * H + d * torch.eye(p.numel(), dtype=torch.float64))
    return torch.block_diag(*blocks)


def dense_covariance(la: KronLaplace, x, delta) -> Tensor:
    """Joint covariance ``[n, C, n, C]`` of all outputs of all data."""
    J = dense_jacobian(la.model, x, la.params).double()
    n, C, P = J.shape
    J = J.reshape(n * C, P)
    cov = J @ torch.linalg.inv(dense_precision(la, la.params, delta)) @ J.T
    return cov.reshape(n, C, n, C)


def marginal(cov: Tensor) -> Tensor:
    """Covariances ``[n, C, C]`` of the single data from the joint one."""
    return torch.stack([cov[i, :, i] for i in range(len(cov))])
