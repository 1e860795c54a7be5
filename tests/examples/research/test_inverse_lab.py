"""The laboratory of estimators, on a problem of a second."""

import torch
from torch import nn

from examples.research import inverse_crossfit, inverse_lab
from examples.research.inverse_crossfit import leak
from examples.research.inverse_lab import (
    certificate,
    log_dets,
    nll_gaps,
    prior_changes,
    rows_of,
    table,
)
from examples.research.inverse_problems import InverseProblem, mlp


def problem():
    torch.manual_seed(0)
    x = torch.randn(80, 2).double()
    net = mlp(2, 5, 1, activation=nn.Tanh).double()
    test = x[:5] + 0.1, x[:5, :1]
    return InverseProblem("made", net, "regression", x, x[:, :1], x[:5], (1.0,), test, 0.3)


def test_every_method_has_its_distances(tmp_path, monkeypatch):
    monkeypatch.setattr(inverse_lab, "budgets_of", lambda p: (16, 64))
    p = problem()
    rows = rows_of(p, list(inverse_lab.METHODS), 2, tmp_path)
    assert len(rows) == 2 * 2 * len(inverse_lab.METHODS)
    assert all(row["test"] > 0 and row["far"] > 0 for row in rows)
    assert "| **`auto`** |" in table(p, rows)
    assert rows_of(p, ["auto"], 2, tmp_path) == [r for r in rows if r["method"] == "auto"]
    assert certificate(p, 2, tmp_path).count("\n") == 1
    assert log_dets(p, rows).count("| made | 1 |") == 2
    gaps = [float(text) for text in nll_gaps(p, rows, head=False).split("|")[3:-1]]
    assert len(gaps) == len(inverse_lab.METHODS) and min(gaps) > 0
    assert "made" in prior_changes(p, 1)


def test_parts_of_cross_fitting_without_noise_are_the_full_batch():
    p = problem()
    full = inverse_lab.reference(p, 1.0)._posterior()
    for fit, values in inverse_crossfit.parts_of(p, full, len(p.x), 0)["pooled basis, all data's"]:
        for found, wanted in zip(values, full.lam, strict=True):  # the basis is that of all data
            for one, other in zip(found, wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-9)
        assert len(fit.Q) == len(full.Q)


def test_cross_fitting_is_shown_part_by_part(monkeypatch):
    monkeypatch.setattr(inverse_crossfit, "clusters", lambda training: problem())
    assert inverse_crossfit.crossfit_parts(1, 2, 16).count("\n") == 5
    assert inverse_crossfit.crossfit_rounded(1, 2, 16).count("\n") == 2


def test_large_curvature_leaks_into_small_directions(tmp_path):
    ratio = leak(tmp_path / "leak.png")  # the curvature along a direction, over what is needed
    assert float(ratio.max()) > 2 and float(ratio.min()) >= 1 - 1e-9
