"""Outputs that do not belong to their data are found out."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laplace_debias.network.verify import check_data, check_order


class Function(nn.Module):
    """A network of one function."""

    def __init__(self, function):
        """Keep the function."""
        super().__init__()
        self.function = function

    def forward(self, x):
        """Apply it."""
        return self.function(x)


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (torch.tanh, None),
        (lambda x: x[x[:, 0].argsort()], "outputs do not follow the order of the data"),
        (lambda x: x[x[:, 0].argsort(descending=True)], "outputs do not follow the order"),
        (lambda x: x - x.mean(0), "an output depends on which data pass together"),
        (lambda x: F.dropout(x, 0.5, True), "outputs do not follow the order of the data"),
    ],
)
def test_what_is_wrong_is_said(function, wrong):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    before = torch.get_rng_state()
    found = check_order(Function(function), x)
    assert found == wrong if wrong is None else found.startswith(wrong)
    assert torch.equal(torch.get_rng_state(), before)


def test_tables_are_found_in_mappings_by_a_pass_of_all():
    table = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    model = Function(lambda batch: batch["x"] @ batch["table"].T @ batch["table"])
    x = {"x": torch.ones(4, 3), "table": table}
    assert "differ from those of the whole mini-batch" in check_data(model, x, "x")
    assert check_data(model, x, ("x",)) is None
    strict = Function(lambda batch: batch["x"] @ batch["table"].reshape(4, 3).T)
    assert "raises for some of the data" in check_data(strict, x, "x")
