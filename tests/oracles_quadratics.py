"""Dense float64 oracles for the quadratics: matrices by definition, solvers by the book."""

import torch
from torch import nn
from torch.func import functional_call, hessian, jacrev


def flat_loss(model, loss, X, y, l2=0.0, regularize_biases=True):
    """Return the regularised loss as a function of the flat parameters, and the parameters."""
    named = dict(model.named_parameters())
    sizes = [p.numel() for p in named.values()]
    mask = torch.cat(
        [
            torch.full((p.numel(),), 1.0 if regularize_biases or not n.endswith("bias") else 0.0)
            for n, p in named.items()
        ]
    ).double()

    def unflatten(theta):
        parts = theta.split(sizes)
        return {n: part.view(p.shape) for (n, p), part in zip(named.items(), parts, strict=True)}

    def outputs(theta):
        return functional_call(model, unflatten(theta), (X,))

    def value(theta):
        return loss(outputs(theta), y) + 0.5 * l2 * (mask * theta**2).sum()

    theta = torch.cat([p.detach().flatten() for p in named.values()])
    return value, outputs, theta, l2 * mask


def dense_hessian(model, loss, X, y, **kwargs):
    """Hessian of the regularised loss, [P, P]."""
    value, _, theta, _ = flat_loss(model, loss, X, y, **kwargs)
    return hessian(value)(theta)


def dense_ggn(model, loss, X, y, **kwargs):
    """Mean of J^T Lambda J over the data, plus the regulariser, [P, P]."""
    _, outputs, theta, diagonal = flat_loss(model, loss, X, y, **kwargs)
    J = jacrev(outputs)(theta)  # [N, C, P]
    f = outputs(theta)
    if isinstance(loss, nn.CrossEntropyLoss):
        p = f.softmax(-1)
        Lambda = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    else:
        Lambda = 2 / f.shape[1] * torch.eye(f.shape[1]).to(f).expand(len(f), -1, -1)
    return torch.einsum("nci,ncd,ndj->ij", J, Lambda, J) / len(f) + torch.diag(diagonal)


def dense_kfac(model, X):
    """K-FAC of the mean cross-entropy for Sequential(Linear, Tanh, Linear), separate biases."""
    first, _, second = model
    hidden = torch.tanh(first(X))
    p = second(hidden).softmax(-1)
    Lambda = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]  # [N, C, C]
    back = second.weight * (1 - hidden**2)[:, None, :]  # d outputs / d pre-activations, [N, C, H]
    blocks = []
    for inputs, B in (
        (X, torch.einsum("nch,ncd,ndk->hk", back, Lambda, back) / len(X)),
        (hidden, Lambda.mean(0)),
    ):
        blocks += [torch.kron(B.contiguous(), (inputs.T @ inputs / len(X)).contiguous()), B]
    return torch.block_diag(*blocks).detach()


def book_cg(H, g, iterations):
    """Textbook CG: iterates, unit directions, magnitudes, all as lists."""
    x, s = torch.zeros_like(g), -g
    r = g
    iterates, directions, magnitudes = [x], [], []
    for _ in range(iterations):
        d = s / s.norm()
        tau = -(d @ r) / (d @ H @ d)
        x = x + tau * d
        new = H @ x + g
        s = -new + (new @ new) / (r @ r) * s
        r = new
        iterates.append(x)
        directions.append(d)
        magnitudes.append(tau)
    return iterates, directions, magnitudes


def naive_debiased_cg(H, g, H_tilde, g_tilde, iterations):
    """Debiased CG with two products with the second curvature in every iteration."""
    _, directions, _ = book_cg(H, g, iterations)
    x = torch.zeros_like(g)
    iterates, magnitudes = [x], []
    for d in directions:
        slope = d @ (H_tilde @ x + g_tilde)
        curvature = d @ (H_tilde @ d)
        magnitudes.append(-slope / curvature)
        x = x + magnitudes[-1] * d
        iterates.append(x)
    return iterates, magnitudes


def orthonormal(P, K, seed=0, dtype=torch.float64):
    """K orthonormal columns of length P, from a seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(P, K, generator=generator, dtype=torch.float64)).Q.to(dtype)
