"""What several gloo processes do in the tests, and the same in one process.

Started as ``python -m tests.distributed_jobs rank size folder``; results go to files in the folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from laplace_debias import Laplace, compare, evaluate, sweep_prior_precision
from laplace_debias.debias.pairs import draw_pairs
from laplace_debias.debias.sampling import draw_weighted
from laplace_debias.storage.fingerprints import tensors_hash
from tests import cases

N = 500
GRID = [0.5, 5.0, 50.0]
SHARES = {2: (22, 18), 3: (25, 15, 0)}  # data per mini-batch and rank; the last share may be empty
CASES = {
    "mlp": cases.MLP,
    "regression": cases.MLP_REGRESSION,
    "cnn": cases.CNN,
    # so many inputs that rows are few
    "wide": cases.Case("wide", lambda: wide(), "classification", (150,)),
}
METHODS = {
    "single": {"debias": "single"},
    "two-batch": {"debias": "two-batch"},
    "crossfit": {"debias": "crossfit"},
    "crossfit more": {"debias": "crossfit", "n_passes": 135, "fisher": "exact", "n_input": 70},
    "crossfit curvature": {
        "debias": "crossfit", "sampling": "curvature", "n_curvature": 20, "n_input": 50,
        "n_pool": 75,
    },
    "crossfit scores": {
        "debias": "crossfit", "sampling": "curvature", "n_curvature": 20, "n_input": 50,
    },
    "auto": {"debias": "auto", "tolerance": 0.005},
    "auto passes": {"debias": "auto", "tolerance": None, "n_passes": 64},
}  # fmt: skip
FITS = {
    f"{method} {name} {subset}": (method, name, subset)
    for method in METHODS
    for name, subset in (("mlp", "all"), ("cnn", "all"), ("mlp", "last_layer"))
    if method in ("single", "two-batch", "crossfit", "auto passes") or name == "mlp"
}
FITS |= {
    f"{method} regression all": (method, "regression", "all") for method in ("two-batch", "auto")
}
FITS |= {
    f"{method} wide all": (method, "wide", "all")
    for method in ("crossfit more", "crossfit curvature")
}
EVALUATED = ("two-batch mlp all", "two-batch regression all", "single mlp last_layer")
TIMEOUT = 20.0


def wide():
    """A network whose first factor has few rows."""
    torch.manual_seed(0)
    layers = nn.Linear(150, 4), nn.Tanh(), nn.Linear(4, 4)
    return nn.Sequential(*layers).double()


def batches(case, sizes, rank):
    """Two mini-batches of 40 data, or a process's share of each."""
    X, y = case.data(80)
    if rank is None:
        return [(X[:40], y[:40]), (X[40:], y[40:])]
    start, n = sum(sizes[:rank]), sizes[rank]
    parts = [slice(at + start, at + start + n) for at in (0, 40)]
    return [(X[part], y[part]) for part in parts] if n else []


def summary(la, case, sizes, rank, evaluated):
    """A posterior as numbers, some of them by everybody together."""
    fitted = la._fitted
    tensors = [t for part in (fitted.Q, fitted.lam, fitted.lam_tilde) for b in part for t in b]
    found = {
        "H": la.H.to_matrix(),
        "loss": la.loss,
        "n_data": la.n_data,
        "passes": (la.fit_cost.forward, la.fit_cost.backward),
        "reason": la.fit_report.reason,
        "variance": la.output_moments(case.data(4, 5)[0])[1],
        "bits": tensors_hash([*tensors, la.loss]),
    }
    return found | (evaluation(la, case, sizes, rank) if evaluated else {})


def evaluation(la, case, sizes, rank):
    """Numbers that all processes reduce, each of its share of the data."""
    X, y = case.data(30, 5)
    share = (X, y)
    if rank is not None:
        rows = slice(*(sum(sizes[:k]) * 30 // 40 for k in (rank, rank + 1)))
        share = (X[rows], y[rows]) if len(X[rows]) else []
    report = evaluate(la, share)
    sweep = sweep_prior_precision(la, share, GRID, metrics=list(sweep_metrics(case)))
    la.optimize_prior_precision(method="gridsearch", val_loader=share, grid_size=5)
    return {
        "report": {k: v for k, v in vars(report).items() if isinstance(v, (int, float))},
        "sweep": sweep.values,
        "n_sweep": sweep.n_data,
        "prior": la.prior_precision,
    }


def sweep_metrics(case):
    return ("nll", "ece") if case.likelihood == "classification" else ("nll", "rmse")


def fit(name, rank=None, sizes=()):
    """One of the fits, of a share or of everything."""
    method, case_name, subset = FITS[name]
    case, options = CASES[case_name], dict(METHODS[method])
    data = batches(case, sizes, rank)
    if method in ("crossfit curvature", "crossfit scores"):
        data = by_position(case, sizes, rank)
    if "scores" in method:
        options["scores"] = case.data(80)[0].flatten(1).abs().sum(1)
    la = Laplace(case.model(), case.likelihood, subset, "kron", generator=seeded(rank), **options)
    with warnings.catch_warnings(record=True) as caught, same_draws():
        warnings.simplefilter("always")
        la.fit(data, n_data=N)
    return summary(la, case, sizes, rank, name in EVALUATED) | {"warnings": len(caught)}


def seeded(rank):
    """A generator by which one process draws what several do; those differ in theirs."""
    generator = torch.Generator().manual_seed(3 if not rank else 100 + rank)
    if rank is None:  # what rank 0 draws for all
        generator.manual_seed(int(torch.randint(2**62, (), generator=generator)))
    return generator


def by_position(case, sizes, rank):
    """The same mini-batches from a dataset, whose data can be fetched again by position."""
    start, n = (0, 40) if rank is None else (sum(sizes[:rank]), sizes[rank])
    own = [at + start + i for at in (0, 40) for i in range(n)]
    return DataLoader(TensorDataset(*case.data(80)), max(n, 1), sampler=own)


@contextmanager
def same_draws():
    """Draws by score with offsets of their own: loaders take numbers from a generator as well."""

    def draw(*args, generator, **kwargs):
        return draw_weighted(*args, generator=torch.Generator().manual_seed(7), **kwargs)

    def pairs(scores, m, order, generator=None):
        return draw_pairs(scores, m, order, torch.Generator().manual_seed(m))

    with (
        mock.patch("laplace_debias.debias.crossfit.draw_weighted", draw),
        mock.patch("laplace_debias.debias.shared_folds.draw_weighted", draw),
        mock.patch("laplace_debias.debias.rounds.draw_pairs", pairs),
    ):
        yield


def sampled(rank=None, sizes=()):
    """Draws that are keyed by the datum."""
    case = cases.MLP
    generator = torch.Generator().manual_seed(3 if not rank else 100 + rank)
    la = Laplace(
        case.model(), case.likelihood, "all", "kron", debias=True, fisher="mc", generator=generator
    )
    la.fit(batches(case, sizes, rank), n_data=N)
    return {"H": la.H.to_matrix()}


def budgeted(rank=None, sizes=()):
    """An automatic fit within a budget of memory, on which all have to agree."""
    case, generator = cases.MLP, seeded(rank)
    la = Laplace(
        case.model(), case.likelihood, "all", "kron", debias="auto", tolerance=None, n_passes=48,
        generator=generator,
    )  # fmt: skip
    with same_draws():
        la.fit(batches(case, sizes, rank), n_data=N, memory_budget=2**26)
    return {"H": la.H.to_matrix(), "distance": la.fit_report.distance}


def stale(rank=None, sizes=()):
    """An automatic fit that draws by scores from training: vectors are keyed by the draw."""
    case, generator = cases.MLP, torch.Generator().manual_seed(3 if not rank else 100 + rank)
    la = Laplace(
        case.model(), case.likelihood, "all", "kron", debias="auto", tolerance=None, n_passes=64,
        scores=case.data(80)[0].flatten(1).abs().sum(1), generator=generator,
    )  # fmt: skip
    la.fit(by_position(case, sizes, rank), n_data=N)
    return {"H": la.H.to_matrix()}


def patches(rank=None, sizes=()):
    """An automatic fit whose convolution sees the patches of few data, and the pixels of all."""
    case, (X, y) = cases.CNN, cases.CNN.data(160)
    start, n = (0, 40) if rank is None else (sum(sizes[:rank]), sizes[rank])
    own = [slice(at + start, at + start + n) for at in range(0, 160, 40) if n]
    la = Laplace(
        case.model(), case.likelihood, "all", "kron", debias="auto", tolerance=None, n_passes=48,
        generator=seeded(rank),
    )  # fmt: skip
    few = {"LEAST_PATCHES": 40, "MOST_FOR_PATCHES": 1.0, "ROWS_PER_DIMENSION": 1}
    with same_draws(), mock.patch.multiple("laplace_debias.debias.pool_inputs", **few):
        la.fit([(X[part], y[part]) for part in own], n_data=N)
    return {"H": la.H.to_matrix(), "distance": la.fit_report.distance}


def tuned(rank=None, sizes=()):
    """Prior precision, temperature and layer-wise priors, by all shares of the validation data."""
    case = cases.MLP
    la = Laplace(case.model(), case.likelihood, "all", "kron", debias=True)
    la.fit(batches(case, sizes, rank), n_data=N)
    X, y = case.data(40, 5)
    rows = slice(0, 40) if rank is None else slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    share = (X[rows], y[rows]) if len(X[rows]) else []
    result = la.tune(share, prior_precisions=GRID, logit_temperatures=[0.5, 1.0, 2.0])
    la.optimize_prior_precision(method="marglik", n_steps=3)
    return {
        "values": torch.tensor(result.values),
        "plain": torch.tensor(result.plain),
        "n_data": result.n_data,
        "trial": torch.tensor(result.layerwise.prior_precisions),
        "marglik": la.prior_precision,
    }


def compared(rank=None, sizes=(), folder=None):
    """Methods at equal budgets: draws are dealt out, shares of test data are put together."""
    case = cases.MLP
    data = TensorDataset(*case.data(80))
    X, y = case.data(40, 5)
    rows = slice(0, 40) if rank is None else slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    share = (X[rows], y[rows]) if len(X[rows]) else []
    far = (3 * X[rows], y[rows]) if len(X[rows]) else []
    result = compare(
        case.model(), DataLoader(data, 20), share, ood_loader=far, val_loader=share,
        methods=("plain", "single", "two-batch", "full"), baselines=("temperature", "last-layer"),
        budgets=(40,), n_draws=1, prior_precisions=GRID, folder=folder,
    )  # fmt: skip
    return {
        (row.method, row.prior_precision): {
            k: v for k, v in row.metrics.items() if isinstance(v, float)
        }
        for row in result.rows
    }


def dealt_out(rank=None, size=1):
    """A dataset of 61 that does not come out even, dealt out by a sampler."""
    case = cases.MLP
    data = TensorDataset(*case.data(61))
    sampler = None if rank is None else DistributedSampler(data, size, rank, shuffle=False)
    loader = DataLoader(data, 7, sampler=sampler)
    model = case.model()
    model = model if rank is None else DistributedDataParallel(model)
    la = Laplace(model, case.likelihood, "all", "kron", debias="single")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.fit(loader)
    report = evaluate(la, loader)
    return {
        "H": la.H.to_matrix(),
        "n_data": la.n_data,
        "passes": (la.fit_cost.forward, la.fit_cost.backward),
        "n_report": report.n_data,
        "ece": report.ece,
        "warnings": [str(w.message) for w in caught if "in order" in str(w.message)],
    }


def in_order(rank, sizes):
    """Who warns that only the first data of a loader in order are used."""
    case = cases.MLP
    loader = DataLoader(TensorDataset(*case.data(40)), 10)
    la = Laplace(case.model(), case.likelihood, "all", "kron", debias=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        la.fit(loader)
    warned = [str(w.message) for w in caught if "SequentialSampler" in str(w.message)]
    return {"n_data": la.n_data, "warnings": warned}


def message_of(call):
    """What a call raises."""
    start = time.perf_counter()
    try:
        call()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        return {"error": text, "seconds": time.perf_counter() - start}
    return {"error": None}


def failing(rank, sizes):
    """Rank 1 has NaN in its data, in either role, and in an evaluation."""
    case, found = cases.MLP, {}
    for role in (0, 1):
        data = batches(case, (20,) * len(sizes), rank) if rank < 2 else []
        if rank == 1:
            X, y = data[role]
            data[role] = (X * float("nan"), y)
        la = Laplace(case.model(), case.likelihood, "all", "kron", debias=True)
        found[f"role {role}"] = message_of(lambda la=la, data=data: la.fit(data, n_data=N))
    la = Laplace(case.model(), case.likelihood, "all", "kron", debias="single")
    la.fit(batches(case, sizes, rank), n_data=N)
    X, y = case.data(6)
    X = X * float("nan") if rank == 1 else X
    found["evaluation"] = message_of(lambda: evaluate(la, (X, y)))
    found["sweep"] = message_of(lambda: sweep_prior_precision(la, (X, y), GRID))
    other = case.model()
    with torch.no_grad():
        next(other.parameters()).add_(rank)
    la = Laplace(other, case.likelihood, "all", "kron", debias="single")
    found["weights"] = message_of(lambda: la.fit(batches(case, sizes, rank), n_data=N))
    la = Laplace(case.model(), case.likelihood, "all", "kron", debias="single")
    found["n_data"] = message_of(lambda: la.fit(batches(case, sizes, rank), n_data=N + rank))
    return found


def killed(rank, sizes):
    """The last rank is killed while the others wait for its share."""

    def data():
        first, second = batches(cases.MLP, (10,) * len(sizes), rank)
        yield first
        if rank == len(sizes) - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        yield second

    la = Laplace(cases.MLP.model(), "classification", "all", "kron", debias=True)
    return message_of(lambda: la.fit(data(), n_data=N))


def started(size, folder):
    """Start the processes; their results by rank, with what each of them wrote."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.distributed_jobs"]
    running = [
        subprocess.Popen([*command, str(rank), str(size), str(folder)], env=env)
        for rank in range(size)
    ]
    codes = [process.wait(timeout=400) for process in running]
    results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(size)]
    return codes, results


def main(rank, size, folder):
    """Everything, in one group; the kill comes last."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    sizes, path = SHARES[size], Path(folder) / f"{rank}.pt"
    found = {name: fit(name, rank, sizes) for name in FITS}
    found["sampled"] = sampled(rank, sizes)
    found["stale"] = stale(rank, sizes)
    found["budgeted"] = budgeted(rank, sizes)
    found["patches"] = patches(rank, sizes)
    found["tuned"] = tuned(rank, sizes)
    found["compared"] = [compared(rank, sizes, f"{folder}/cells") for _ in range(2)]
    found["dealt out"] = dealt_out(rank, size)
    found["in order"] = in_order(rank, sizes)
    found["failing"] = failing(rank, sizes)
    torch.save(found, path)
    found["killed"] = killed(rank, sizes)
    torch.save(found, path)
    os._exit(0)  # the group has lost a member, and cannot be shut down in order


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
