"""The quadratics at real size: eigenvectors and CG of large networks, in bounded memory.

Random weights and random images: what is measured is what a product costs, and that memory does not
grow with the number of images or of products. Everything is kept in ``outputs/real_size-NETWORK``;
a run that was interrupted goes on with the product after the last one, and its times are those of
the products it made itself. On a machine that does other work too, only the CPU's time says much.

    python -m examples.benchmarks.real_size wrn-40-4 --progress-bar
    python -m examples.benchmarks.real_size resnet50 --image-size 64 --progress-bar
"""

import argparse
import json
import resource
import time
from pathlib import Path

import torch
from torch import nn

from examples.large_networks import resnet50, settle_norms, wide_resnet
from examples.networks import all_cnn_c
from laplace_debias.quadratics import Quadratic, RecordedProducts, cg, top_eigenvectors

NETWORKS = {
    "allcnnc": all_cnn_c,
    "wrn-40-4": wide_resnet,
    "wrn-10-1": lambda: wide_resnet(10, 1),
    "resnet50": resnet50,
}


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
    args = parser.parse_args(argv)
    row = measure(args)
    for name, value in row.items():
        print(f"{name:>32}: {value}")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"real_size-{args.network}.json").write_text(json.dumps(row, indent=2))
    return row


if __name__ == "__main__":
    main()
