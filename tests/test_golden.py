"""Numbers that a move of code must not change: fits, predictions and sweeps in float64.

They are digests of eigenvalues, predictions and sweeps, made by ``python -m tests.test_golden``;
nothing but the public interface is used, so that they outlive every rearrangement of the house.
Factors of full rank only: in a null space the basis is arbitrary.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch

from laplace_debias import Laplace, evaluate, linearized_predictive, sweep_prior_precision
from tests import cases

GOLDEN = Path(__file__).with_name("golden.json")
GRID = [0.1, 1.0, 10.0, 100.0]
METHODS = {
    "single": {"debias": "single"},
    "two-batch": {"debias": True},
    "crossfit": {"debias": "crossfit"},
    "curvature": {"debias": "crossfit", "sampling": "curvature", "n_curvature": 24, "n_pool": 96},
}
CASES = [
    cases.MLP,
    cases.MLP_REGRESSION,
    cases.CNN,
    cases.CNN_REGRESSION,
    cases.WEIGHTS_ONLY,
    cases.PARTLY_FROZEN,
    cases.TOKENS,
    cases.BATCHNORM,
    cases.GROUPED,
    cases.CONV1D,
]
LAST_LAYER = [cases.MLP, cases.MLP_REGRESSION]


def numbers(case: cases.Case, method: str, subset: str) -> dict[str, list[float]]:
    """What one fit comes to: traces and log-determinants of blocks, variances, sweep, metrics."""
    options = dict(METHODS[method])
    if options["debias"] == "crossfit":
        options["generator"] = torch.Generator().manual_seed(7)
    X, y = case.data(160)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = Laplace(case.model(), case.likelihood, subset, "kron", **options)
        la.fit(cases.loader(X, y, 40), n_data=1000)
        x = X[:6]
        blocks = [
            [float(lam.sum()), float(lam.square().sum()), float((1 + lam).log().sum())]
            for block in la.H.eigenvalues
            for lam in block
        ]
        moments = linearized_predictive(la, x, GRID)
        values = sweep_prior_precision(la, [(X[:30], y[:30])], GRID).values["nll"]
        prediction = la(x)
        prediction = prediction[1] if isinstance(prediction, tuple) else prediction
        report = evaluate(la, [(X[:30], y[:30])])
    return {
        "eigenvalues": sum(blocks, []),
        "variances": moments.covariance.diagonal(dim1=-2, dim2=-1).sum((-1, -2)).tolist(),
        "prediction": prediction.flatten(1).sum(0).tolist(),
        "sweep": list(values),
        "nll": [report.nll],
        "log_marginal_likelihood": [float(la.log_marginal_likelihood())],
    }


def runs() -> list[tuple[cases.Case, str, str]]:
    """All combinations that are pinned."""
    all_layers = [(case, method, "all") for case in CASES for method in METHODS]
    return all_layers + [(case, m, "last_layer") for case in LAST_LAYER for m in METHODS]


@pytest.mark.parametrize(
    ("case", "method", "subset"), runs(), ids=lambda v: v if isinstance(v, str) else v.name
)
def test_numbers_stay(case: cases.Case, method: str, subset: str) -> None:
    pinned = json.loads(GOLDEN.read_text())[f"{case.name} {method} {subset}"]
    found = numbers(case, method, subset)
    for name, values in pinned.items():
        torch.testing.assert_close(
            torch.tensor(found[name], dtype=torch.float64),
            torch.tensor(values, dtype=torch.float64),
            rtol=1e-8,
            atol=1e-10,
            msg=lambda text, name=name: f"{name}: {text}",
        )


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({f"{c.name} {m} {s}": numbers(c, m, s) for c, m, s in runs()}))
