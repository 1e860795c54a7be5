"""How fast the structured predictive is, as ratios within one run.

Prints a table and writes ``outputs/bench_predictive.json``. laplace-torch's side is the better of
its own ``la(x)`` and of ``la.functional_variance`` of ASDL's Jacobians, each at whichever batch
size is fastest for it. Its cost per grid point does not depend on the point, so a sweep of k
points is k times one of them. Peak memory is read in a fresh process for every entry.

    python -m examples.benchmarks.predictive
    python -m examples.benchmarks.predictive --quick    # seconds: few images, the CNN only
"""

# %%
from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from laplace.baselaplace import KronLaplace
from laplace.curvature import AsdlGGN
from laplace.lllaplace import KronLLLaplace
from laplace.utils.matrix import Kron, KronDecomposed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from examples.networks import resnet20, strided_cnn
from laplace_debias import Laplace
from laplace_debias.evaluation.sweep import sweep_prior_precision
from laplace_debias.predictive.predictor import StructuredPredictor

C = 10


# %% The networks
ROOT = Path(__file__).resolve().parents[2]
NETS = {"cnn": (strided_cnn, (1, 28, 28)), "resnet20": (resnet20, (3, 32, 32))}


def fitted(name: str, dtype: torch.dtype = torch.float32) -> tuple[KronLaplace, tuple[int, ...]]:
    """A Laplace approximation of a random network, fitted on 64 random images."""
    torch.manual_seed(0)
    make, shape = NETS[name]
    model = make().to(dtype)
    x, y = torch.randn(64, *shape, dtype=dtype), torch.randint(C, (64,))
    model(x)  # sets the running statistics of BatchNorm
    la = KronLaplace(model, "classification", backend=AsdlGGN)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=64))
    return la, shape


def grid(k: int) -> Tensor:
    """Make k prior precisions; for k = 1 the one that everything has by default."""
    return torch.logspace(-2, 3, k) if k > 1 else torch.ones(1)


# %% Timing
def seconds(function: Callable[[], object], at_least: float = 1.0, most: int = 7) -> float:
    """Least time of several calls, after one to warm up."""
    function()
    times: list[float] = []
    while len(times) < 2 or (sum(times) < at_least and len(times) < most):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def upstream(la: KronLaplace, shape: tuple[int, ...], sizes: dict[str, list[int]]) -> dict:
    """Seconds per image and grid point of laplace-torch's two ways, at their best batch sizes."""
    ways = {
        "la(x)": lambda x: la(x),
        "functional_variance": lambda x: la.functional_variance(la.backend.jacobians(x)[0]),
    }
    best = {}
    for way, function in ways.items():
        per_image = {}
        for n in sizes[way]:
            x = torch.randn(n, *shape)
            per_image[n] = seconds(lambda f=function, x=x: f(x), 0.5, 4) / n
        n = min(per_image, key=per_image.get)
        best[way] = {"batch_size": n, "seconds_per_image": per_image[n]}
    return best


def backward_passes(model: nn.Module, x: Tensor) -> None:
    """One forward pass and one backward pass per class, with parameter gradients."""
    params = [p for p in model.parameters() if p.requires_grad]
    f = model(x)
    for c in range(C):
        torch.autograd.grad(f[:, c].sum(), params, retain_graph=c + 1 < C)


def errors(name: str, n: int = 4) -> dict[str, float]:
    """Largest relative error of the variances against laplace-torch's, in both precisions."""
    worst = {}
    for dtype in (torch.float32, torch.float64):
        la, shape = fitted(name, dtype)
        x = torch.randn(n, *shape, dtype=dtype)
        Js = la.backend.jacobians(x)[0]
        expected = la.functional_variance(Js).diagonal(dim1=1, dim2=2)
        got = StructuredPredictor(la)(x, diagonal_output=True).covariance
        worst[str(dtype).removeprefix("torch.")] = ((got - expected) / expected).abs().max().item()
    return worst


def one_datum(name: str, at_least: float = 1.0) -> dict[str, float]:
    """What ``la(x)`` on one image takes, over the network's own passes; predictor anew or kept."""
    torch.manual_seed(0)
    make, shape = NETS[name]
    model = make()
    model(torch.randn(64, *shape))  # sets the running statistics of BatchNorm
    model.eval()
    la = Laplace(model, "classification", "all", "kron", debias="single")
    la.fit((torch.randn(64, *shape), torch.randint(C, (64,))), n_data=1000)
    x = torch.randn(1, *shape)

    def anew() -> None:
        la.prior_precision = 1.0  # a change that a kept predictor notices
        la(x)

    runs = {"bare": lambda: backward_passes(model, x), "anew": anew, "kept": lambda: la(x)}
    best = dict.fromkeys(runs, float("inf"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # milliseconds: threads that wait for a busy core would be timed
    try:
        for _ in range(40 if at_least else 2):
            for way, run in runs.items():  # in turn, so that load falls on all of them
                start = time.perf_counter()
                run()
                best[way] = min(best[way], time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return {way: best[way] / best["bare"] for way in ("anew", "kept")}


def network(name: str, n: int, sizes: dict[str, list[int]], at_least: float = 1.0) -> dict:
    """Bars for one network: ratios to laplace-torch and to bare backward passes."""
    la, shape = fitted(name)
    x, y = torch.randn(n, *shape), torch.randint(C, (n,))
    loader = [(x, y)]
    theirs = upstream(la, shape, sizes)
    base = min(way["seconds_per_image"] for way in theirs.values())
    result = {"n": n, "upstream": theirs, "relative_error": errors(name)}
    result["one_datum_over_bare_passes"] = one_datum(name, at_least)
    la.model.eval()
    bare = seconds(lambda: backward_passes(la.model, x), at_least) / n
    result["backward_passes_seconds_per_image"] = bare
    for k in (1, 14, 100):
        ours = seconds(lambda k=k: sweep_prior_precision(la, loader, grid(k)), at_least) / n
        predictor = StructuredPredictor(la, grid(k))
        variances = seconds(lambda p=predictor: p(x, diagonal_output=True), at_least) / n
        result[f"sweep_{k}"] = {
            "seconds_per_image": ours,
            "variances_only_seconds_per_image": variances,
            "times_faster_than_upstream": k * base / ours,
            "times_backward_passes": ours / bare,
        }
    some = [(x[: n // 2], y[: n // 2])]
    half = seconds(lambda: sweep_prior_precision(la, some, grid(14)), at_least)
    result["growth"] = {
        "twice_the_data": result["sweep_14"]["seconds_per_image"] * n / half,
        "14_to_100_points": result["sweep_100"]["seconds_per_image"]
        / result["sweep_14"]["seconds_per_image"],
    }
    return result


# %% The last layer with thousands of classes
def last_layer(d: int = 2048, classes: int = 3000) -> KronLLLaplace:
    """A last-layer approximation with random eigenvectors and eigenvalues."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), nn.Linear(d, classes))
    la = KronLLLaplace(model, "classification", last_layer_name="1")
    sizes = [[classes, d], [classes]]
    rotation = {s: torch.linalg.qr(torch.randn(s, s))[0] for s in {d, classes}}
    la.H = KronDecomposed(
        [[rotation[s] for s in block] for block in sizes],
        [[torch.rand(s) for s in block] for block in sizes],
    )
    la.H_facs, la.n_outputs, la.n_data = Kron([]), classes, 1000
    la.mean = nn.utils.parameters_to_vector(la.model.last_layer.parameters()).detach()
    return la


# %% Peak memory, in fresh processes
def peak_memory(task: str) -> dict:
    """Run a task in a fresh process; return its peak memory in MB, in all and beyond the start."""
    command = [sys.executable, "-m", "examples.benchmarks.predictive", "--memory", task]
    out = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    return json.loads(out.splitlines()[-1])


def _resident(field: str) -> float:
    """Read a memory field of this process in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"Expected {field} in /proc/self/status, got none. Remedy: run on Linux.")


def measure_memory(task: str) -> None:
    """Print the peak memory of one task as JSON."""
    kind, n = task.split(":")
    if kind == "last_layer":
        la, shape = last_layer(), (2048,)
    else:
        la, shape = fitted("cnn")
    x, y = torch.randn(int(n), *shape), torch.randint(C, (int(n),))
    Path("/proc/self/clear_refs").write_text("5")  # start the high-water mark anew
    start, begin = _resident("VmRSS"), time.perf_counter()
    if kind == "sweep":
        sweep_prior_precision(la, [(x, y)], grid(14))
    elif kind == "last_layer":
        StructuredPredictor(la)(x, diagonal_output=True)
    else:
        la(x)
    content = {
        "n": int(n),
        "peak_mb": _resident("VmHWM"),
        "beyond_start_mb": _resident("VmHWM") - start,
        "seconds": time.perf_counter() - begin,
    }
    print(json.dumps(content))


def memory() -> dict:
    """Peak memory of the sweep at batch 250, and laplace-torch's from its growth.

    laplace-torch differentiates n * C outputs for all n images at once: the gradients at the first
    convolution's output alone are ``[n * C, n, 16, 14, 14]``. Its total is extrapolated from two
    small batches by the quadratic law.
    """
    ours = peak_memory("sweep:250")
    small, large = peak_memory("upstream:24"), peak_memory("upstream:48")
    rise = (large["beyond_start_mb"] - small["beyond_start_mb"]) / (48**2 - 24**2)
    return {
        "sweep_batch_250": ours,
        "upstream_batches": [small, large],
        "upstream_batch_250_extrapolated_gb": rise * 250**2 / 1024,
        "upstream_one_array_gb": 250 * C * 250 * 16 * 14 * 14 * 4 / 2**30,
    }


# %%
def table(results: dict) -> str:
    """The bars, one line each."""
    lines = [f"{'':46}{'measured':>12}{'bar':>12}"]

    def line(name: str, value: float, bar: str) -> None:
        lines.append(f"{name:46}{value:>12.2f}{bar:>12}")

    bars = {"cnn": (">= 25", ">= 300", ">= 1500"), "resnet20": (">= 5", ">= 60", ">= 400")}
    for name, (one, few, many) in bars.items():
        if name not in results:
            continue
        for k, bar in ((1, one), (14, few), (100, many)):
            ratio = results[name][f"sweep_{k}"]["times_faster_than_upstream"]
            line(f"{name}: {k} points, times faster", ratio, bar)
        for dtype, bar in (("float32", "1e-4"), ("float64", "1e-10")):
            error = results[name]["relative_error"][dtype]
            lines.append(f"{f'{name}: relative error, {dtype}':46}{error:>12.1e}{bar:>12}")
        growth = results[name]["growth"]
        line(f"{name}: 14 -> 100 points, times", growth["14_to_100_points"], "< 1.5")
        line(f"{name}: twice the data, times", growth["twice_the_data"], "2")
        for way, ratio in results[name]["one_datum_over_bare_passes"].items():
            line(f"{name}: la(x), one image / bare passes, {way}", ratio, "")
    if "memory" not in results:
        return "\n".join(lines)
    ratio = results["resnet20"]["sweep_14"]["times_backward_passes"]
    line("resnet20: 14 points / C backward passes", ratio, "<= 2")
    peak = results["memory"]
    line("cnn, batch 250: peak MB", peak["sweep_batch_250"]["peak_mb"], "< 1024")
    line("  laplace-torch, extrapolated GB", peak["upstream_batch_250_extrapolated_gb"], "> 23")
    line("last layer 2048 -> 3000: seconds", results["last_layer"]["seconds"], "< 1")
    line("last layer 2048 -> 3000: peak MB", results["last_layer"]["memory"]["peak_mb"], "< 2048")
    return "\n".join(lines)


def measure(quick: bool) -> dict:
    """Time and weigh everything, or the CNN alone on a few images."""
    results = {"threads": torch.get_num_threads()}
    if quick:
        sizes = {"la(x)": [1], "functional_variance": [1]}
        return results | {"cnn": network("cnn", 4, sizes, at_least=0.0)}
    x = torch.randn(256, 2048)
    predictor = StructuredPredictor(last_layer())
    return results | {
        "cnn": network("cnn", 250, {"la(x)": [1, 4, 16], "functional_variance": [1, 8, 32, 64]}),
        "resnet20": network("resnet20", 64, {"la(x)": [1, 4], "functional_variance": [1, 4, 16]}),
        "memory": memory(),
        "last_layer": {
            "seconds": seconds(lambda: predictor(x, diagonal_output=True)),
            "memory": peak_memory("last_layer:256"),
        },
    }


def main(argv: list[str] | None = None) -> dict | None:
    """Run everything, print the table, write the JSON; or print the peak memory of one task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="seconds, for a first look")
    parser.add_argument("--memory", metavar="TASK", help="print the peak memory of one task")
    parser.add_argument("--output", type=Path, default=Path("outputs/bench_predictive.json"))
    args = parser.parse_args(argv)
    if args.memory:
        measure_memory(args.memory)
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = measure(args.quick)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results))
    return results


if __name__ == "__main__":
    main()
