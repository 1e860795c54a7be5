"""Which layer owns which parameter, and which layers have a known curvature."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple, cast

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.parametrize import is_parametrized

from laplace_debias.network.layers import (
    KFAC_TYPES,
    NORM_TYPES,
    SUPPORTED_TYPES,
    KFACLayer,
    Norm,
    has_own_forward,
    is_kfac_layer,
    is_norm,
    is_transposed,
    n_pixels,
)
from laplace_debias.network.parametrized import (
    MOST_ENTRIES,
    effective,
    effective_step,
    originals,
)

__all__ = [
    "OwnedParameter",
    "RowsKey",
    "is_ordinary",
    "is_supported_layer",
    "kfac_layers",
    "owned_parameters",
    "owners",
    "rows_key",
    "transposed_parameters",
]


RowsKey = tuple[object, ...]
"""What the rows of a parameter are found by."""


class OwnedParameter(NamedTuple):
    """A parameter and the layers it belongs to.

    Attributes:
        name: Its name in the model.
        role: ``"weight"`` or ``"bias"``.
        layers: The layers that hold it; more than one if they share it.
        original: The parameter itself, if the layer's weight or bias is computed from it by a
            parametrisation.
    """

    name: str
    role: str
    layers: tuple[KFACLayer | Norm, ...]
    original: Tensor | None = None

    @property
    def scales(self) -> bool:
        """Whether it scales or shifts what a layer has normalised, see :func:`is_norm`."""
        return self.original is None and is_norm(self.layers[0])

    @property
    def has_one_factor(self) -> bool:
        """Whether its block is that of the GGN itself, from the gradients of whole data."""
        return self.original is not None or self.scales

    @property
    def tensor(self) -> Tensor:
        """The parameter."""
        if self.original is not None:
            return self.original
        return self.layers[0].get_parameter(self.role)

    @property
    def n_pixels(self) -> int:
        """Number of pixels in the patches that its input factor is of; 1 where there are none."""
        layer = self.layers[0]
        if self.role != "weight" or self.has_one_factor or not is_kfac_layer(layer):
            return 1
        return n_pixels(layer)

    @property
    def sides(self) -> tuple[int, ...]:
        """Dimensions of its Kronecker factors: of B, and for a weight of A."""
        p = self.tensor
        return (p.numel(),) if self.has_one_factor or p.ndim < 2 else (len(p), p[0].numel())

    def effective_step(self, step: Tensor) -> Tensor:
        """The step of what the layer computes with, given that of the parameter."""
        if self.original is None:
            return step
        return effective_step(effective(self.layers[0], self.role), self.original, step)


def owners(model: nn.Module, params: Iterable[Tensor]) -> dict[int, list[tuple[nn.Module, str]]]:
    """The modules that hold each parameter, and its name there.

    Args:
        model: The network.
        params: The parameters to look for.

    Returns:
        Pairs of module and name, by the ``id`` of the parameter.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> [name for _, name in owners(net, [net.bias])[id(net.bias)]]
        ['bias']
    """
    wanted = {id(p) for p in params}
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(p) in wanted:
                found.setdefault(id(p), []).append((module, name))
    return found


def owned_parameters(
    model: nn.Module, params: Iterable[Tensor] | None = None
) -> list[OwnedParameter]:
    """Which layers own each parameter, and as what.

    Args:
        model: The network.
        params: Parameters to look up; by default all that require a gradient.

    Returns:
        The parameters in the order of ``model.parameters()``.

    Raises:
        ValueError: If there is no parameter, or K-FAC cannot represent one.

    Example:
        >>> [(p.name, p.role) for p in owned_parameters(nn.Linear(2, 1))]
        [('weight', 'weight'), ('bias', 'bias')]
    """
    wanted = None if params is None else {id(p) for p in params}
    chosen = [
        (name, p)
        for name, p in model.named_parameters()
        if (p.requires_grad if wanted is None else id(p) in wanted)
    ]
    if not chosen:
        raise ValueError(
            "Expected a model with at least one parameter that requires a gradient, got none. "
            "Remedy: unfreeze the layers of interest with `requires_grad_(True)`."
        )
    holders = owners(model, (p for _, p in chosen))
    behind = originals(model) if any(map(is_parametrized, model.modules())) else {}
    owned, unsupported = [], []
    for name, p in chosen:
        layer, role = behind.get(id(p), (None, ""))
        if layer is not None and is_supported_layer(layer, SUPPORTED_TYPES):
            if len(holders[id(p)]) == 1 and p.numel() <= MOST_ENTRIES:
                owned.append(OwnedParameter(name, role, (cast(KFACLayer, layer),), p))
                continue
        roles = {role for _, role in holders[id(p)]}
        modules = [module for module, _ in holders[id(p)]]
        layers = tuple(module for module in modules if is_kfac_layer(module) or is_norm(module))
        alike = len({is_norm(layer) for layer in layers}) == 1
        alike &= len({is_transposed(layer) for layer in layers}) == 1
        if len(roles) > 1 or len(layers) < len(modules) or not alike:
            kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
            unsupported.append((name, kinds))
        owned.append(OwnedParameter(name, roles.pop(), layers))
    if unsupported:
        found = ", ".join(f"{name} ({kinds})" for name, kinds in unsupported)
        remedy = "; ".join(
            f'model.get_parameter("{name}").requires_grad_(False)' for name, _ in unsupported
        )
        raise ValueError(
            "Expected every parameter that requires a gradient to belong to a linear layer, a "
            f"convolution or a normalisation, got {found}. Remedy: freeze what K-FAC cannot "
            f"represent: {remedy}"
        )
    return owned


def transposed_parameters(model: nn.Module, params: Iterable[Tensor]) -> list[bool]:
    """Which parameters are weights ``[d_in, d_out]``, as those of transformers' ``Conv1D`` are.

    Args:
        model: The network.
        params: The parameters.

    Returns:
        One answer per parameter.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> transposed_parameters(net, net.parameters())
        [False, False]
    """
    params = list(params)
    found = owners(model, params)
    return [p.ndim > 1 and any(is_transposed(m) for m, _ in found.get(id(p), [])) for p in params]


def is_ordinary(module: nn.Module) -> bool:
    """Whether a module computes what its class is known for, and no more.

    That is ``nn.Linear``, ``nn.Conv2d``, a normalisation or the ``Conv1D`` of transformers.

    Args:
        module: Any module.

    Returns:
        False for other layers, and for subclasses and instances with a ``forward`` of their own.

    Example:
        >>> is_ordinary(nn.Linear(2, 1)), is_ordinary(nn.Tanh())
        (True, False)
    """
    if is_transposed(module):
        return "forward" not in vars(module)
    known = isinstance(module, nn.Linear | nn.Conv2d) and not has_own_forward(module)
    return known or is_norm(module)


def kfac_layers(
    model: nn.Module, types: tuple[type[nn.Module], ...] = KFAC_TYPES
) -> dict[str, nn.Module]:
    """Layers of the given types that hold at least one trainable parameter of their own.

    Args:
        model: The network.
        types: Layer classes that count.

    Returns:
        Module names to modules, in the order of ``model.named_modules()``.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        >>> list(kfac_layers(net))
        ['0', '2']
    """
    return {
        name: module
        for name, module in model.named_modules()
        if is_supported_layer(module, types)
        and any(p.requires_grad for p in _own_parameters(module, types))
    }


def _own_parameters(
    module: nn.Module, types: tuple[type[nn.Module], ...]
) -> Iterator[nn.Parameter]:
    """The parameters of a layer itself, with those behind its parametrised weights."""
    yield from module.parameters(recurse=False)
    if nn.LayerNorm in types and is_parametrized(module):
        yield from module.parametrizations.parameters()  # type: ignore[union-attr]


def is_supported_layer(module: nn.Module, types: tuple[type[nn.Module], ...]) -> bool:
    """Whether the curvature of a module's own parameters is known.

    Args:
        module: Any module.
        types: Layer classes that a backend can represent.

    Returns:
        False for the output projection of ``nn.MultiheadAttention`` as well, which no hook sees.

    Example:
        >>> is_supported_layer(nn.Linear(2, 1), KFAC_TYPES)
        True
    """
    if isinstance(module, NORM_TYPES):
        return isinstance(module, types) and is_norm(module)
    if is_transposed(module):
        return nn.LayerNorm in types  # this package's own engine
    return isinstance(module, types) and not isinstance(module, NonDynamicallyQuantizableLinear)


def rows_key(parameter: OwnedParameter) -> RowsKey:
    """Its layers, as a weight and a bias share their rows; scales and shifts have their own.

    Args:
        parameter: The parameter.

    Returns:
        The layers, for a scale or shift with its role.

    Example:
        >>> norm = nn.LayerNorm(2)
        >>> rows_key(OwnedParameter("1.bias", "bias", (norm,))) == (norm, "bias")
        True
    """
    return (*parameter.layers, parameter.role) if parameter.scales else parameter.layers
