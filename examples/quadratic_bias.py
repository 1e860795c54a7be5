# %% [markdown]
# # The shape of a mini-batch quadratic
#
# A network's loss is, near its minimum, a quadratic. A mini-batch gives an unbiased estimate of its
# matrix, and yet a *biased* picture of its shape: the directions of largest curvature were chosen
# on that mini-batch, so curvature along them is too large there (regression to the mean).
r"""Pictures of the bias: top planes, slopes and curvatures, overlaps, magnitudes, batch sizes.

    python -m examples.quadratic_bias   # digits, in a minute
    python -m examples.quadratic_bias --data cifar10 --root DATA --checkpoint STATE.pt \
        --batch-size 512 --k 100 --n-data 4096      # All-CNN-C

Studies that are done and the pictures are kept in ``outputs/``.
"""

import argparse
from pathlib import Path

import matplotlib
import torch
from torch import nn

from examples.quadratic_problems import add_problem_flags, digits_model, load_problem, train
from laplace_debias.quadratics import (
    Quadratic,
    bias_by_batch_size,
    bias_by_model_size,
    bias_over_training,
    curvature_bias_report,
    directional_bias,
    overlap_study,
    partition,
    top_eigenvectors,
)

LOSS = nn.CrossEntropyLoss()


# %% [markdown]
# ## The visual abstract
# In the plane of a mini-batch's top two eigenvectors its own quadratic is much narrower than that
# of all data: a Newton step would be too short, a Laplace approximation too sure.
def visual_abstract(problem, batches, options):
    """Restrict mini-batch and full-batch quadratics to the mini-batches' top planes."""
    everything = Quadratic(problem.model, LOSS, problem.train, **options)
    minibatch, full = [], []
    for batch in batches:
        quadratic = Quadratic(problem.model, LOSS, batch, **options)
        U = top_eigenvectors(quadratic, 2).vectors
        minibatch.append(quadratic.restrict(U))
        full.append(everything.restrict(U))
    wider = torch.stack(
        [one.curvatures() / truth.curvatures() for one, truth in zip(minibatch, full, strict=True)]
    )
    print(f"top two curvatures, mini-batch / all data: {wider.mean():.2f} times")
    assert wider.mean() > 1, "the mini-batch's own top plane should look too curved to it"
    return minibatch, full


# %% [markdown]
# ## Slopes and curvatures, and why
# Along 20 eigenvectors, on the same, all other and all data. The averages over all mini-batches are
# exactly the full-batch values. What makes the difference are the eigenspaces: the spectra of two
# mini-batches are alike, but their eigenvectors overlap with many of each other's.
def slopes_and_curvatures(problem, batches, k, path, options):
    """Measure along eigenvectors and CG directions, with parts kept in files."""
    results = {}
    for directions in ("eigenvectors", "cg"):
        results[directions] = directional_bias(
            problem.model,
            LOSS,
            batches,
            directions=directions,
            k=k,
            chosen=(0, 1, 2),
            folder=path / f"bias-{directions}",
            **options,
        )
        bias = results[directions]
        print(
            f"{directions}: curvature on the same / all data "
            f"{(bias.same() / bias.full()).nanmean():.2f}, on others / all data "
            f"{(bias.others().nanmean(1) / bias.full()).nanmean():.2f}"
        )
    eigen, cg = results["eigenvectors"], results["cg"]
    assert eigen.same().sum() > eigen.full().sum()
    assert (cg.same("magnitudes").nan_to_num(1) > 0).all(), "CG always goes downhill at home"
    wrong = (cg.full("magnitudes") < 0).float().mean()
    print(f"CG steps that all data would take the other way: {wrong:.0%}")
    return eigen, cg


def misalignment(problem, batches, k, path, options):
    """Compare the top eigenspaces of three mini-batches."""
    overlaps = overlap_study(
        problem.model, LOSS, batches[:3], k=k, folder=path / "overlaps", **options
    )
    alignment = overlaps.alignment()
    print(f"weight within another mini-batch's top-{k} space: {alignment[0, 1]:.2f} (own: 1)")
    assert alignment[0, 1] < 0.9 * alignment[0, 0]
    return overlaps


# %% [markdown]
# ## What the bias depends on
# It shrinks with the batch size, grows while the network learns its data by heart, and depends on
# the size of the network. The last two train new networks, so they are done for digits only.
def dependence(problem, args, path, options):
    """K-FAC over batch sizes; biases over training and over the network's size."""
    kfac = bias_by_batch_size(
        problem.model,
        LOSS,
        problem.train,
        batch_sizes=args.kfac_sizes,
        k=args.k,
        max_batches=20,
        folder=path / "kfac",
        **{**options, "curvature": "kfac"},
    )
    ratios = [float((bias.same() / bias.full())[:, 0].mean()) for bias in kfac.results]
    print("K-FAC, top curvature over-estimated by batch size:", [f"{r:.2f}" for r in ratios])
    assert ratios[0] > ratios[-1]
    if args.data != "digits":
        return kfac, None, None
    study = {"batch_size": args.batch_size, "k": args.k, "draws": args.draws, **options}
    epochs = sorted({max(1, round(args.epochs**x)) for x in torch.linspace(0, 1, 6).tolist()})
    model = digits_model(args.width)
    states = train(
        model, problem.train, l2=problem.l2, epochs=args.epochs, checkpoints=tuple(epochs)
    )
    training = bias_over_training(
        model, states, LOSS, problem.train, folder=path / "training", **study
    )
    models = {}
    for width in args.widths:
        models[str(width)] = digits_model(width)
        train(models[str(width)], problem.train, l2=problem.l2, epochs=args.epochs)
    sizes = bias_by_model_size(models, LOSS, problem.train, folder=path / "model_size", **study)
    for series in (training, sizes):
        medians = series.percentiles(percent=(50,)).mean((1, 2)).tolist()
        print(
            f"median relative curvature error by {series.name}:",
            ", ".join(f"{a}: {b:.2f}" for a, b in zip(series.labels, medians, strict=True)),
        )
    return kfac, training, sizes


# %% [markdown]
# ## The diagnosis in one call
# How large is the bias, which batch size would be enough, and what does debiasing buy?
def main(argv: list[str] | None = None) -> None:
    """Run everything and save the pictures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_problem_flags(parser, label_noise=0.5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--k", type=int, default=20, help="number of directions")
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--curvature", default="ggn", choices=("ggn", "hessian"))
    parser.add_argument("--report-sizes", type=int, nargs="+", default=[16, 64, 256, 512])
    parser.add_argument("--kfac-sizes", type=int, nargs="+", default=[8, 32, 128, 512])
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    args = parser.parse_args(argv)
    problem = load_problem(args)
    path: Path = args.out / f"quadratic_bias-{problem.folder}-{args.curvature}"
    options = {
        "curvature": args.curvature,
        "l2": problem.l2,
        "regularize_biases": False,
        "chunk_size": 256,
    }
    generator = torch.Generator().manual_seed(0)
    batches = partition(problem.train, args.batch_size, generator=generator)
    print(f"{problem.name}: {len(batches)} mini-batches of {args.batch_size}")

    planes = visual_abstract(problem, batches[:5], options)
    eigen, cg = slopes_and_curvatures(problem, batches, args.k, path, options)
    overlaps = misalignment(problem, batches, args.k, path, options)
    report = curvature_bias_report(
        problem.model,
        LOSS,
        problem.train,
        batch_sizes=args.report_sizes,
        k=args.k,
        draws=args.draws,
        folder=path / "report",
        **options,
    )
    print(report.table())
    kfac, training, sizes = dependence(problem, args, path, options)

    matplotlib.use("Agg")
    from laplace_debias import plots

    figures = {
        "visual_abstract": plots.plot_planes(*planes),
        "bias_eigenvectors": plots.plot_directional_bias(eigen),
        "bias_cg": plots.plot_directional_bias(cg),
        "cg_magnitudes": plots.plot_directional_bias(cg, ["magnitudes"], first=10),
        "overlaps": plots.plot_overlaps(overlaps),
        "report": plots.plot_report(report),
        "kfac": plots.plot_batch_sizes(kfac),
    }
    if training is not None:
        figures["training"] = plots.plot_series(training)
        figures["model_size"] = plots.plot_series(sizes)
    path.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.savefig(path / f"{name}.png", dpi=160)
    print(f"{len(figures)} pictures in {path}")


if __name__ == "__main__":
    main()
