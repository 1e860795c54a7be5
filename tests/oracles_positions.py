"""Posteriors of networks with one categorical per position, dense and in float64.

Everything is read off explicit Jacobians of all outputs: of a layer's own outputs by adding zeros
to them, of the parameters by ``jacrev``; the loss is PyTorch's, with its own ``ignore_index``.
"""

import torch
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn import functional as F

IGNORED = -100


def loss_of(f, y, ignore_index=IGNORED, **options):
    """Cross-entropy of one datum, summed over the positions that count."""
    f = f.movedim(-1, 0) if f.ndim == 2 else f  # tokens: classes first, as PyTorch wants them
    return F.cross_entropy(f[None], y[None], reduction="sum", ignore_index=ignore_index, **options)


def output_hessian(f, y, **options):
    """Hessian ``[F, F]`` of a datum's loss with respect to all its outputs, by autograd."""
    H = torch.autograd.functional.hessian(lambda v: loss_of(v, y, **options), f)
    return H.reshape(f.numel(), f.numel())


def input_rows(layer, a):
    """Input rows ``[positions, d_in]`` of a linear layer or a convolution, for one datum."""
    if isinstance(layer, nn.Linear):
        return a.reshape(-1, a.shape[-1])
    return F.unfold(a, layer.kernel_size, layer.dilation, layer.padding, layer.stride)[0].T


def kfac(model, X, y, weights=None, **options):
    """K-FAC-expand blocks: B sums, A averages, over data and the layer's positions."""
    blocks, weights = {}, torch.ones(len(X)) if weights is None else weights
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear | nn.Conv2d):
            continue
        B, rows = 0.0, []
        for x, target, w in zip(X, y, weights, strict=True):
            seen = {}

            def outputs(zeros, x=x, seen=seen, layer=layer):
                def hook(_, args, out):
                    seen["a"] = args[0].detach()
                    return out if zeros is None else out + zeros

                handle = layer.register_forward_hook(hook)
                try:
                    return model(x[None])[0]
                finally:
                    handle.remove()

            shape = layer_shape(model, layer, x)
            f = outputs(None).detach()
            J = jacrev(lambda z, o=outputs: o(z).flatten())(torch.zeros(shape, dtype=x.dtype))
            J = J[:, 0]  # [F, *positions, d_out], or [F, d_out, *positions]
            J = J if isinstance(layer, nn.Linear) else J.movedim(1, -1)
            J = J.reshape(len(J), -1, J.shape[-1])  # [F, positions, d_out]
            H = w * output_hessian(f, target, **options)
            B = B + torch.einsum("fti,fg,gtj->ij", J, H, J).detach()
            rows.append(input_rows(layer, seen["a"]))
        rows, B = torch.cat(rows), B.contiguous()
        blocks[f"{name}.weight"] = [B, rows.T @ rows / len(rows)]
        if layer.bias is not None:
            blocks[f"{name}.bias"] = [B]
    return {name: blocks[name] for name, _ in model.named_parameters()}


def layer_shape(model, layer, x):
    """Shape of a layer's output for one datum."""
    found = []
    handle = layer.register_forward_hook(lambda _, __, out: found.append(out.shape))
    model(x[None])
    handle.remove()
    return found[0]


def jacobian(model, x):
    """Jacobian ``[F, P]`` of one datum's outputs, position by position with classes last."""
    theta = {name: p.detach() for name, p in model.named_parameters()}

    def flat(theta):
        f = functional_call(model, theta, (x[None],))[0]
        return (f if f.ndim == 2 else f.movedim(0, -1)).flatten()

    J = jacrev(flat)(theta)
    return torch.cat([J[name].flatten(1) for name in theta], dim=1)


def ggn(model, X, y, **options):
    """The full GGN ``[P, P]``, summed over data and positions that count."""
    total = 0.0
    for x, target in zip(X, y, strict=True):
        f = model(x[None])[0].detach()
        H = output_hessian(f, target, **options)
        if f.ndim == 3:  # rows and columns with classes last, as the Jacobian's
            order = torch.arange(f.numel()).reshape(f.shape).movedim(0, -1).flatten()
            H = H[order][:, order]
        J = jacobian(model, x)
        total = total + J.T @ H @ J
    return total


def covariances(model, X, precision, C):
    """Covariances ``[n, positions, C, C]`` of the outputs of each position."""
    found = []
    for x in X:
        J = jacobian(model, x)
        S = (J @ torch.linalg.solve(precision, J.T)).reshape(len(J) // C, C, len(J) // C, C)
        found.append(torch.stack([S[t, :, t] for t in range(len(S))]))
    return torch.stack(found)
