"""Recommendations from hand-made comparisons."""

import pytest

from laplace_debias.comparison import ComparisonResult, ComparisonRow
from laplace_debias.reporting.recommend import candidates, recommend


def _row(method, val, test=None, draw=0, budget=8, delta=2.0, backward=0, **more):
    delta = None if method in ("plain", "temperature") else delta
    metrics = {"val_nll": val, "nll": val if test is None else test, **more}
    size = budget // 2 if method == "two-batch" else budget
    cost = {"backward": backward, "seconds": 0.1}
    return ComparisonRow(method, budget, size, draw, delta, metrics, cost)


def _advice(*rows, **kwargs):
    return recommend(ComparisonResult(rows, 100, {}), **kwargs)


def test_the_cheapest_of_the_equally_good():
    rows = [_row("plain", 0.5), _row("full", 0.29, budget=100, backward=900)]
    rows += [_row("two-batch", v, draw=d, backward=72) for d, v in enumerate((0.28, 0.32))]
    rows += [_row("single", v, draw=d, backward=72) for d, v in enumerate((0.45, 0.44))]
    advice = _advice(*rows)
    assert advice.method == "two-batch" and advice.prior_precision == 2.0
    assert "1/12 of the full batch's backward passes" in advice.sentence
    assert "against 0.5000 for the plain network" in advice.sentence
    assert "debias=True" in advice.code and "batch_size=4" in advice.code


def test_validation_data_choose_and_test_data_are_quoted():
    rows = (_row("plain", 0.5, 0.1), _row("single", 0.9, 0.05, delta=1.0), _row("single", 0.3, 0.4))
    advice = _advice(*rows)
    assert advice.method == "single" and "NLL 0.4000 on the test data" in advice.sentence
    (_, single) = candidates(ComparisonResult(rows, 100, {}))
    assert single.validation == 0.3 and single.cost("seconds") == pytest.approx(0.1)


def test_plain_or_a_temperature_where_no_posterior_is_better():
    plain = _advice(_row("plain", 0.3), _row("single", 0.4))
    assert plain.sentence.startswith("Keep the plain network") and "softmax" in plain.code
    rows = (_row("plain", 0.5, ood_auroc=0.6), _row("temperature", 0.3, ood_auroc=0.6))
    advice = _advice(*rows, _row("full", 0.4, ood_auroc=0.8), temperature=1.5)
    assert advice.sentence.startswith("Divide the logits by 1.5")
    assert "the full-batch posterior is better (AUROC 0.800 against 0.600)" in advice.sentence
    assert advice.code == "probs = (model(x) / 1.5).softmax(-1)"


@pytest.mark.parametrize(
    ("method", "part"),
    [("crossfit", 'debias="crossfit", n_curvature=8'), ("last-layer", '"last_layer"'),
     ("prior-only", "prior_only(la"), ("diagonal", "DiagonalPredictor"), ("full", "la.fit(train_l"),
     ("single", "n_data=len(train_loader.dataset))"),
     ("auto", 'debias="auto", tolerance=None, n_passes=72')],
)  # fmt: skip
def test_code_of_every_method(method, part):
    rows = _row("plain", 0.5), _row(method, 0.1, backward=72)
    code = _advice(*rows, likelihood="regression", sigma_noise=0.3)
    assert part in code.code and "sigma_noise=0.3" in code.code


def test_a_method_of_the_users_own_is_left_to_the_user():
    advice = _advice(_row("plain", 0.5), _row("mine", 0.1))
    assert "your own method 'mine' with 8 data" in advice.code and "Laplace" not in advice.code


def test_a_prior_on_the_edge_of_its_grid_is_named():
    rows = [_row("single", v, delta=d) for d, v in ((1.0, 0.1), (2.0, 0.2), (3.0, 0.3))]
    assert "lies on the edge of the grid" in _advice(_row("plain", 0.5), *rows).sentence
    rows[0] = _row("single", 0.25, delta=1.0)
    assert "edge" not in _advice(_row("plain", 0.5), *rows).sentence
