"""Which layer owns which parameter, which of them K-FAC can represent, how to freeze the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, get_args

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from laplace_debias.network.products import has_own_forward
from laplace_debias.network.unfold import Conv

__all__ = [
    "KFAC_TYPES",
    "KFACLayer",
    "OwnedParameter",
    "check_supported",
    "freeze_unsupported",
    "is_ordinary",
    "kfac_layers",
    "owned_parameters",
    "owners",
    "unsupported_parameters",
]

KFACLayer = nn.Linear | Conv
KFAC_TYPES: tuple[type[nn.Module], ...] = get_args(KFACLayer)
"""Layers whose weight and bias have a Kronecker-factored curvature in the default backend."""


class OwnedParameter(NamedTuple):
    """A parameter and the layers it belongs to.

    Attributes:
        name: Its name in the model.
        role: ``"weight"`` or ``"bias"``.
        layers: The layers that hold it; more than one if they share it.
    """

    name: str
    role: str
    layers: tuple[KFACLayer, ...]


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
    owned, unsupported = [], []
    for name, p in chosen:
        roles = {role for _, role in holders[id(p)]}
        modules = [module for module, _ in holders[id(p)]]
        layers = tuple(module for module in modules if isinstance(module, KFACLayer))
        if len(roles) > 1 or len(layers) < len(modules):
            kinds = ", ".join(sorted({type(module).__name__ for module in modules}))
            unsupported.append((name, kinds))
        owned.append(OwnedParameter(name, roles.pop(), layers))
    if unsupported:
        found = ", ".join(f"{name} ({kinds})" for name, kinds in unsupported)
        remedy = "; ".join(
            f'model.get_parameter("{name}").requires_grad_(False)' for name, _ in unsupported
        )
        raise ValueError(
            "Expected every parameter that requires a gradient to belong to a Linear, Conv1d, "
            f"Conv2d or Conv3d layer, got {found}. Remedy: freeze what K-FAC cannot represent: "
            f"{remedy}"
        )
    return owned


def is_ordinary(module: nn.Module) -> bool:
    """Whether a module computes what ``nn.Linear`` or ``nn.Conv2d`` does, and no more.

    Args:
        module: Any module.

    Returns:
        False for other layers, and for subclasses and instances with a ``forward`` of their own.

    Example:
        >>> is_ordinary(nn.Linear(2, 1)), is_ordinary(nn.Tanh())
        (True, False)
    """
    return isinstance(module, nn.Linear | nn.Conv2d) and not has_own_forward(module)


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
        if _is_kfac_layer(module, types)
        and any(p.requires_grad for p in module.parameters(recurse=False))
    }


def unsupported_parameters(
    model: nn.Module, types: tuple[type[nn.Module], ...] = KFAC_TYPES
) -> list[str]:
    """Names of trainable parameters that K-FAC cannot represent.

    That is every trainable parameter which is not the weight or bias of a layer in ``types``
    (normalisation, embedding, attention projections, free parameters, re-parametrised weights),
    or which several layers share.

    Args:
        model: The network.
        types: Layer classes that K-FAC can represent.

    Returns:
        Parameter names in the order of ``model.named_parameters()``.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> unsupported_parameters(net)
        ['1.weight', '1.bias']
    """
    owners: dict[nn.Parameter, int] = {}
    supported: set[nn.Parameter] = set()
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for p in own.values():
            owners[p] = owners.get(p, 0) + 1
        if _is_kfac_layer(module, types):
            supported.update(p for name, p in own.items() if name in ("weight", "bias"))
    return [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and (p not in supported or owners[p] > 1)
    ]


def freeze_unsupported(
    model: nn.Module, types: tuple[type[nn.Module], ...] = KFAC_TYPES
) -> list[str]:
    """Freeze every trainable parameter that K-FAC cannot represent.

    The frozen parameters keep their trained value; the Laplace approximation treats them as
    certain.

    Args:
        model: The network; ``requires_grad`` of the parameters concerned becomes ``False``.
        types: Layer classes that K-FAC can represent.

    Returns:
        Names of the layers concerned (of the parameter itself, where it belongs to the model
        directly).

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        >>> freeze_unsupported(net)
        ['1']
        >>> freeze_unsupported(net)
        []
    """
    names = unsupported_parameters(model, types)
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return _owners_of(names)


def check_supported(model: nn.Module, types: tuple[type[nn.Module], ...] = KFAC_TYPES) -> None:
    """Raise unless every trainable parameter has a Kronecker-factored curvature.

    Args:
        model: The network.
        types: Layer classes that K-FAC can represent.

    Raises:
        ValueError: If there is no trainable layer of these types, or if a trainable parameter
            belongs to something else; the message lists the layers and how to freeze them.

    Example:
        >>> check_supported(nn.Linear(2, 1))
    """
    *most, last = sorted(t.__name__ for t in types)
    known = f"{', '.join(most)} or {last}" if most else last
    layers = kfac_layers(model, types)
    if not layers:
        got = sorted({type(m).__name__ for m in model.modules() if not list(m.children())})
        raise ValueError(
            f"Expected a model with at least one trainable {known} layer, got none among its "
            f"layers ({', '.join(got)}). Remedy: unfreeze such a layer with "
            "`layer.requires_grad_(True)`, or use another Hessian structure (`debias=False`, "
            "`hessian_structure='diag'`)."
        )
    names = unsupported_parameters(model, types)
    if names:
        listed = []
        for owner in _owners_of(names):
            kind = type(dict(model.named_modules()).get(owner, nn.Parameter())).__name__
            shared = " with a shared weight" if owner in layers else ""
            listed.append(f"'{owner}' ({kind}{shared})")
        raise ValueError(
            f"Expected trainable parameters in {known} layers only, because K-FAC represents no "
            f"other; got trainable parameters in {', '.join(listed)}. Remedy: freeze them with "
            "`laplace_debias.freeze_unsupported(model)`; they keep their trained value and are "
            "treated as certain. Parametrised weights become ordinary ones by "
            "`model = laplace_debias.bake_parametrizations(model)`."
        )


def _is_kfac_layer(module: nn.Module, types: tuple[type[nn.Module], ...]) -> bool:
    """Whether hooks see this layer's inputs; attention uses its output projection unseen."""
    return isinstance(module, types) and not isinstance(module, NonDynamicallyQuantizableLinear)


def _owners_of(parameter_names: list[str]) -> list[str]:
    """Module names behind parameter names, each once, in order."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in parameter_names))
