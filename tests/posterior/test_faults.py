"""An exception at every call of model, loader and eigendecomposition leaves all as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from laplace_debias import Laplace, evaluate, sweep_prior_precision
from laplace_debias.comparison import compare
from laplace_debias.kfac.thin import bases_of

X, Y = torch.randn(20, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
BATCHES = [(X[:10], Y[:10]), (X[10:], Y[10:])]
FEW = [(X[:4], Y[:4]), (X[4:6], Y[4:6])]
SOURCES = ("model", "loader", "eigendecomposition")


class Faults:
    """Counts the calls of one source, and raises at one of them."""

    def __init__(self, source: str) -> None:
        self.source, self.error = source, ZeroDivisionError
        self.arm(None)

    def __deepcopy__(self, memo: Any) -> Faults:
        """The copies of a model share its faults."""
        return self

    def arm(self, at: int | None) -> None:
        """Raise at that call from now on."""
        self.n_calls, self.at = 0, at

    def __call__(self, source: str) -> None:
        """Count a call of a source."""
        if source == self.source:
            self.n_calls += 1
            if self.n_calls == self.at:
                raise self.error("injected")


class Net(nn.Module):
    """A network with BatchNorm and an in-place activation."""

    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 3, bias=False), nn.Linear(8, 3)
        self.norm = nn.BatchNorm2d(2).requires_grad_(False)
        self.faults = faults

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[n, 1, 4, 4]`` to ``[n, 3]``."""
        self.faults("model")
        return self.head(torch.relu_(self.norm(self.conv(x))).flatten(1))


class Loader:
    """Mini-batches, each of which may be the one that cannot be read; so may the first and end."""

    def __init__(self, batches: Iterable[Any], faults: Faults) -> None:
        self.batches, self.faults = batches, faults

    def __iter__(self) -> Iterator[Any]:
        """Read."""
        for batch in self.batches:
            self.faults("loader")
            yield batch
        self.faults("loader")


class Data(Dataset):
    """Data by position, each of which may be the one that cannot be read."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults

    def __len__(self) -> int:
        """Their number."""
        return len(Y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Read one."""
        self.faults("loader")
        return X[i], Y[i]


def drawn(faults: Faults, batch_size: int = 5) -> DataLoader:
    return DataLoader(Data(faults), batch_size, shuffle=True, generator=torch.Generator())


@pytest.fixture
def faults(request, monkeypatch) -> Faults:
    """Faults of the source that the test names, with eigendecompositions that ask it."""
    faults = Faults(request.param)

    def counted(plain: Callable[..., Any]) -> Callable[..., Any]:
        def decomposition(*args: Any, **kwargs: Any) -> Any:
            faults("eigendecomposition")
            return plain(*args, **kwargs)

        return decomposition

    for name in ("eigh", "svd", "qr"):  # the latter of rows that are few
        monkeypatch.setattr(torch.linalg, name, counted(getattr(torch.linalg, name)))
    return faults


def trained(faults: Faults) -> Net:
    torch.manual_seed(0)
    model = Net(faults).train()
    model.head.bias.register_hook(lambda g: g)
    model.conv.register_forward_hook(lambda *_: None)
    model(X).sum().backward()  # statistics and gradients of the user's own
    return model


def of_model(model: nn.Module) -> list[Any]:
    """Everything of a model that must not change, and the global generator."""
    parts: list[Any] = [p.detach().clone() for p in model.parameters()]
    parts += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    parts += [b.clone() for b in model.buffers()]
    parts += [id(p) for p in model.parameters()] + [id(p.grad) for p in model.parameters()]
    parts += [[m.training for m in model.modules()], [p.requires_grad for p in model.parameters()]]
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    parts += [list(getattr(m, name).values()) for m in model.modules() for name in hooks]
    return [*parts, torch.get_rng_state()]


def of_posterior(la: Any) -> list[Any]:
    """Everything of a posterior that must not change, and of its model."""
    state = la.state_dict()
    tensors = [t.clone() for name in ("eigenvectors", "eigenvalues", "eigenvalues_biased")
               for block in state.pop(name) for t in block]  # fmt: skip
    tensors += [t.clone() for block in state.pop("curvatures") for t in block]
    plain = [value.clone() if isinstance(value, Tensor) else value for value in state.values()]
    return [*tensors, *plain, la.H.to_matrix(), id(la.H), id(la.fit_cost), *of_model(la.model)]


def assert_same(before: list[Any], after: list[Any]) -> None:
    for was, now in zip(before, after, strict=True):
        assert torch.equal(was, now) if isinstance(was, Tensor) else was == now


def inject(faults: Faults, call: Callable[[], Any], state: Callable[[], list[Any]]) -> int:
    """Let every call of a source fail, one after the other; return how many there were."""
    for n_faults in range(1000):
        before = state()
        faults.arm(n_faults + 1)
        try:
            call()
            return n_faults
        except Exception as error:
            assert "injected" in str(error)
        finally:
            faults.arm(None)
        assert_same(before, state())
    raise AssertionError("no end of calls")


OPTIONS = {
    "single": {"debias": "single"},
    "two-batch": {"debias": True},
    "crossfit": {"debias": "crossfit"},
    "curvature sampling": {"debias": "crossfit", "sampling": "curvature", "n_curvature": 6},
    "auto": {"debias": "auto", "n_passes": 12},
}


def fitted(faults: Faults, options: dict, subset: str = "all", override: bool = True) -> Any:
    generator = torch.Generator().manual_seed(0)
    la = Laplace(trained(faults), "classification", subset, "kron", generator=generator, **options)
    la.fit(BATCHES, override=override, n_data=50)
    return la


@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("faults", SOURCES, indirect=True)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.filterwarnings("ignore:The fit stops at an estimated distance")
def test_a_fit_that_fails_anywhere_changes_nothing(options, subset, faults):
    la = fitted(faults, options, subset)
    for data in (Loader(BATCHES, faults), drawn(faults)):
        n = inject(faults, lambda data=data: la.fit(data, n_data=60), lambda: of_posterior(la))
        assert n >= (2 if faults.source != "loader" else len(BATCHES))
        assert la.n_data == 60
        la.fit(BATCHES, n_data=50)


@pytest.mark.parametrize("faults", SOURCES, indirect=True)
@pytest.mark.parametrize("debias", ["single", True])
def test_a_fit_of_few_rows_that_fails_anywhere_changes_nothing(debias, faults):
    la = fitted(faults, {"debias": debias})
    few = [(X[:1], Y[:1]), (X[1:2], Y[1:2])]
    n = inject(faults, lambda: la.fit(Loader(few, faults), n_data=60), lambda: of_posterior(la))
    assert n >= 2 and any(Q.shape[1] < len(Q) for block in bases_of(la.H) for Q in block)


@pytest.mark.parametrize("faults", ["model", "loader", "eigendecomposition"], indirect=True)
def test_two_loaders_and_an_added_fit(faults):
    la = fitted(faults, OPTIONS["two-batch"], override=False)  # keeps the factors to add to
    first, second = (Loader([batch], faults) for batch in BATCHES)

    def call() -> None:
        la.fit(first, override=False, curvature_loader=second, n_data=60)

    assert inject(faults, call, lambda: of_posterior(la)) >= 4
    assert la.n_data == 110


@pytest.mark.parametrize("faults", ["eigendecomposition"], indirect=True)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_decomposition_that_does_not_converge_is_an_error_with_a_remedy(options, faults):
    la = fitted(faults, options)
    before = of_posterior(la)
    faults.error = torch.linalg.LinAlgError
    faults.arm(2)
    with pytest.raises(ValueError, match=r"eigendecomposition, got: injected. Remedy"):
        la.fit(BATCHES, n_data=60)
    faults.arm(None)
    assert_same(before, of_posterior(la))


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


CALLS = {
    "glm": lambda la, loader: la(X[:4]),
    "joint": lambda la, loader: la.output_moments(X[:4], joint=True),
    "samples": lambda la, loader: la(X[:4], link_approx="mc", n_samples=3, generator=seeded()),
    "nn": lambda la, loader: la(
        X[:4], pred_type="nn", link_approx="mc", n_samples=3, generator=seeded()
    ),
    "sweep": lambda la, loader: sweep_prior_precision(la, loader, [0.1, 1.0]),
    "grid search": lambda la, loader: la.optimize_prior_precision(
        method="gridsearch", val_loader=loader, grid_size=3
    ),
    "grid search, nn": lambda la, loader: la.optimize_prior_precision(
        pred_type="nn", link_approx="mc", method="gridsearch", val_loader=loader, grid_size=2,
        n_samples=2,
    ),
    "tune": lambda la, loader: la.tune(loader),
    "evaluate": lambda la, loader: evaluate(la, loader, ood_loader=loader),
    "expected bias": lambda la, loader: la.expected_bias(loader),
}  # fmt: skip


@pytest.mark.parametrize("faults", SOURCES, indirect=True)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("method", ["two-batch", "auto"])
@pytest.mark.filterwarnings("ignore:The best '.*' lies on the edge")
def test_a_prediction_that_fails_anywhere_changes_nothing(method, subset, name, faults):
    la = fitted(faults, OPTIONS[method], subset)
    loader = Loader(FEW, faults)

    def state() -> list[Any]:
        # another tensor, so that every prediction makes its predictor anew
        la.prior_precision = la.prior_precision.clone()
        *parts, rng = of_posterior(la)
        return parts if name == "grid search, nn" else [*parts, rng]  # it draws from the global one

    n = inject(faults, lambda: CALLS[name](la, loader), state)
    reads = name not in ("glm", "joint", "samples", "nn")
    if faults.source == "eigendecomposition":
        assert n == 0  # a fitted posterior keeps its own
    elif faults.source == "loader":
        assert n >= (len(FEW) + 1 if reads else 0)
    else:
        assert n >= (len(FEW) if reads else 1)


@pytest.mark.parametrize("structure", ["scalar", "layerwise"])
@pytest.mark.parametrize("faults", ["likelihood"], indirect=True)
def test_a_tuning_that_fails_anywhere_keeps_the_prior(structure, faults, monkeypatch):
    la = fitted(faults, OPTIONS["two-batch"])
    la.prior_precision = 7.0
    plain = la.log_marginal_likelihood

    def likelihood(*args: Any, **kwargs: Any) -> Tensor:
        faults("likelihood")
        return plain(*args, **kwargs)

    monkeypatch.setattr(la, "log_marginal_likelihood", likelihood)

    def call() -> None:
        la.optimize_prior_precision(method="marglik", n_steps=4, prior_structure=structure)

    assert inject(faults, call, lambda: of_posterior(la)) == 4
    assert (la.prior_precision != 7.0).all()


@pytest.mark.parametrize("faults", SOURCES, indirect=True)
def test_a_comparison_that_fails_anywhere_changes_nothing_and_goes_on(faults, tmp_path):
    model = trained(faults)
    options: dict[str, Any] = {
        "methods": ("plain", "single", "two-batch", "crossfit", "auto", "full"),
        "budgets": (8,),
        "n_draws": 1,
        "prior_precisions": (0.5, 5.0),
    }
    train = DataLoader(Data(faults), 10)
    test = Loader(FEW, faults)
    expected = compare(model, train, test, **options)

    def call() -> None:
        result = compare(model, train, test, folder=tmp_path, data_id="fixed", **options)
        assert result == expected

    n = inject(faults, call, lambda: of_model(model))
    assert n >= 8
    assert len(list(tmp_path.glob("*"))) >= 5  # what was finished between the faults was kept
