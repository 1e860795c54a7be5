"""The examples about what lost, and about CIFAR-10, on made data and against dense oracles."""

import pickle
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import debiasing_losers  # noqa: E402
import debiasing_methods  # noqa: E402
import ekfac  # noqa: E402
import small_problems  # noqa: E402
from analytical_shrinkage import analytical_shrinkage  # noqa: E402
from cifar10 import data as cifar10_data  # noqa: E402
from cifar10.models import all_cnn_c  # noqa: E402
from debiasing_lab import Fitter, curves, feasible  # noqa: E402


def tiny_net():
    return nn.Sequential(nn.Conv2d(3, 4, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(196, 10))


@pytest.fixture
def cifar10_folder(tmp_path, monkeypatch):
    """Random images in the layout of CIFAR-10: 60 for training, of which 10 are set aside."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        images = rng.integers(0, 256, (12, 3072), dtype=np.uint8)
        batch = {b"data": images, b"labels": rng.integers(0, 10, 12).tolist()}
        (folder / name).write_bytes(pickle.dumps(batch))
    load = partial(cifar10_data.load_cifar, validation_size=10)
    monkeypatch.setattr(cifar10_data, "load_cifar", load)
    recipe = replace(small_problems.PROBLEMS["cifar10"], build=tiny_net)
    monkeypatch.setitem(small_problems.PROBLEMS, "cifar10", recipe)
    return tmp_path


def test_cifar10_runs_and_leaves_out_budgets_that_are_too_large(cifar10_folder, tmp_path, capsys):
    argv = ["--data", "cifar10", "--folder", str(cifar10_folder), "--train-size", "40"]
    argv += ["--epochs", "1", "--budgets", "8", "20", "40", "1024", "--draws", "1"]
    argv += ["--methods", "single", "+ systematic", "+ one backward pass, 5 M"]
    rows = debiasing_methods.main([*argv, "--output", str(tmp_path / "out")])
    assert [(row["method"], row["m"]) for row in rows] == [
        (method, m) for m in (8, 20) for method in argv[-3:]
    ]
    said = capsys.readouterr().out
    for m in (40, 1024):
        assert f"Budget {m} left out: the training set has 40 data." in said
    other = ["--train-size", "30", "--output", str(tmp_path / "out")]
    with pytest.raises(ValueError, match="train_size: 40 there, 30 now"):
        debiasing_methods.main([*argv, *other])


def test_cifar10_loads_the_weights_of_all_cnn_c(cifar10_folder, tmp_path):
    torch.manual_seed(0)
    model = all_cnn_c()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    problem = small_problems.trained_problem(
        "cifar10", folder=cifar10_folder, weights=tmp_path / "weights.pt", test_size=5
    )
    assert problem.n == 50
    assert len(problem.test_loader.dataset) == 5
    with torch.no_grad():
        torch.testing.assert_close(problem.model(problem.x[:3]), model(problem.x[:3]))
    assert [p.requires_grad for p in problem.model.parameters()] == 9 * [True, False]


def test_wrong_options_say_what_to_do(tmp_path, capsys):
    with pytest.raises(ValueError, match="--folder"):
        small_problems.trained_problem("cifar10")
    with pytest.raises(ValueError, match="cifar10 only"):
        small_problems.trained_problem("digits", weights=tmp_path)
    with pytest.raises(ValueError, match="below 5"):
        feasible([8, 16], 5)
    with pytest.raises(SystemExit):
        debiasing_methods.main(["--methods", "oracle"])
    assert "must include single" in capsys.readouterr().err


def test_losers_run_and_resume(tmp_path, capsys):
    methods = ["two folds", "four random splits into two", "two folds, not monotone"]
    methods += ["Ledoit and Wolf 2020", "EKFAC, held-out half", "score: Frobenius norm"]
    methods += ["score: behind last layer", "n_pool = 4 M", "n_pool = all"]
    argv = ["--budgets", "16", "--draws", "1", "--epochs", "5", "--output", str(tmp_path)]
    rows = debiasing_losers.main([*argv, "--methods", *methods])
    assert [row["method"] for row in rows] == ["single", *methods]
    assert all(0 < row["nll"] < 10 for row in rows)
    assert debiasing_losers.main([*argv, "--methods", *methods]) == rows
    assert (tmp_path / "debiasing_losers.png").exists()
    assert "n_pool = 4 M" in capsys.readouterr().out


@pytest.mark.parametrize(("n", "p"), [(400, 100), (100, 200)])
def test_analytical_shrinkage_comes_closer_to_the_true_spectrum(n, p):
    generator = torch.Generator().manual_seed(0)
    truth = torch.linspace(1, 3, p, dtype=torch.float64)
    x = torch.randn(n, p, dtype=torch.float64, generator=generator) * truth.sqrt()
    lam, Q = torch.linalg.eigh(x.T @ x / n)
    ideal = (Q * (truth[:, None] * Q)).sum(0)  # what no rotation-invariant estimator can beat
    found = analytical_shrinkage(lam, n)
    assert (found - ideal).norm() < 0.2 * (lam - ideal).norm()
    with_zeros = torch.cat([torch.zeros(3, dtype=torch.float64), lam]) if n > p else lam
    torch.testing.assert_close(analytical_shrinkage(with_zeros, n)[-p:], found)


def made_problem():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4, bias=False))
    model[0].bias.requires_grad_(False)
    x, y = torch.randn(12, 1, 3, 3), torch.arange(12) % 4
    return small_problems.Problem(model, x, y, DataLoader(TensorDataset(x, y), batch_size=5))


def test_ggn_along_a_basis_is_that_of_the_dense_ggn():
    problem, rows = made_problem(), torch.arange(5)
    bases = [[torch.linalg.qr(torch.randn(d, d))[0] for d in shape] for shape in ((3, 4), (4, 12))]
    found = ekfac.ggn_along(problem, rows, bases)
    weights = [problem.model[0].weight, problem.model[3].weight]
    for p, (Q_B, Q_A), lam in zip(weights, bases, found, strict=True):
        G = torch.zeros(p.numel(), p.numel())
        for x in problem.x[rows]:
            f = problem.model(x[None])[0]
            J = torch.stack([torch.autograd.grad(c, p, retain_graph=True)[0].flatten() for c in f])
            prob = f.detach().softmax(0)
            G += J.T @ (torch.diag(prob) - torch.outer(prob, prob)) @ J
        Q = torch.kron(Q_B, Q_A)
        expected = (Q * (G @ Q)).sum(0).reshape(lam.shape) * problem.n / len(rows)
        torch.testing.assert_close(lam, expected, rtol=1e-4, atol=1e-5)


def test_products_as_corrected_eigenvalues_change_nothing():
    problem = made_problem()
    fit = Fitter(problem)
    H = debiasing_methods.single(fit, 12, torch.Generator().manual_seed(0))
    corrected = ekfac.EigenvalueCorrected(H, [torch.outer(*lams) for lams in H.eigenvalues])
    plain, other = curves(problem, H), ekfac.curves_of_any(problem, corrected)
    for key, values in plain.items():
        assert other[key] == pytest.approx(values, rel=1e-5)
