"""Slow, dense float64 oracles that share no code with the library."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


def output_hessian(f: Tensor, y: Tensor, likelihood: str, fisher: str) -> Tensor:
    """Curvature ``[C, C]`` of one datum's negative log likelihood in its outputs ``[C]``."""
    if fisher == "ef":
        p = torch.softmax(f, -1) if likelihood == "classification" else f
        target = F.one_hot(y, len(f)).to(f) if likelihood == "classification" else y
        gradient = p - target
        # laplace-torch: of the loss |f - y|^2, times 1/2
        scale = 1.0 if likelihood == "classification" else 2.0
        return scale * torch.outer(gradient, gradient)
    if likelihood == "regression":
        return torch.eye(len(f), dtype=f.dtype)
    p = torch.softmax(f, -1)
    return torch.diag(p) - torch.outer(p, p)


def layer_io(model: nn.Module, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs ``[T, d_in]``, output Jacobians ``[T, C, d_out]`` and outputs ``[C]`` of one datum."""
    store = {}

    def capture(module, inputs, output):
        store["a"] = inputs[0].detach()
        store["z"] = output

    handle = layer.register_forward_hook(capture)
    with torch.enable_grad():
        f = model(x.unsqueeze(0))[0]
    handle.remove()
    z = store["z"]
    rows = [torch.autograd.grad(f[c], z, retain_graph=True)[0] for c in range(len(f))]
    J = torch.stack(rows)  # [C, 1, ...]
    if isinstance(layer, nn.Linear):
        a = store["a"].reshape(-1, layer.in_features)
        g = J.reshape(len(f), -1, layer.out_features).permute(1, 0, 2)
    else:
        a = _patches(layer, store["a"])
        g = J.flatten(3)[:, 0].permute(2, 0, 1)  # [T, C, d_out]
    return a, g, f.detach()


def _patches(layer: nn.Conv2d, x: Tensor) -> Tensor:
    """Rows of the im2col matrix by plain loops, ``[T, C_in k k]`` (groups stacked as positions)."""
    (kh, kw), (sh, sw), (dh, dw) = layer.kernel_size, layer.stride, layer.dilation
    ph, pw = layer.padding
    x = F.pad(x, (pw, pw, ph, ph))[0]
    rows = []
    for group in x.chunk(layer.groups):
        for i in range(0, x.shape[1] - dh * (kh - 1), sh):
            for j in range(0, x.shape[2] - dw * (kw - 1), sw):
                patch = group[:, i : i + dh * (kh - 1) + 1 : dh, j : j + dw * (kw - 1) + 1 : dw]
                rows.append(patch.reshape(-1))
    return torch.stack(rows)


def kfac(
    model: nn.Module, X: Tensor, y: Tensor, likelihood: str, fisher: str = "ggn"
) -> dict[str, list[Tensor]]:
    """K-FAC-expand blocks by the definition: B sums, A averages over data and positions."""
    model = model.eval()
    frozen = [p for p in model.parameters() if not p.requires_grad]
    for p in frozen:
        p.requires_grad_(True)
    blocks = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, (nn.Linear, nn.Conv2d)):
            continue
        A, B, rows = 0.0, 0.0, 0
        for x, target in zip(X, y, strict=True):
            a, g, f = layer_io(model, layer, x)
            Lam = output_hessian(f, target, likelihood, fisher)
            A, rows = A + a.T @ a, rows + len(a)
            B = B + sum(g_t.T @ Lam @ g_t for g_t in g)
        blocks[f"{name}.weight"] = [B, A / rows]
        if layer.bias is not None:
            blocks[f"{name}.bias"] = [B]
    for p in frozen:
        p.requires_grad_(False)
    return {n: blocks[n] for n, p in model.named_parameters() if p.requires_grad}


def block_diagonal(blocks: list[Tensor]) -> Tensor:
    """Dense block-diagonal matrix."""
    return torch.block_diag(*blocks)


def dense(blocks: dict[str, list[Tensor]], scale: float = 1.0) -> Tensor:
    """The K-FAC matrix ``[P, P]`` times ``scale``."""
    return block_diagonal(
        [scale * (torch.kron(*b) if len(b) == 2 else b[0]) for b in blocks.values()]
    )


def eigenvectors(blocks: dict[str, list[Tensor]]) -> Tensor:
    """Orthogonal ``U`` ``[P, P]`` of a K-FAC matrix, by numpy, from its factors."""
    parts = []
    for block in blocks.values():
        Qs = [torch.from_numpy(np.linalg.eigh(factor.numpy())[1]) for factor in block]
        parts.append(torch.kron(*Qs) if len(Qs) == 2 else Qs[0])
    return block_diagonal(parts)


def debiased(K1: dict[str, list[Tensor]], K2: dict[str, list[Tensor]], scale: float) -> Tensor:
    """``U diag(diag(U^T K2 U)) U^T`` with the eigenvectors U of K1, dense."""
    U = eigenvectors(K1)
    return U @ torch.diag(torch.diag(U.T @ dense(K2, scale) @ U)) @ U.T
