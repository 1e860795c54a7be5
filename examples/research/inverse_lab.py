"""Estimators of a full-batch posterior against each other: distance at equal backward passes.

The distance is ``posterior_distance``, the mean |log ratio| of predictive standard deviations, on
test inputs and on far ones; other judges are the log determinant and the test NLL. What is compared
is in ``inverse_methods``, those that lost included.

    python -m examples.research.inverse_lab --draws 20            # small problems, an hour
    python -m examples.research.inverse_lab --problems diabetes 1-D --draws 4
    python -m examples.research.inverse_lab --certificate         # is the estimated distance right?
    ... --methods "auto, 256 forward"                             # where the pool is a part of all
    python -m examples.research.inverse_lab --problems tiny-relu tiny-tanh --certificate --draws 20
    python -m examples.research.inverse_lab --log-dets            # the same cells, another judge
    python -m examples.research.inverse_lab --nll-gaps            # and another one
    python -m examples.research.inverse_lab --prior-changes       # a prior changed after the fit
    python -m examples.research.inverse_lab --seconds             # processor time of one thread
    python -m examples.research.inverse_lab --problems digits-mlp --picture seconds.png
    python -m examples.research.inverse_lab --scores              # recorded while training
    python -m examples.research.inverse_lab --problems All-CNN-C --folder DATA --weights WEIGHTS
    ... --train-size 40000 --methods single two-batch auto --passes 576     # an hour

Results are kept in ``outputs/inverse_lab``, and a run goes on where it was stopped.
"""

# %% Imports
from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean, stdev

import torch

from examples.research.inverse_methods import FEW_FORWARD, METHODS, auto
from examples.research.inverse_picture import draw_seconds
from examples.research.inverse_problems import PROBLEMS, TINY, InverseProblem, all_cnn_c
from laplace_debias import posterior_distance
from laplace_debias.evaluation.sweep import sweep_prior_precision
from laplace_debias.posterior import DebiasedKronLaplace
from laplace_debias.storage.cells import CellStore

LABELS = {
    "single": "`single`",
    "single + c": "`single` + c",
    "two-batch": "`two-batch`",
    "geometric mean": "geometric mean of own and held-out",
    "held-out likelihood": "the likeliest per factor on held-out data",
    "crossfit": "`crossfit`",
    "crossfit + curvature": "`crossfit`, curvature sampling",
    "crossfit + curvature, one vector": "the same, one vector per datum",
    "pairs": "pairs, nothing corrected",
    "auto": "**`auto`**",
}
"""Names in tables, where they differ."""
ROUNDING = 1e-9
"""Distances below are those of double precision."""


# %% Cells
def budgets_of(p: InverseProblem, only: list[int] | None = None) -> tuple[int, ...]:
    """Numbers of backward passes; of these, only some."""
    classes = p.likelihood == "classification"
    every = p.budgets or ((36, 144, 576, 2304) if classes else (16, 64, 256, len(p.x)))
    return tuple(P for P in every if only is None or P in only)


def judged_at(p: InverseProblem) -> int:
    """Backward passes at which the NLL is looked at, too."""
    return 576 if p.likelihood == "classification" else 64


class Reference:
    """The full-batch posterior of a problem, and its test NLL."""

    def __init__(self, p: InverseProblem, prior: float) -> None:
        self.p, self.la = p, reference(p, prior)
        self.log_det = float(self.la.log_det_posterior_precision.detach())
        self._nll: list[float] = []

    @property
    def nll(self) -> list[float]:
        """Computed once."""
        self._nll = self._nll or nll(self.p, self.la)
        return self._nll


def reference(p: InverseProblem, prior: float) -> DebiasedKronLaplace:
    """The full-batch posterior."""
    la = p.laplace("single", prior)
    la.fit(p.loader())
    return la


def nll(p: InverseProblem, la: DebiasedKronLaplace) -> list[float]:
    """Test NLL over the paper's 14 prior precisions."""
    return list(sweep_prior_precision(la, [p.test], metrics=("nll",)).values["nll"])


def cell(full: Reference, name: str, prior: float, P: int, draw: int) -> dict:
    """Distances of one fit, and what it cost."""
    p, start = full.p, time.process_time()
    la = (METHODS | FEW_FORWARD)[name](p, prior, P, torch.Generator().manual_seed(1000 * P + draw))
    row = {"seconds": time.process_time() - start}
    row |= {"test": posterior_distance(la, full.la, p.x_test)}
    row |= {"far": posterior_distance(la, full.la, p.far)}
    n_params = sum(q.numel() for q in p.model.parameters() if q.requires_grad)
    log_det = float(la.log_det_posterior_precision.detach())
    row |= {"logdet": abs(log_det - full.log_det) / n_params}
    if la.fit_report is not None and la.fit_report.distance is not None:
        row |= {"estimate": la.fit_report.distance, "error": la.fit_report.standard_error}
        row |= {"backward": la.fit_report.n_passes, "forward": la.fit_report.n_forward}
    if P == judged_at(p) and prior == p.prior_precisions[0]:
        row["nll"] = mean(abs(a - b) for a, b in zip(nll(p, la), full.nll, strict=True))
    return row


def rows_of(
    p: InverseProblem,
    methods: list[str],
    draws: int,
    output: Path,
    budgets: tuple[int, ...] | None = None,
) -> list[dict]:
    """All cells of a problem, those that are kept read from files."""
    store, rows = CellStore(output / p.name, {"problem": p.name, "version": 2}), []
    for prior in p.prior_precisions:
        full: list[Reference] = []

        def made(name: str, P: int, draw: int, prior: float = prior, full: list = full) -> dict:
            full[:] = full or [Reference(p, prior)]
            return cell(full[0], name, prior, P, draw)

        turns = itertools.product(range(draws), budgets or budgets_of(p), methods)
        for draw, P, name in turns:  # what else the machine does meets all methods alike
            key = f"{name}_{prior}_{P}_{draw}".replace(" ", "-").replace(",", "")
            row = store.get(key, lambda a=(name, P, draw): made(*a))
            rows.append({"method": name, "prior": prior, "P": P, "draw": draw, **row})
    return rows


# %% Tables
def chosen(rows: list[dict], key: str, **which: object) -> list[float]:
    """A column of some rows."""
    return [r[key] for r in rows if key in r and all(r[k] == v for k, v in which.items())]


def table(p: InverseProblem, rows: list[dict]) -> str:
    """Distance on test / far inputs, mean over draws, with the standard error of the former."""
    lines = []
    budgets = dict.fromkeys(r["P"] for r in rows)
    for prior in p.prior_precisions:
        head = f"{p.name}, prior precision {prior:g}"
        lines += [f"| {head} | " + " | ".join(f"P = {P}" for P in budgets) + " |"]
        lines += ["| --- |" + " --- |" * len(budgets)]
        for name in dict.fromkeys(r["method"] for r in rows):
            texts = []
            for P in budgets:
                found = [chosen(rows, k, method=name, prior=prior, P=P) for k in ("test", "far")]
                error = stdev(found[0]) / len(found[0]) ** 0.5 if len(found[0]) > 1 else 0.0
                texts.append(f"{mean(found[0]):.4f} ± {error:.4f} / {mean(found[1]):.4f}")
            lines.append(f"| {LABELS.get(name, name)} | " + " | ".join(texts) + " |")
        lines.append("")
    return "\n".join(lines)


def log_dets(p: InverseProblem, rows: list[dict], *, head: bool = True) -> str:
    """Mean |difference| of the log determinants to the full batch's, per weight."""
    names = list(dict.fromkeys(r["method"] for r in rows))
    lines = []
    if head:
        labels = (LABELS.get(name, name) for name in names)
        lines += ["| problem | prior precision | P | " + " | ".join(labels) + " |"]
        lines += ["| --- " * (3 + len(names)) + "|"]
    for prior, P in dict.fromkeys((r["prior"], r["P"]) for r in rows):
        found = [chosen(rows, "logdet", method=name, prior=prior, P=P) for name in names]
        texts = [f"{mean(values):.2g}" for values in found]
        lines.append(f"| {p.name} | {prior:g} | {P} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def nll_gaps(p: InverseProblem, rows: list[dict], *, head: bool = True) -> str:
    """Mean |difference| of the test NLL to the full batch's, over 14 prior precisions."""
    names = list(dict.fromkeys(r["method"] for r in rows))
    lines = []
    if head:
        labels = (LABELS.get(name, name) for name in names)
        lines += ["| problem | P | " + " | ".join(labels) + " |", "| --- " * (2 + len(names)) + "|"]
    texts = [f"{mean(chosen(rows, 'nll', method=name)):.2g}" for name in names]
    lines.append(f"| {p.name} | {judged_at(p)} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def seconds(p: InverseProblem, rows: list[dict], *, head: bool = True) -> str:
    """Processor seconds of the fits of one thread, and distances on test and far inputs."""
    lines = []
    if head:
        lines += ["| problem | prior precision | method | P | seconds | test | far |"]
        lines += ["| --- " * 7 + "|"]
    for prior, P, name in dict.fromkeys((r["prior"], r["P"], r["method"]) for r in rows):
        which = {"method": name, "prior": prior, "P": P}
        spent, test, far = (mean(chosen(rows, key, **which)) for key in ("seconds", "test", "far"))
        cells = f"{LABELS.get(name, name)} | {P} | {spent:.3g} | {test:.4f} | {far:.4f}"
        lines.append(f"| {p.name} | {prior:g} | {cells} |")
    return "\n".join(lines)


def certificate(
    p: InverseProblem,
    draws: int,
    output: Path,
    budgets: tuple[int, ...] | None = None,
    method: str = "auto",
) -> str:
    """How often the true distance lies below estimate + 2 errors, and the ratio of the means."""
    rows = rows_of(p, [method], draws, output, budgets)
    lines = []
    for prior in p.prior_precisions:
        for P in dict.fromkeys(r["P"] for r in rows):
            found = [r for r in rows if (r["prior"], r["P"]) == (prior, P)]
            truth = [(r["test"] + r["far"]) / 2 for r in found]
            bound = [r["estimate"] + 2 * r["error"] for r in found]
            inside = mean(float(t <= b + ROUNDING) for t, b in zip(truth, bound, strict=True))
            estimate, true = mean(r["estimate"] for r in found), mean(truth)
            ratio = f"{estimate / true:.2f}" if true > ROUNDING else "no error is left"
            lines.append(
                f"| {p.name} | {prior:g} | {P} | {true:.2g} | {estimate:.2g} | {ratio} | "
                f"{100 * inside:.0f} % |"
            )
    return "\n".join(lines)


def prior_changes(p: InverseProblem, draws: int) -> str:
    """Distance at a prior precision that was set after the fit, to the full batch's at it."""
    lines, base = [], p.prior_precisions[0]
    for P in budgets_of(p)[:3]:
        texts = []
        for factor in (0.01, 1.0, 100.0):
            full = reference(p, base * factor)
            found = []
            for draw in range(draws):
                g = torch.Generator().manual_seed(draw)
                la = auto(p, base, P, g)
                la.prior_precision = base * factor
                found.append(posterior_distance(la, full, p.x_test))
            texts.append(f"{mean(found):.4f}")
        lines.append(f"| {p.name} | {P} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


# %% Everything
def main(argv: list[str] | None = None) -> None:
    """Fit, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [*PROBLEMS, *TINY, "All-CNN-C"]
    parser.add_argument("--problems", nargs="*", choices=names, default=list(PROBLEMS))
    methods = [*METHODS, *FEW_FORWARD]
    parser.add_argument("--methods", nargs="*", choices=methods, default=list(METHODS))
    parser.add_argument("--draws", type=int, default=8)
    parser.add_argument("--passes", nargs="*", type=int, help="only these numbers of passes")
    parser.add_argument("--certificate", action="store_true")
    parser.add_argument("--log-dets", action="store_true")
    parser.add_argument("--nll-gaps", action="store_true")
    parser.add_argument("--seconds", action="store_true")
    parser.add_argument("--picture", type=Path, help="where one of distance and seconds goes")
    parser.add_argument("--scores", action="store_true")
    parser.add_argument("--prior-changes", action="store_true")
    parser.add_argument("--folder", type=Path, help="holds CIFAR-10 (All-CNN-C)")
    parser.add_argument("--weights", type=Path, help="of All-CNN-C")
    parser.add_argument("--train-size", type=int, default=800, help="N (All-CNN-C)")
    parser.add_argument("--output", type=Path, default=Path("outputs/inverse_lab"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    made: dict[str, Callable[[], InverseProblem]] = PROBLEMS | TINY
    made["All-CNN-C"] = partial(all_cnn_c, args.folder, args.weights, args.train_size)
    for at, name in enumerate(args.problems):
        p = made[name]()
        budgets = budgets_of(p, args.passes)
        if args.certificate:
            estimated = [name for name in args.methods if name.startswith("auto")]
            for wanted in list(FEW_FORWARD)[-1:] if args.scores else estimated:
                print(certificate(p, args.draws, args.output, budgets, wanted), flush=True)
        elif args.prior_changes:
            print(prior_changes(p, args.draws), flush=True)
        else:
            wanted = ["auto", *FEW_FORWARD] if args.scores else args.methods
            rows = rows_of(p, wanted, args.draws, args.output, budgets)
            judges = {log_dets: args.log_dets, nll_gaps: args.nll_gaps}
            judges |= {seconds: args.seconds or args.scores}
            asked = [judge for judge, said in judges.items() if said]
            if args.picture:
                draw_seconds(p.name, rows, args.picture)
            print(asked[0](p, rows, head=not at) if asked else table(p, rows), flush=True)


if __name__ == "__main__":
    main()
