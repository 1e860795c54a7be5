"""Kronecker factors of one mini-batch from laplace-torch's backends, in this package's conventions.

What differs between the backends is evened out here (see :mod:`laplace_debias.kfac.factors` for the
conventions): ASDL's input factor of a linear layer sums over positions, its blocks of one-element
weights sum over data; every backend returns a bias block for a frozen bias. BackPACK's blocks of
convolutions follow another approximation (positions are summed before the outer product), so they
are on another scale; they are passed on as they are.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from laplace.curvature import BackPackGGN, CurvatureInterface
from laplace.curvature.asdl import AsdlInterface
from laplace.utils import FeatureExtractor
from torch import Tensor, nn

from laplace_debias.data.reading import check_targets
from laplace_debias.kfac.backend import HookGGN, HookInterface
from laplace_debias.kfac.factors import Block, DataFactors
from laplace_debias.network.ownership import KFAC_TYPES, kfac_layers
from laplace_debias.network.preserve import preserved

__all__ = ["choose_backend", "computing_model", "factor_function", "supported_types"]

FactorFunction = Callable[[Any, Tensor], DataFactors]


def supported_types(backend: type[CurvatureInterface]) -> tuple[type[nn.Module], ...]:
    """Layer classes for which a backend has Kronecker factors.

    Args:
        backend: A backend class of laplace-torch.

    Returns:
        The layer classes.

    Example:
        >>> [t.__name__ for t in supported_types(HookGGN)]
        ['Linear', 'Conv1d', 'Conv2d', 'Conv3d']
    """
    if issubclass(backend, HookInterface):
        return KFAC_TYPES
    common = (nn.Linear, nn.Conv2d)
    return (*common, nn.Conv1d) if issubclass(backend, BackPackGGN) else common


def choose_backend(
    backend: type[CurvatureInterface] | None, model: nn.Module
) -> type[CurvatureInterface]:
    """The backend to use: the user's choice, or this package's own.

    Args:
        backend: The user's choice, or ``None``.
        model: The network.

    Returns:
        A backend class.

    Raises:
        ValueError: If the user chose ASDL and the model has layers that ASDL refuses or, with
            groups, gets wrong in silence.

    Example:
        >>> choose_backend(None, nn.Linear(2, 1)).__name__
        'HookGGN'
    """
    if backend is None:
        return HookGGN
    if not issubclass(backend, AsdlInterface):
        return backend
    refused = [
        f"'{name}' (dilation={m.dilation}, groups={m.groups}, padding={m.padding!r})"
        for name, m in kfac_layers(model).items()
        if isinstance(m, nn.Conv2d)
        and (m.dilation != (1, 1) or m.groups != 1 or isinstance(m.padding, str))
    ]
    if refused:
        raise ValueError(
            f"{backend.__name__} expected convolutions without dilation, groups or named padding, "
            f"got {', '.join(refused)}. Remedy: leave `backend` out, or pass `CurvlinopsGGN`."
        )
    return backend


@contextmanager
def factor_function(
    backend: type[CurvatureInterface],
    model: nn.Module,
    likelihood: str,
    *,
    last_layer: bool = False,
    backend_kwargs: dict[str, Any] | None = None,
    kron_kwargs: dict[str, Any] | None = None,
) -> Iterator[FactorFunction]:
    """Make a function that turns a mini-batch into Kronecker factors; the model is left as it was.

    Args:
        backend: A backend class of laplace-torch.
        model: The network, for ``last_layer`` a ``FeatureExtractor`` that knows its last layer.
        likelihood: ``"classification"`` or ``"regression"``.
        last_layer: Whether only the last layer is Bayesian.
        backend_kwargs: For the backend's constructor.
        kron_kwargs: For the backend's ``kron``.

    Yields:
        ``f(X, y)``, which checks the targets against the model's outputs and returns the
        :class:`~laplace_debias.kfac.factors.DataFactors` of these m data.

    Example:
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        >>> with factor_function(HookGGN, net, "classification") as factors_of:
        ...     factors = factors_of(torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1]))
        >>> [[tuple(factor.shape) for factor in block] for block in factors.blocks]
        [[(4, 4), (3, 3)], [(4, 4)], [(2, 2), (4, 4)], [(2, 2)]]
    """
    with computing_model(model, last_layer) as (model, cast), warnings.catch_warnings():
        # ASDL's hooks see all they need, and what it ignores is frozen here
        warnings.filterwarnings("ignore", message="Using a non-full backward hook")
        warnings.filterwarnings("ignore", message="BatchNorm unsupported for Kron")
        root = model.last_layer if last_layer else model
        wanted = [name for name, p in root.named_parameters() if p.requires_grad or last_layer]
        layers = {"": root} if last_layer else kfac_layers(root, supported_types(backend))
        computed = wanted
        if last_layer or not issubclass(backend, HookInterface):
            for layer in layers.values():  # the others know whole layers only
                layer.requires_grad_(True)
            computed = [
                f"{prefix}.{name}".lstrip(".")
                for prefix, layer in layers.items()
                for name, _ in layer.named_parameters(recurse=False)
            ]
        engine = backend(model, likelihood, **(backend_kwargs or {}))

        def factors_of(X: Any, y: Tensor) -> DataFactors:
            X, y = cast(X), cast(y)
            shape, positions = _probe(model, layers, X, len(y))
            check_targets(y, shape, likelihood)
            loss, kron = engine.kron(X, y, N=len(y), **(kron_kwargs or {}))
            if len(kron.kfacs) != len(computed):
                raise ValueError(
                    f"Expected {backend.__name__} to return one block for each of {computed}, got "
                    f"{len(kron.kfacs)} blocks. Remedy: use another backend, e.g. "
                    "`backend=CurvlinopsGGN`."
                )
            blocks = dict(zip(computed, kron.kfacs, strict=True))
            if issubclass(backend, AsdlInterface):
                _to_convention(blocks, positions, len(y))
            kept = [[factor.detach() for factor in blocks[name]] for name in wanted]
            return DataFactors(kept, len(y), loss.detach(), shape[-1])

        yield factors_of


@contextmanager
def computing_model(
    model: nn.Module, last_layer: bool = False
) -> Iterator[tuple[nn.Module, Callable[[Any], Any]]]:
    """The model to compute factors with, in evaluation mode; it is left as it was.

    Half-precision models are copied to float32 for this, because sums of outer products overflow
    (float16) or drown (bfloat16) in their own precision.

    Args:
        model: The network, for ``last_layer`` a ``FeatureExtractor`` that knows its last layer.
        last_layer: Whether only the last layer is Bayesian.

    Yields:
        The model, and a function that casts its inputs and targets.

    Example:
        >>> with computing_model(nn.Linear(2, 1).half()) as (model, cast):
        ...     model(cast(torch.ones(1, 2).half())).dtype
        torch.float32
    """
    half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)
    if half:
        model = _float32_copy(model, last_layer)
    with preserved(model):
        model.eval()
        yield model, (_to_float32 if half else lambda value: value)


@torch.no_grad()
def _probe(
    model: nn.Module, layers: dict[str, nn.Module], X: Any, n: int
) -> tuple[torch.Size, dict[str, list[float]]]:
    """Output shape, and positions per datum in each call of each layer, from the first datum.

    Mappings cannot be sliced, so there all n data pass. A layer that is never called is an error.
    """
    seen: dict[str, list[float]] = {name: [] for name in layers}
    n_probe = 1 if isinstance(X, Tensor) else n

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
            rows = inputs[0].shape[:-1].numel() if isinstance(module, nn.Linear) else n_probe
            seen[name].append(rows / n_probe)

        return hook

    handles = [layer.register_forward_hook(record(name)) for name, layer in layers.items()]
    try:
        f = model(X[:1] if isinstance(X, Tensor) else X)
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(f, Tensor):
        raise ValueError(
            f"Expected the model to return a tensor of outputs, got {type(f).__name__}. Remedy: "
            "wrap it in a module that returns the outputs alone."
        )
    silent = [name for name, calls in seen.items() if not calls]
    if silent:
        raise ValueError(
            "Expected the forward pass to call every trainable layer, got none for "
            f"{', '.join(map(repr, silent))}. Remedy: freeze what is not used, e.g. "
            f"`model.get_submodule({silent[0]!r}).requires_grad_(False)`."
        )
    return f.shape, seen


def _to_convention(blocks: dict[str, Block], positions: dict[str, list[float]], n: int) -> None:
    """Divide ASDL's sums over positions (linear) and over data (one-element weights)."""
    for layer, calls in positions.items():
        name = f"{layer}.weight".lstrip(".")
        if len(set(calls)) > 1:
            raise ValueError(
                f"Expected '{layer}' to see equally many positions in each of its calls, got "
                f"{calls}; ASDL adds them up. Remedy: pass `backend=CurvlinopsGGN`."
            )
        scale = 1 / calls[0] if len(blocks[name]) == 2 else 1 / (calls[0] * n)
        blocks[name][-1] = blocks[name][-1] * scale


def _float32_copy(model: nn.Module, last_layer: bool) -> nn.Module:
    """The model in float32; a feature extractor's hook must point to the copy, so it is rebuilt."""
    if not last_layer:
        return copy.deepcopy(model).float()
    inner = copy.deepcopy(model.model).float()
    inner.get_submodule(model._last_layer_name)._forward_hooks.clear()
    return FeatureExtractor(
        inner,
        last_layer_name=model._last_layer_name,
        enable_backprop=model.enable_backprop,
        feature_reduction=model.feature_reduction,
    )


def _to_float32(value: Any) -> Any:
    """Cast half-precision tensors, also inside a mapping."""
    if isinstance(value, MutableMapping):
        cast = copy.copy(value)
        for key in value:
            cast[key] = _to_float32(value[key])
        return cast
    if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.float()
    return value
