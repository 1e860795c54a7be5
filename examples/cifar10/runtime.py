"""What debiasing costs: seconds of every stage of a K-FAC Laplace approximation, over five runs.

    python -m examples.cifar10.runtime --data DATA --weights WEIGHTS --out OUT
    python -m examples.cifar10.runtime ... --large-size 40000          # the full batch: hours

Stages: *construct* the factors (on one mini-batch of M images, on two of M / 2, on very many);
*decompose* them, which every method needs to sample; *debias*, re-evaluate the curvatures along the
directions; *sample* S = 40 weights, at the prior precision N * beta with beta = 0.01. Predictions
cost the same for all methods and are left out, as in the paper. OUT receives ``runtime.json`` and
``runtime.png``.
"""

import argparse
import copy
import json
from pathlib import Path
from statistics import fmean, stdev
from time import perf_counter

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector

from examples.cifar10.data import Split, load_cifar
from examples.cifar10.laplace_experiment import DTYPES, load_model
from examples.cifar10.reference import factors_of
from laplace_debias.debias.spectrum import FitResult, decompose, reevaluate

STAGES = ("construct", "decompose", "debias", "sample")
Times = dict[str, dict[str, list[float]]]


class Stopwatch:
    """Seconds since the last reading."""

    def __init__(self) -> None:
        """Start."""
        self._last = perf_counter()

    def read(self) -> float:
        """Return the seconds since the last reading, and start again."""
        now = perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def time_method(
    model: nn.Module, computing: nn.Module, split: Split, rows: torch.Tensor, roles: int,
    args: argparse.Namespace,
) -> dict[str, float]:  # fmt: skip
    """Time the stages on the given images, shared out equally between one or two roles.

    Args:
        model: The network that is sampled.
        computing: The same in the factors' precision.
        split: The training images.
        rows: Which images.
        roles: 1 for directions and curvatures from the same images, 2 to debias.
        args: The command line.
    """
    N = len(split)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    watch, seconds = Stopwatch(), {}
    parts = [
        factors_of(computing, split, part, args.chunk) for part in rows.split(len(rows) // roles)
    ]
    seconds["construct"] = watch.read()
    Q, lam = decompose(parts[0].scaled_to(N), names)
    seconds["decompose"] = watch.read()
    if roles == 2:
        lam = reevaluate(Q, parts[1].scaled_to(N), names)
        seconds["debias"] = watch.read()
    theta = parameters_to_vector([p for p in model.parameters() if p.requires_grad]).detach()
    generator = torch.Generator().manual_seed(args.seed)
    eps = torch.randn(args.n_samples, len(theta), generator=generator)
    fitted = FitResult(Q, lam, lam, [], torch.tensor(0.0), N, parts[0].n_outputs)
    posterior = fitted.decomposed(theta.dtype) + torch.tensor(0.01 * N)
    samples = theta + posterior.bmm(eps, exponent=-0.5)  # [S, P]
    seconds["sample"] = watch.read()
    assert samples.isfinite().all()
    return seconds


def measure(args: argparse.Namespace) -> Times:
    """Time every method; runs alternate between methods, after a warm-up that is not counted."""
    cifar = load_cifar(args.data, args.dataset, args.validation_size)
    model = load_model(args.model, args.weights, cifar.n_classes)
    computing = copy.deepcopy(model).to(DTYPES[args.factor_dtype])
    N = len(cifar.train)
    if not 1 <= args.large_size <= N or max(args.budgets) > N:
        raise ValueError(
            f"Expected sizes of at most N = {N} training images, got --budgets {args.budgets} and "
            f"--large-size {args.large_size}. Remedy: choose smaller ones."
        )
    large = "full" if args.large_size == N else f"large-batch {args.large_size}"
    methods = {f"single {M}": (M, 1) for M in args.budgets}
    methods |= {f"two-batch 2 x {M // 2}": (M, 2) for M in args.budgets}
    methods[large] = (args.large_size, 1)
    times: Times = {name: {} for name in methods}
    for number in range(-1, args.n_runs):
        generator = torch.Generator().manual_seed(args.seed + number + 1)
        order = torch.randperm(N, generator=generator)
        for name, (size, roles) in methods.items():
            if number < 0 and name == large:
                continue
            seconds = time_method(model, computing, cifar.train, order[:size], roles, args)
            if number >= 0:
                for stage, value in seconds.items():
                    times[name].setdefault(stage, []).append(value)
    return times


def report(times: Times) -> str:
    """Mean and standard deviation over runs, in seconds."""

    def cell(runs: list[float]) -> str:
        spread = stdev(runs) if len(runs) > 1 else 0.0
        return f"{fmean(runs):8.2f} +- {spread:5.2f}"

    lines = ["method".ljust(20) + "".join(stage.rjust(18) for stage in (*STAGES, "total"))]
    for name, stages in times.items():
        total = [sum(run) for run in zip(*stages.values(), strict=True)]
        cells = [cell(stages[stage]) if stage in stages else "-" for stage in STAGES]
        lines.append(name.ljust(20) + "".join(text.rjust(18) for text in (*cells, cell(total))))
    return "\n".join(lines)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, required=True, help="folder with the data set")
    add("--weights", type=Path, required=True, help="state dict of the trained network")
    add("--out", type=Path, required=True)
    add("--model", default="allcnnc", help="allcnnc or convnet-d-w")
    add("--dataset", choices=("cifar10", "cifar100"), default="cifar10")
    add("--validation-size", type=int, default=10_000)
    add("--budgets", type=int, nargs="+", default=[64, 256, 1024])
    add("--large-size", type=int, default=2048, help="all training images make it 'full'")
    add("--n-runs", type=int, default=5)
    add("--n-samples", type=int, default=40)
    add("--factor-dtype", choices=sorted(DTYPES), default="float64")
    add("--chunk", type=int, default=64, help="images per pass")
    add("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> Times:
    """Run the command line."""
    import matplotlib

    matplotlib.use("agg")
    from laplace_debias.plots import plot_runtimes

    args = parse(argv)
    times = measure(args)
    print(report(times))
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {
        key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()
    }
    for key in ("data", "weights", "out"):  # places on one machine say nothing
        settings.pop(key)
    settings["threads"] = torch.get_num_threads()
    content = {"settings": settings, "seconds": times}
    (args.out / "runtime.json").write_text(json.dumps(content, indent=1))
    plot_runtimes(times).figure.savefig(args.out / "runtime.png", dpi=150)
    return times


if __name__ == "__main__":
    main()
