"""The paper's settings, and the epochs whose weights are kept."""

import pytest

from examples.cifar10 import recipes
from examples.cifar10.train import make_optimizer
from examples.networks import all_cnn_c


def test_checkpoints_are_log_spaced():
    epochs = recipes.checkpoint_epochs(350)
    assert epochs == [1, 2, 4, 7, 14, 26, 50, 95, 183, 350]
    assert recipes.checkpoint_epochs(12)[-1] == 12
    assert len(set(recipes.checkpoint_epochs(12))) == 10
    assert recipes.checkpoint_epochs(3) == [1, 2, 3]


def test_the_papers_recipe():
    recipe = recipes.paper_recipe("allcnnc", "cifar10")
    rates = [recipes.learning_rate(recipe, epoch, 0, 10) for epoch in (0, 199, 200, 250, 349)]
    assert rates == pytest.approx([0.025, 0.025, 0.0025, 0.00025, 0.000025])
    optimizer = make_optimizer(all_cnn_c(), recipe)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-3, 0.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [9, 9]
    short = recipes.short_recipe(recipe)
    ends = (
        recipes.learning_rate(short, 0, 0, 5),
        recipes.learning_rate(short, short.epochs - 1, 4, 5),
    )
    assert ends == pytest.approx((0.01, 0.0001))
