r"""A thousand classes: what fits and predictions cost over bare passes, and in memory.

Seconds are the process's own (CPU seconds), on one thread.

    python -m examples.benchmarks.many_classes                    # ResNet-50, 64 x 64 pixels
    python -m examples.benchmarks.many_classes --classes 200 --check   # against the exact way
    python -m examples.benchmarks.many_classes --ways top,samples --model MODULE:FUNCTION \
        --name NAME --weights FILE --images FOLDER --size 224     # as in examples.imagenet
"""

import argparse
import resource
import warnings
from pathlib import Path
from time import process_time

import torch
from torch import Tensor, nn

from examples.imagenet import Pictures, named_model
from examples.large_networks import resnet50
from laplace_debias import Laplace, freeze_unsupported, linearized_predictive


def timed(call) -> tuple[float, object]:  # noqa: ANN001
    """CPU seconds and result of one call."""
    start = process_time()
    result = call()
    return process_time() - start, result


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


def decided(net: nn.Module, x: Tensor, n_classes: int) -> None:
    """Make random weights as sure as a trained network is."""
    with torch.no_grad():
        scale = 15 / net(x).std()
        for module in net.modules():
            if isinstance(module, nn.Linear) and module.out_features == n_classes:
                module.weight *= scale


def run(args: argparse.Namespace) -> dict:
    """Fit on two mini-batches, predict n images, and compare with bare passes."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    order = None
    if args.images is not None:
        data = Pictures(args.images, args.size, args.mean, args.std)
        order = iter(torch.randperm(len(data), generator=generator).tolist())
        net = named_model(args.model, args.name, args.weights).eval()
    else:
        net = network(args.classes, args.small)

    def batch(m: int) -> tuple[Tensor, Tensor]:
        if order is not None:
            X, y = zip(*[data[next(order)] for _ in range(m)], strict=True)
            return torch.stack(X), torch.tensor(y)
        X = torch.randn(m, 3, args.size, args.size, generator=generator)
        return X, torch.randint(args.classes, (m,), generator=generator)

    x = batch(args.n)[0]
    if args.images is None:
        decided(net, x, args.classes)

    def bare() -> float:
        with torch.no_grad():
            return timed(lambda: net(x))[0]

    bare()
    la = Laplace(net, "classification", "all", "kron", debias=True, fisher="mc")
    fit, _ = timed(lambda: la.fit(batch(8), curvature_loader=batch(8), n_data=1_000_000))
    la.prior_precision = 1e4
    found = {"forward": bare(), "fit, 2 x 8": fit}
    print(
        f"forward pass of {args.n} {found['forward']:.2f} s, fit on 2 x 8 {fit:.2f} s", flush=True
    )
    for way in args.ways.split(","):
        la.predictive_method = way
        la(x[:2], n_samples=2)  # prepares what does not depend on the data
        before = bare()
        seconds, _ = timed(lambda: la(x, n_samples=args.samples))
        found[way] = 2 * seconds / (before + bare())
        print(f"la(x), {way:<8}{seconds:8.2f} s {found[way]:8.1f} forward passes", flush=True)
    if args.sweep:
        g = torch.Generator().manual_seed(0)
        grid = 1e6 * torch.cat([torch.logspace(-4, 0, 13), torch.tensor([10.0])])
        options = {"diagonal_output": True, "method": "samples", "generator": g}
        options["n_samples"] = args.samples
        one, _ = timed(lambda: linearized_predictive(la, x, [1e4], **options))
        all_of, _ = timed(lambda: linearized_predictive(la, x, grid, **options))
        found["sweep over one"] = all_of / one
        print(f"14 prior precisions by samples: {all_of / one:.2f} times one of them ({one:.1f} s)")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory {peak:.1f} GB; {la.fit_cost}")
    if args.check:
        few = x[:2]
        options = {"diagonal_output": True}
        exact = linearized_predictive(la, few, **options)
        p = exact.mean.softmax(-1)
        for way in ("top", "samples"):
            got = linearized_predictive(la, few, **options, method=way, n_samples=args.samples)
            ratio = (got.covariance / exact.covariance).sqrt()
            found[f"off, {way}"] = float((p * (ratio - 1).abs()).sum(-1).mean())
            print(f"standard deviations, weighted by probability, {way}: "
                  f"off by {found[f'off, {way}']:.2%} on average")  # fmt: skip
    return found


def main(argv: list[str] | None = None) -> dict:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--n", type=int, default=32, help="number of images to predict")
    parser.add_argument("--ways", default="auto", help="top, samples, exact or auto, by commas")
    parser.add_argument("--samples", type=int, default=40, help="number of samples")
    parser.add_argument("--sweep", action="store_true", help="14 prior precisions by samples")
    parser.add_argument("--small", action="store_true", help="a tiny network")
    parser.add_argument("--check", action="store_true", help="compare with the exact variances")
    parser.add_argument("--images", type=Path, help="folder of pictures, see examples.imagenet")
    parser.add_argument("--model")
    parser.add_argument("--name")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--mean", type=float, default=0.45)
    parser.add_argument("--std", type=float, default=0.225)
    args = parser.parse_args(argv)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(args)


if __name__ == "__main__":
    main()
