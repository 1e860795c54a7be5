"""Factors of many images, accumulated in a file that survives interruptions and grows."""

import pytest
import torch

from examples.cifar10 import reference
from examples.cifar10.data import normalise
from examples.networks import make_model
from laplace_debias.kfac.engine import kfac_factors
from tests.examples.cifar10.agreement import assert_same
from tests.examples.cifar10.conftest import MODEL


def test_reference_goes_on_and_grows(problem, tmp_path):
    model, train = problem
    path = tmp_path / "reference.pt"
    options = dict(chunk=3, save_every=5, seed=4)
    stopped = reference.reference_factors(model, train, 20, path, max_images=7, **options)
    assert stopped.n == 7
    resumed = reference.reference_factors(model, train, 20, path, **options)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(4))

    def oracle(n):
        X, y = normalise(train.images[order[:n]], torch.float64), train.labels
        model64 = make_model(MODEL).double()
        model64.load_state_dict(model.state_dict())
        for name, p in model64.named_parameters():
            p.requires_grad_(name.endswith("weight"))
        return kfac_factors(model64, X, y[order[:n]], likelihood="classification")

    assert_same(resumed, oracle(20))
    assert_same(reference.reference_factors(model, train, 32, path, **options), oracle(32))
    assert next(model.parameters()).dtype == torch.float32
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="at most 20 images in .* got 32"):
        reference.reference_factors(model, train, 20, path, **options)
    with pytest.raises(ValueError, match="'seed': \\(4, 5\\)"):
        reference.reference_factors(model, train, 32, path, seed=5)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(ValueError, match="'model'"):
        reference.reference_factors(model, train, 32, path, **options)
    with pytest.raises(ValueError, match="between 1 and 32, got 33"):
        reference.reference_factors(model, train, 33, path, **options)


def test_a_finished_reference_computes_nothing(problem, tmp_path, monkeypatch):
    model, train = problem
    first = reference.reference_factors(model, train, 8, tmp_path / "reference.pt")
    monkeypatch.setattr(reference, "factors_of", None)
    assert_same(reference.reference_factors(model, train, 8, tmp_path / "reference.pt"), first)
