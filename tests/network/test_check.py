"""Nothing is wrong in silence: models that hooks cannot explain work, or are refused by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from laplace_debias import Laplace, check_model
from laplace_debias.network.check import agree, check_rows
from laplace_debias.network.ownership import owned_parameters
from tests import oracles
from tests.cases import seeded
from tests.oracles_predictive import dense_covariance, marginal

N = 40
EXACT = {"rtol": 1e-8, "atol": 1e-10}


def function(forward: Callable[..., Tensor], **layers: nn.Module) -> nn.Module:
    """A network of some layers in double precision, always with the same weights."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, layer in layers.items():
                setattr(self, name, layer)

    Net.forward = forward
    return Net().double()


def batches(*shape: int, n: int = 6) -> list[tuple[Tensor, Tensor]]:
    gen = torch.Generator().manual_seed(1)
    return [(torch.randn(n, *shape, generator=gen).double(), torch.arange(n) % 3) for _ in range(2)]


def fitted(model: nn.Module, data: list, subset: str = "all", **options: object):
    options = {"debias": "single", **options}
    la = Laplace(model, "classification", subset, "kron", **options)
    la.fit(data, n_data=N)
    return la


def assert_fit(model: nn.Module, data: list) -> None:
    """The posterior equals K-FAC by its definition, and the prediction a dense Jacobian's."""
    la = fitted(model, data)
    X, y = (torch.cat(part) for part in zip(*data, strict=True))
    expected = oracles.dense(oracles.kfac(model, X, y, "classification"), N / len(y))
    torch.testing.assert_close(la.H.to_matrix(), expected, **EXACT)
    assert_prediction(la, X[:5])


def assert_prediction(la, X: Tensor) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the slow, exact way says so
        _, covariance = la.output_moments(X)
    torch.testing.assert_close(
        covariance, marginal(dense_covariance(la, X, la.prior_precision)), **EXACT
    )


# %% 1. In-place activations after a layer over tokens
def test_an_in_place_activation_on_a_view_is_exact():
    def forward(self, x):
        return self.head(torch.relu_(self.embed(x)).mean(1))

    layers = seeded(lambda: nn.ModuleDict({"embed": nn.Linear(3, 4), "head": nn.Linear(4, 3)}))
    model = function(forward, **dict(layers))
    plain = function(lambda self, x: self.head(torch.relu(self.embed(x)).mean(1)), **dict(layers))
    data = batches(5, 3)
    X, y = (torch.cat(part) for part in zip(*data, strict=True))
    expected = oracles.dense(oracles.kfac(plain, X, y, "classification"), N / len(y))
    la = fitted(model, data)
    torch.testing.assert_close(la.H.to_matrix(), expected, **EXACT)
    assert_prediction(la, X[:5])


# %% 2. Layers that compute something else
class SamePadding(nn.Conv2d):
    """TensorFlow's: as many outputs as inputs over the stride, the odd zero at the end."""

    def forward(self, x: Tensor) -> Tensor:
        """Pad, then convolve without padding."""
        pads = []
        for size, k, s in zip(
            x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True
        ):
            total = max((-(-size // s) - 1) * s + k - size, 0)
            pads += [total // 2, total - total // 2]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride)


class SuperPadding(nn.Conv2d):
    """Pads, and leaves the rest to its class."""

    def forward(self, x: Tensor) -> Tensor:
        """Pad on one side."""
        return super().forward(F.pad(x, (0, 1, 2, 0)))


def conv_net(conv: nn.Module) -> nn.Module:
    return nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))


@pytest.mark.parametrize("kind", [SamePadding, SuperPadding])
def test_convolutions_that_pad_themselves_are_exact(kind):
    model = seeded(lambda: conv_net(kind(2, 4, 3, stride=2))).double()
    pad = (0, 1, 0, 1) if kind is SamePadding else (0, 1, 2, 0)
    plain = seeded(lambda: conv_net(nn.Conv2d(2, 4, 3, stride=2))).double()
    data = batches(2, 6, 6)
    X, y = (torch.cat(part) for part in zip(*data, strict=True))
    expected = oracles.dense(oracles.kfac(plain, F.pad(X, pad), y, "classification"), N / len(y))
    la = fitted(model, data)
    torch.testing.assert_close(la.H.to_matrix(), expected, **EXACT)
    assert_prediction(la, X[:4])


class UnitRows(nn.Module):
    """A parametrisation."""

    def forward(self, W: Tensor) -> Tensor:
        """Scale the rows."""
        return W / W.norm(dim=1, keepdim=True)


def parametrized() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    parametrize.register_parametrization(model[0], "weight", UnitRows())
    return model


def test_a_parametrised_weight_works_as_it_is_frozen_and_baked_in():
    model, data = seeded(parametrized), batches(3)
    assert "0.parametrizations.weight.original" in fitted(model, data).parameter_names
    model[0].parametrizations.weight.original.requires_grad_(False)
    baked = seeded(parametrized)
    parametrize.remove_parametrizations(baked[0], "weight")
    assert_fit(baked, data)
    la, reference = fitted(model, data), fitted(baked, data)
    blocks, expected = (
        dict(zip(each.parameter_names, each.H.eigenvalues, strict=True)) for each in (la, reference)
    )
    assert list(blocks) == ["0.bias", "2.weight", "2.bias"]
    for name, block in blocks.items():
        for lam, lam_other in zip(block, expected[name], strict=True):
            torch.testing.assert_close(lam, lam_other, **EXACT)
    assert_prediction(la, data[0][0])


class Standardised(nn.Conv2d):
    """Weight standardisation."""

    def forward(self, x: Tensor) -> Tensor:
        """Centre the kernels."""
        return F.conv2d(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), self.bias)


class Equalised(nn.Conv2d):
    """Equalised learning rate."""

    def forward(self, x: Tensor) -> Tensor:
        """Scale the kernels."""
        return F.conv2d(x, 0.3 * self.weight, self.bias)


class Masked(nn.Conv2d):
    """A masked convolution."""

    def forward(self, x: Tensor) -> Tensor:
        """Hide a part of the kernel."""
        mask = torch.ones_like(self.weight)
        mask[..., 1:] = 0
        return F.conv2d(x, self.weight * mask, self.bias)


class Cosine(nn.Conv2d):
    """Kernels of unit length."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the kernels."""
        return F.conv2d(x, F.normalize(self.weight.flatten(1)).view_as(self.weight), self.bias)


@pytest.mark.parametrize("kind", [Standardised, Equalised, Masked, Cosine])
def test_layers_that_change_their_weight_are_refused_by_name(kind):
    model, data = seeded(lambda: conv_net(kind(2, 4, 3))).double(), batches(2, 6, 6)
    with pytest.raises(ValueError, match=rf"0.weight \({kind.__name__}\): .*Remedy") as caught:
        fitted(model, data)
    assert "4.weight" not in str(caught.value) and "0.bias" not in str(caught.value)
    check = check_model(model, data[0][0], "classification")
    assert [layer.status for layer in check.layers] == [
        "not supported", "approximated", "exact", "exact",
    ]  # fmt: skip
    assert not check.supported and "0.weight" in str(check)
    assert_prediction(fitted(model, data, verify=False), data[0][0])


def test_hooks_of_the_user_that_change_an_output_are_exact():
    plain = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))).double()
    hooked = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))).double()
    scale = torch.tensor([0.5, 2.0, 1.0, -1.0]).double()
    hooked[0].register_forward_hook(lambda layer, args, output: scale * output)

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scale * x

    plain = nn.Sequential(plain[0], Scale(), *plain[1:])
    data = batches(3)
    X, y = (torch.cat(part) for part in zip(*data, strict=True))
    expected = oracles.dense(oracles.kfac(plain, X, y, "classification"), N / len(y))
    la = fitted(hooked, data)
    torch.testing.assert_close(la.H.to_matrix(), expected, **EXACT)
    assert_prediction(la, X[:4])


# %% 3. Tied weights
def test_a_weight_used_outside_its_layer_is_refused_by_name():
    def forward(self, x):
        return self.head(F.linear(torch.tanh(self.encode(x)), self.encode.weight.T))

    model = function(forward, encode=nn.Linear(3, 4), head=nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"encode.weight \(Linear\): its weight is used outside"):
        fitted(model, batches(3))
    owned = owned_parameters(model)
    assert check_rows(model, batches(3)[0][0], owned).unexplained == ("encode.weight",)


@pytest.mark.parametrize("vain", [lambda h: h.detach(), torch.zeros_like])
def test_a_layer_that_is_called_in_vain_is_refused_by_name(vain):
    """Its A would have rows that no output depends on, and B none of them."""

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)) + vain(self.body(-3 * x)))

    model = function(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"body.weight \(Linear\).*detached or not used"):
        fitted(model, batches(3))
    rows = check_rows(model, batches(3)[0][0], owned_parameters(model))
    assert rows.detached == ("body.weight", "body.bias") and not rows.unexplained


# %% 4. A last layer that is not the end
@pytest.mark.parametrize("after", [lambda f: f / 1.7, torch.log_softmax, torch.tanh])
def test_a_last_layer_that_is_not_the_end_is_refused_by_name(after):
    def forward(self, x):
        f = self.head(torch.tanh(self.body(x)))
        return after(f, -1) if after is torch.log_softmax else after(f)

    model = function(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 3))
    with pytest.raises(ValueError, match="end in its last layer 'head'.*Remedy"):
        fitted(model, batches(3), "last_layer")
    la = fitted(model, batches(3), "last_layer", verify=False)
    la.verify = True
    with pytest.raises(ValueError, match="end in its last layer 'head'.*Remedy"):
        la(batches(3)[0][0])


# %% 5. Models that reorder their mini-batch
def test_sorted_data_that_come_back_in_order_are_exact():
    def forward(self, x):
        order = x[:, 0].argsort()
        return self.head(torch.tanh(self.body(x[order])))[order.argsort()]

    model = function(forward, body=nn.Linear(3, 4), head=nn.Linear(4, 3))
    data = batches(3)
    assert_fit(model, data)
    with pytest.warns(UserWarning, match="body.weight.*exact but slow: .*other data"):
        fitted(model, data).output_moments(data[0][0])


def test_data_that_come_back_in_another_order_are_refused():
    def forward(self, x):
        return self.body(x[x[:, 0].argsort()])

    model = function(forward, body=nn.Linear(3, 3))
    with pytest.raises(ValueError, match="order of the data.*reorders.*Remedy"):
        fitted(model, batches(3))
    la = fitted(model, batches(3), verify=False)
    la.verify = True
    with pytest.raises(ValueError, match="order of the data.*reorders.*Remedy"):
        la(batches(3)[0][0])


# %% 6. Mappings with a table of n rows
def anchored() -> nn.Module:
    def forward(self, batch):
        near = torch.cdist(batch["x"], batch["anchors"]).exp().neg() @ batch["anchors"]
        return self.head(torch.tanh(self.body(near)))

    body, head = seeded(lambda: nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 3)]))
    return function(forward, body=body, head=head)


@pytest.mark.parametrize("debias", ["single", "crossfit"])
def test_a_table_of_n_rows_is_refused_and_works_once_the_keys_are_named(debias):
    model, pairs = anchored(), batches(3)
    anchors = torch.randn(6, 3, generator=torch.Generator().manual_seed(5)).double()
    data = [{"x": X, "anchors": anchors, "y": y} for X, y in pairs]
    keys = {"dict_key_x": "x", "dict_key_y": "y", "debias": debias}
    with pytest.raises(ValueError, match="'anchors'.*data_keys"):
        fitted(model, data, **keys)
    la = fitted(model, data, data_keys=("x",), **keys)

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def forward(self, x: Tensor) -> Tensor:
            return self.net({"x": x, "anchors": anchors})

    expected = fitted(Plain(), pairs, debias=debias)
    torch.testing.assert_close(la.H.to_matrix(), expected.H.to_matrix(), **EXACT)
    if debias == "single":
        assert_fit(Plain(), pairs)
    la.memory_budget = 1  # datum by datum
    for mine, theirs in zip(
        la.output_moments(data[0]), expected.output_moments(pairs[0][0]), strict=True
    ):
        torch.testing.assert_close(mine, theirs, **EXACT)
    la.data_keys = None
    with pytest.raises(ValueError, match="'anchors'.*data_keys"):
        la.output_moments({**data[0], "unused": 1.0})


# %% 7. Data-dependent routing
def routed(low: float = 0.0) -> nn.Module:
    def forward(self, x):
        right = x[:, 0] > low
        h = x.new_zeros(len(x), 4)
        if right.any():
            h = h.index_put((right,), self.right(x[right]))
        if (~right).any():
            h = h.index_put((~right,), self.left(x[~right]))
        return self.head(torch.tanh(h))

    left, right, head = seeded(
        lambda: nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)])
    )
    return function(forward, left=left, right=right, head=head)


def routed_oracle(model: nn.Module, X: Tensor, y: Tensor) -> Tensor:
    """K-FAC of each expert from the data that reach it, of the head from all."""
    right = X[:, 0] > 0
    blocks = {}
    for name, rows in (("left", ~right), ("right", right), ("head", right | ~right)):
        frozen = [p for n, p in model.named_parameters() if not n.startswith(name)]
        for p in frozen:
            p.requires_grad_(False)
        layer = model.get_submodule(name)
        A, B = 0.0, 0.0
        for x, target in zip(X[rows], y[rows], strict=True):
            a, g, f = oracles.layer_io(model, layer, x)
            H = oracles.output_hessian(f, target, "classification", "ggn")
            A, B = A + a.T @ a, B + sum(g_t.T @ H @ g_t for g_t in g)
        blocks[f"{name}.weight"], blocks[f"{name}.bias"] = [B, A / int(rows.sum())], [B]
        for p in frozen:
            p.requires_grad_(True)
    return oracles.dense(blocks, N / len(y))


def test_routing_is_exact_also_where_few_data_or_none_reach_a_layer():
    model, ((X, y), (X2, y2)) = routed(), batches(3)
    X, X2 = X.clone(), X2.clone()
    X[:, 0] = torch.tensor([-1.0, -2.0, -0.5, -0.3, 1.0, -0.7])  # the first data go left
    for X2[:, 0] in (torch.tensor([1.0, 2.0, -0.5, 0.3, 1.0, 0.7]), torch.full((6,), -1.0)):
        la = fitted(model, [(X, y), (X2, y2)])
        both = torch.cat([X, X2]), torch.cat([y, y2])
        torch.testing.assert_close(la.H.to_matrix(), routed_oracle(model, *both), **EXACT)
        assert_prediction(la, both[0][:7])
        assert_prediction(la, both[0][7:])
    assert check_model(model, X, "classification").supported


def test_layers_that_no_datum_reaches_are_refused_by_name():
    model, data = routed(low=100.0), batches(3)
    with pytest.raises(ValueError, match=r"right.weight.*no datum of the first mini-batch.*freeze"):
        fitted(model, data)
    check = check_model(model, data[0][0], "classification")
    assert [layer.name for layer in check.layers if layer.status == "not supported"] == [
        "right.weight", "right.bias",
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_agreement_is_up_to_rounding(dtype):
    one = torch.randn(50, dtype=dtype)
    eps = torch.finfo(dtype).eps
    assert agree(one, one * (1 + 10 * eps)) and not agree(one, one * (1 + 10 * eps**0.5))
    assert agree(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
    assert not agree(torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")]))
