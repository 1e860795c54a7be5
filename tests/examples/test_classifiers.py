"""Problems for the research examples: All-CNN-C by its weights, and options that go together."""

import pytest
import torch

from examples.classifiers import trained_problem
from examples.networks import all_cnn_c


def test_cifar10_loads_the_weights_of_all_cnn_c(cifar10_folder, tmp_path):
    torch.manual_seed(0)
    model = all_cnn_c()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    problem = trained_problem(
        "cifar10", folder=cifar10_folder, weights=tmp_path / "weights.pt", test_size=5
    )
    assert problem.n == 50
    assert len(problem.test_loader.dataset) == 5
    with torch.no_grad():
        torch.testing.assert_close(problem.model(problem.x[:3]), model(problem.x[:3]))
    assert [p.requires_grad for p in problem.model.parameters()] == 9 * [True, False]


def test_wrong_options_say_what_to_do(tmp_path):
    with pytest.raises(ValueError, match="--folder"):
        trained_problem("cifar10")
    with pytest.raises(ValueError, match="cifar10 only"):
        trained_problem("digits", weights=tmp_path)
