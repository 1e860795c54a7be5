r"""On what scale is each K-FAC of a convolutional network?

    python -m examples.cifar10.scale --data DATA --weights WEIGHTS --n-images 64

For some training images, the trace of each block-diagonal K-FAC as a multiple of the GGN's,

.. math::
    \frac{\sum_l \mathrm{tr}(B_l) \, \mathrm{tr}(A_l)}
         {\sum_n \mathrm{tr}(J_n^\top H_n J_n)},

with exact vectors. One means that the approximation is on the GGN's own scale; a prior precision
that means much beside one approximation means little beside another.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

from examples.cifar10.data import load_cifar, normalise
from examples.cifar10.laplace_experiment import load_model
from laplace_debias.kfac.engine import kfac_factors
from laplace_debias.kfac.few_rows import KFAC_APPROXES


def ggn_trace(model: nn.Module, X: Tensor) -> float:
    r"""Trace of the cross-entropy's GGN, summed over data, one backward pass per datum and vector.

    With :math:`H = \mathrm{diag}(p) - p p^\top = S S^\top`, :math:`S = \mathrm{diag}(\sqrt p) - p
    \sqrt p^\top`, the trace of :math:`J^\top H J` is :math:`\sum_c |J^\top s_c|^2`.

    Args:
        model: The network; parameters without gradients do not count.
        X: Inputs ``[n, ...]``.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    total = 0.0
    for x in X:
        f = model(x.unsqueeze(0)).squeeze(0)
        p = torch.softmax(f.detach(), dim=0)
        S = p.sqrt().diag() - torch.outer(p, p.sqrt())  # [C, C], a vector per column
        for s in S.T:
            grads = torch.autograd.grad(f, params, s, retain_graph=True)
            total += sum(float(g.square().sum()) for g in grads)
    return total


def kfac_traces(model: nn.Module, X: Tensor, y: Tensor) -> dict[str, float]:
    """Trace of each K-FAC with exact vectors, summed over the data, by name."""
    traces = {}
    for kfac_approx in KFAC_APPROXES:
        factors = kfac_factors(
            model, X, y, likelihood="classification", kfac_approx=kfac_approx, fisher="exact"
        )
        blocks = [[float(factor.trace()) for factor in block] for block in factors.blocks]
        traces[kfac_approx] = sum(block[0] * (block[1:] or [1.0])[0] for block in blocks)
    return traces


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Print and return the ratios by approximation."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder with CIFAR-10")
    parser.add_argument("--weights", type=Path, required=True, help="state dict of the network")
    parser.add_argument("--model", default="allcnnc", help="allcnnc or convnet-d-w")
    parser.add_argument("--validation-size", type=int, default=10_000)
    parser.add_argument("--n-images", type=int, default=64, help="the first training images")
    args = parser.parse_args(argv)
    cifar = load_cifar(args.data, validation_size=args.validation_size)
    model = load_model(args.model, args.weights, cifar.n_classes).double()
    few = cifar.train.first(args.n_images)
    X = normalise(few.images, torch.float64)
    exact = ggn_trace(model, X)
    ratios = {name: t / exact for name, t in kfac_traces(model, X, few.labels).items()}
    for name, ratio in ratios.items():
        print(f"{name:<10}{ratio:>10.3g} times the GGN's trace")
    return ratios


if __name__ == "__main__":
    main()
