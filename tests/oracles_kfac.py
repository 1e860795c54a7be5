"""K-FAC factors by explicit loops, for the tests of the hook-based ones."""

import torch
from torch import nn
from torch.nn import functional as F


def rows_of(layer, x):
    """Input rows `[n, positions, d_in]` of a layer, read by unit kernels."""
    if isinstance(layer, nn.Linear):
        return x.reshape(len(x), -1, x.shape[-1])
    # The convolution with the unit kernel e_j reads entry j of every patch.
    d_in = layer.weight[0].numel()
    units = torch.eye(d_in, dtype=x.dtype).reshape(d_in, *layer.weight.shape[1:])
    rows = 0
    for part in x.chunk(layer.groups, dim=1):
        probe = type(layer)(
            part.shape[1], d_in, layer.kernel_size, layer.stride, layer.padding, layer.dilation,
            bias=False, padding_mode=layer.padding_mode,
        )  # fmt: skip
        probe.weight = nn.Parameter(units)
        rows = rows + probe(part).detach().flatten(2).transpose(1, 2) / layer.groups
    return rows


def oracle(model, x, y, likelihood, weights, fisher="exact"):
    """Factors datum by datum, class by class, position by position, in explicit loops."""
    kinds = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    layers = [m for m in model.modules() if isinstance(m, kinds)]
    layers = [m for m in layers if any(p.requires_grad for p in m.parameters())]
    inputs, outputs = {m: [] for m in layers}, {m: [] for m in layers}

    def hook(module, args, output):
        inputs[module].append(args[0].detach().clone())
        outputs[module].append(output)
        return output.clone()

    handles = [m.register_forward_hook(hook) for m in layers]
    training = model.training
    model.eval()
    B = {m: 0.0 for m in layers}
    A = {m: [] for m in layers}
    for n in range(len(y)):
        for m in layers:
            inputs[m].clear(), outputs[m].clear()
        f = model(x[n : n + 1])
        if fisher == "exact" and likelihood == "classification":
            loss = lambda f_n, n=n: F.cross_entropy(f_n[None], y[n : n + 1])  # noqa: E731
            H = torch.autograd.functional.hessian(loss, f[0].detach())
        elif fisher == "exact":
            H = torch.eye(f.shape[1], dtype=f.dtype)
        elif likelihood == "classification":
            r = f[0].detach().softmax(0) - F.one_hot(y[n], f.shape[1])
            H = torch.outer(r, r)
        else:
            r = f[0].detach() - y[n]
            H = 2 * torch.outer(r, r)
        for m in layers:
            A[m] += [row for a in inputs[m] for row in rows_of(m, a)[0]]
            for s in outputs[m]:
                J = [torch.autograd.grad(f_c, s, retain_graph=True)[0][0] for f_c in f[0]]
                J = torch.stack(J)  # [C, *positions, d_out] or [C, d_out, *positions]
                J = J.flatten(2).mT if s.ndim > 2 and not isinstance(m, nn.Linear) else J
                J = J.reshape(len(J), -1, J.shape[-1])
                B[m] = B[m] + weights[n] * torch.einsum("cti,cd,dtj->ij", J, H, J)
    for handle in handles:
        handle.remove()
    model.train(training)
    blocks = []
    for m in layers:
        own = {name for name, p in m.named_parameters(recurse=False) if p.requires_grad}
        if "weight" in own:
            rows = torch.stack(A[m])
            blocks.append((B[m], rows.T @ rows / len(rows)))
        if "bias" in own:
            blocks.append((B[m],))
    return blocks
