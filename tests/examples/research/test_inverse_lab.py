"""The laboratory of estimators, on a problem of a second."""

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from examples.research import inverse_crossfit, inverse_lab, inverse_problems
from examples.research.inverse_crossfit import leak
from examples.research.inverse_lab import (
    certificate,
    log_dets,
    nll_gaps,
    prior_changes,
    rows_of,
    seconds,
    table,
)
from examples.research.inverse_problems import InverseProblem, mlp
from laplace_debias import CurvatureRecorder, posterior_distance


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
    assert seconds(p, rows).count("| made | 1 |") == 2 * len(inverse_lab.METHODS)
    assert "made" in prior_changes(p, 1)


def test_scores_of_training_are_recorded_and_used(tmp_path):
    p = problem()
    y = (p.x[:, 0] > 0).long()
    recorder = CurvatureRecorder(len(y))
    net = mlp(2, 5, 2, activation=nn.Tanh).double()
    cross_entropy = nn.functional.cross_entropy
    net = inverse_problems.trained(net, p.x, y, cross_entropy, 2, 1e-2, 16, recorder)
    assert recorder.scores.std() > 0  # every datum has its own
    classes = replace(
        p, model=net, likelihood="classification", y=y, sigma_noise=1.0, recorder=recorder
    )
    flat = replace(classes, recorder=torch.ones(len(y)))
    scored = partial(inverse_lab.auto, prior=1.0, P=16, n_pool=40, scored=True)
    fits = [scored(q, g=torch.Generator().manual_seed(0)) for q in (classes, flat)]
    assert posterior_distance(*fits, p.x_test) > 1e-4  # other draws
    assert all(la.fit_cost.backward <= 16 for la in fits)


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


def test_tiny_problems_have_budgets_of_their_own():
    """Three classes are learnt (chance: a half), and units that are to be dead are."""
    p = inverse_problems.TINY["tiny-relu-dead"]()
    assert inverse_lab.budgets_of(p) == (8, 16, 24, 40, 80)
    assert inverse_lab.budgets_of(p, [16, 36]) == (16,)
    X, y = p.test
    assert float((p.model(X).argmax(-1) == y).double().mean()) > 0.65
    assert not bool((p.model[:2](p.x) > 0)[:, :4].any())
    assert p.x.dtype == p.model[0].weight.dtype == X.dtype
