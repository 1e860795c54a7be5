"""A thousand classes: what fits and predictions cost over bare passes, and in memory.

python -m examples.benchmarks.many_classes                    # ResNet-50, 64 x 64 pixels
python -m examples.benchmarks.many_classes --classes 200 --check   # against the exact way
"""

import argparse
import resource
import warnings
from time import perf_counter

import torch
from torch import Tensor, nn

from examples.large_networks import resnet50
from laplace_debias import Laplace, freeze_unsupported, linearized_predictive


def timed(call) -> tuple[float, object]:  # noqa: ANN001
    """Seconds and result of one call."""
    start = perf_counter()
    result = call()
    return perf_counter() - start, result


def network(n_classes: int, small: bool) -> nn.Module:
    """A ResNet-50 with random weights, or a tiny stand-in; normalisations are frozen."""
    torch.manual_seed(0)
    if small:
        net: nn.Module = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(32, n_classes),
        )  # fmt: skip
    else:
        net = resnet50(n_classes)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
    freeze_unsupported(net)
    return net.eval()


def run(n_classes: int, size: int, n: int, small: bool = False, check: bool = False) -> dict:
    """Fit on two mini-batches, predict n images, and compare with bare passes."""
    net = network(n_classes, small)
    generator = torch.Generator().manual_seed(0)

    def batch(m: int) -> tuple[Tensor, Tensor]:
        X = torch.randn(m, 3, size, size, generator=generator)
        return X, torch.randint(n_classes, (m,), generator=generator)

    x = batch(n)[0]
    with torch.no_grad():
        net(x[:2])
        bare, f = timed(lambda: net(x))
        scale = 15 / f.std()  # random weights are undecided; a trained network is not
        for module in net.modules():
            if isinstance(module, nn.Linear) and module.out_features == n_classes:
                module.weight *= scale
    la = Laplace(net, "classification", "all", "kron", debias=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit, _ = timed(lambda: la.fit(batch(8), curvature_loader=batch(8), n_data=1_000_000))
    la.prior_precision = 1e4
    first, _ = timed(lambda: la(x))
    again, _ = timed(lambda: la(x))
    found = {"forward": bare, "fit, 2 x 8": fit, "la(x), first": first, "la(x)": again}
    for name, seconds in found.items():
        print(f"{name:<14}{seconds:8.2f} s {seconds / bare:8.1f} forward passes")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.1f} GB; {la.fit_cost}")
    if check:
        few = x[:2]
        exact = linearized_predictive(la, few, diagonal_output=True)
        top = linearized_predictive(la, few, diagonal_output=True, method="top")
        p = exact.mean.softmax(-1)
        ratio = (top.covariance / exact.covariance).sqrt()
        off = (p * (ratio - 1).abs()).sum(-1).mean()
        found["off"] = float(off)
        print(f"standard deviations, weighted by probability: off by {off:.2%} on average")
    return found


def main(argv: list[str] | None = None) -> dict:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--small", action="store_true", help="a tiny network")
    parser.add_argument("--check", action="store_true", help="compare with the exact variances")
    args = parser.parse_args(argv)
    return run(args.classes, args.size, args.images, args.small, args.check)


if __name__ == "__main__":
    main()
