"""Large networks at real size: eigenvectors and CG of their quadratics, or fits, in bounded memory.

Random weights and random images: what is measured is what a product costs, and that memory does not
grow with the number of images or of products. Everything is kept in ``outputs/real_size-NETWORK``;
a run that was interrupted goes on with the product after the last one, and its times are those of
the products it made itself. On a machine that does other work too, only the CPU's time says much.

    python -m examples.benchmarks.real_size wrn-40-4 --progress-bar
    python -m examples.benchmarks.real_size resnet50 --image-size 64 --progress-bar

With ``--fit``: a two-batch fit on 2 x ``images`` images with sampled output Hessians, and a
prediction by 40 samples, against the bare forward and backward passes of the same images and the
eigendecompositions of the same sizes, each timed alone in the same process, in CPU seconds.

    export OMP_NUM_THREADS=1
    python -m examples.benchmarks.real_size resnet50 --fit --images 32 --image-size 224
    python -m examples.benchmarks.real_size vit --fit --images 32 --image-size 256
    python -m examples.benchmarks.real_size wrn-40-4-100 --fit --images 32
"""

import argparse
import json
import resource
import time
import warnings
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from examples.large_networks import VisionTransformer, resnet50, settle_norms, wide_resnet
from examples.networks import all_cnn_c
from laplace_debias import Laplace
from laplace_debias.debias import eigen
from laplace_debias.kfac import thin
from laplace_debias.quadratics import Quadratic, RecordedProducts, cg, top_eigenvectors

NETWORKS = {
    "allcnnc": all_cnn_c,
    "wrn-40-4": wide_resnet,
    "wrn-40-4-100": lambda: wide_resnet(n_classes=100),
    "wrn-10-1": lambda: wide_resnet(10, 1),
    "resnet50": resnet50,
    "resnet-small": lambda: resnet50(200, (1, 1), 8),
    "vit": VisionTransformer,
    "vit-small": lambda: VisionTransformer(10, 32, 16, 1, heads=2),
}
N_SAMPLES = 40


class Timed(RecordedProducts):
    """Recorded products that note the time of those that are computed, by clock and by CPU."""

    seconds = cpu_seconds = 0.0

    def __matmul__(self, V):
        """Multiply, and measure the time unless the product came from a file."""
        before, start, cpu_start = self.n_products, time.perf_counter(), time.process_time()
        HV = super().__matmul__(V)
        if self.n_products > before:
            self.seconds += time.perf_counter() - start
            self.cpu_seconds += time.process_time() - cpu_start
        return HV


def peak_memory() -> float:
    """Return the most memory that this process has held so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2


def build(name: str, images: int, size: int) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    """Return a network with random weights, and random images with labels."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    X = torch.randn(images, 3, size, size)
    settle_norms(model, X[:16])
    with torch.no_grad():
        n_classes = model(X[:1]).shape[1]
    return model, (X, torch.randint(n_classes, (images,)))


def measure(args) -> dict:
    """Compute eigenvectors and CG steps, and say what they took."""
    model, data = build(args.network, args.images, args.image_size)
    folder = args.out / f"real_size-{args.network}"
    options = {"l2": 1e-3, "chunk_size": args.chunk_size, "max_columns": 1}
    quadratic = Quadratic(model, nn.CrossEntropyLoss(), data, **options)
    P, before = quadratic.shape[0], peak_memory()
    row = {
        "network": args.network,
        "parameters": P,
        "images": args.images,
        "image_size": args.image_size,
        "chunk_size": args.chunk_size,
        "memory_before_gb": round(before, 2),
    }
    solvers = {
        "eigenvectors": lambda H: top_eigenvectors(H, args.k, block_size=1, tol=args.tol, probes=0),
        "cg": lambda H: cg(H, max_iter=args.cg_steps, rtol=0.0, keep_directions=False),
    }
    for name, solve in solvers.items():
        key = f"{args.images}-{args.image_size}-{args.chunk_size}"
        products = Timed(quadratic, folder / f"{name}-{key}", progress_bar=args.progress_bar)
        result = solve(products)
        row[f"{name}_products"] = result.n_products
        row[f"{name}_products_now"] = products.n_products
        now = max(products.n_products, 1)
        row[f"{name}_seconds_per_product"] = round(products.seconds / now, 2)
        row[f"{name}_cpu_seconds_per_product"] = round(products.cpu_seconds / now, 2)
        row["peak_memory_gb"] = round(peak_memory(), 2)
        if name == "eigenvectors":
            row["eigenvalues"] = result.values.tolist()
            row["residuals"] = result.residuals.tolist()
        else:
            row["cg_residuals"] = result.residuals.tolist()
    row["vector_mb"] = round(4 * P / 1024**2, 1)
    return row


def cpu_seconds(call) -> float:
    """CPU seconds of a call; one call, for those of minutes."""
    start = time.process_time()
    call()
    return time.process_time() - start


def bare_passes(model: nn.Module, batches) -> float:
    """CPU seconds of the forward and backward passes of mini-batches, nothing else."""

    def run() -> None:
        for X, y in batches:
            nn.functional.cross_entropy(model(X), y).backward()
            model.zero_grad()

    model(batches[0][0][:1])  # the first call of a process is dearer
    return cpu_seconds(run)


def decompositions_alone(la) -> tuple[float, int]:
    """CPU seconds of eigendecompositions of the sizes that a fit needed, and their number.

    A basis ``[d, r]`` of few rows is that of r rows; a full one of a d x d matrix.
    """
    bases = {id(Q): Q.shape for block in thin.bases_of(la.H) for Q in block}
    seconds = 0.0
    for d, r in bases.values():
        X = torch.randn(r if r < d else 2 * d, d)
        M = None if r < d else X.T @ X
        seconds += cpu_seconds(
            lambda X=X, M=M: eigen.eigh_rows(X) if M is None else eigen.eigh_float64(M)
        )
    return seconds, len(bases)


def measure_fit(args) -> dict:
    """Fit on two mini-batches, predict, and say where the time goes."""
    model, (X, y) = build(args.network, 2 * args.images, args.image_size)
    batches = list(zip(X.split(args.images), y.split(args.images), strict=True))
    before = peak_memory()
    row = {
        "network": args.network,
        "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "images": f"2 x {args.images}",
        "image_size": args.image_size,
        "memory_before_gb": round(before, 2),
        "bare_passes": bare_passes(model, batches),
        "memory_of_bare_passes_gb": round(peak_memory(), 2),
    }
    la = Laplace(model, "classification", "all", "kron", debias=True, fisher="mc")

    def fit() -> None:
        # stages by the CPU's clock, as everything here
        clock = mock.patch("laplace_debias.kfac.counts.time.perf_counter", time.process_time)
        with warnings.catch_warnings(), clock:
            warnings.simplefilter("ignore")
            la.fit(batches, n_data=1_000_000)

    row["fit"] = cpu_seconds(fit)
    row["peak_memory_of_fit_gb"] = round(peak_memory(), 2)
    row |= {f"fit_{stage}": seconds for stage, seconds in la.fit_cost.seconds.items()}
    row["decompositions_alone"], row["n_decompositions"] = decompositions_alone(la)
    row["bar"] = 4 * row["bare_passes"] + 2 * row["decompositions_alone"]
    row["fit_over_bar"] = row["fit"] / row["bar"]
    la.prior_precision, la.predictive_method = 1e4, "samples"
    few = X[: args.predict]
    generator = torch.Generator().manual_seed(0)
    row["forward_of_predicted"] = cpu_seconds(torch.no_grad()(lambda: model(few)))
    row["prediction_by_40_samples"] = cpu_seconds(
        lambda: la(few, n_samples=N_SAMPLES, link_approx="mc", generator=generator)
    )
    row["peak_memory_gb"] = round(peak_memory(), 2)
    return {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}


def main(argv: list[str] | None = None) -> dict:
    """Print what was measured and write it to a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("network", choices=tuple(NETWORKS))
    parser.add_argument("--images", type=int, default=512)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--chunk-size", type=int, default=16, help="images per pass")
    parser.add_argument("--k", type=int, default=2, help="number of eigenvectors")
    parser.add_argument("--tol", type=float, default=1e-2, help="residual of the eigenvectors")
    parser.add_argument("--cg-steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("outputs"))
    parser.add_argument("--progress-bar", action="store_true")
    parser.add_argument("--fit", action="store_true", help="a fit instead of the quadratics")
    parser.add_argument("--predict", type=int, default=4, help="images to predict after a fit")
    args = parser.parse_args(argv)
    row = measure_fit(args) if args.fit else measure(args)
    for name, value in row.items():
        print(f"{name:>32}: {value}")
    args.out.mkdir(parents=True, exist_ok=True)
    kind = "real_size-fit" if args.fit else "real_size"
    (args.out / f"{kind}-{args.network}.json").write_text(json.dumps(row, indent=2))
    return row


if __name__ == "__main__":
    main()
