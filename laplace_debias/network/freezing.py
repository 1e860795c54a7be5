"""What no curvature is known for: named with the reason, and frozen on request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from laplace_debias.network.layers import NORM_TYPES, SUPPORTED_TYPES
from laplace_debias.network.ownership import is_supported_layer, kfac_layers
from laplace_debias.network.parametrized import MOST_ENTRIES, originals

__all__ = [
    "FreezeSummary",
    "check_supported",
    "freeze_unsupported",
    "unsupported_parameters",
    "unwrapped",
]

REASONS = {
    "Embedding": "an embedding looks its rows up, one for each token: freeze it",
    "MultiheadAttention": "the packed projections of nn.MultiheadAttention are used outside of "
    "layers: freeze them, or write the attention with nn.Linear for query, key, value and output",
}
"""Why a kind of layer has no factors, and what to do."""
OLD_HOOKS = (
    "`torch.nn.utils.parametrizations` has its weight_norm and spectral_norm in a known form"
)


@dataclass(frozen=True)
class FreezeSummary:
    """What was frozen, and what stays Bayesian.

    Attributes:
        layers: Names of the layers concerned (of the parameter itself, where it belongs to the
            model directly).
        kinds: Number of frozen entries of each kind of layer.
        n_bayesian: Number of entries of the parameters that still require a gradient.
        n_parameters: Number of entries of all parameters of the model.
    """

    layers: tuple[str, ...]
    kinds: dict[str, int]
    n_bayesian: int
    n_parameters: int

    @property
    def share(self) -> float:
        """Share of the model's parameters that stays Bayesian."""
        return self.n_bayesian / max(self.n_parameters, 1)

    def __str__(self) -> str:
        """One line, and one for each reason."""
        frozen = ", ".join(f"{kind} {count:,}" for kind, count in self.kinds.items())
        lines = [
            f"frozen: {frozen or 'nothing'}; {self.n_bayesian:,} of {self.n_parameters:,} "
            f"parameters ({self.share:.1%}) stay Bayesian"
        ]
        return "\n".join(lines + [REASONS[kind] for kind in self.kinds if kind in REASONS])


def unsupported_parameters(
    model: nn.Module, types: tuple[type[nn.Module], ...] = SUPPORTED_TYPES
) -> list[str]:
    """Names of trainable parameters that K-FAC cannot represent.

    That is every trainable parameter which is not the weight or bias of a layer in ``types``
    (embedding, attention projections, free parameters), or which several layers share; a large
    one behind a parametrised weight as well, see :mod:`laplace_debias.network.parametrized`.

    Args:
        model: The network.
        types: Layer classes that K-FAC can represent.

    Returns:
        Parameter names in the order of ``model.named_parameters()``.

    Example:
        >>> net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.LayerNorm(3))
        >>> unsupported_parameters(net)
        ['0.weight']
    """
    owners: dict[nn.Parameter, int] = {}
    supported: set[nn.Parameter] = set()
    own_engine = nn.LayerNorm in types
    if own_engine and any(map(is_parametrized, model.modules())):
        supported |= {
            p
            for number, (layer, _) in originals(model).items()
            for p in layer.parameters()
            if id(p) == number and p.numel() <= MOST_ENTRIES and is_supported_layer(layer, types)
        }
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        for p in own.values():
            owners[p] = owners.get(p, 0) + 1
        if is_supported_layer(module, types):
            supported.update(p for name, p in own.items() if name in ("weight", "bias"))
    return [
        name
        for name, p in model.named_parameters()
        if p.requires_grad and (p not in supported or owners[p] > 1)
    ]


def freeze_unsupported(
    model: nn.Module, types: tuple[type[nn.Module], ...] = SUPPORTED_TYPES
) -> FreezeSummary:
    """Freeze every trainable parameter that K-FAC cannot represent, and print what was frozen.

    The frozen parameters keep their trained value; the Laplace approximation treats them as
    certain.

    Args:
        model: The network; ``requires_grad`` of the parameters concerned becomes ``False``.
        types: Layer classes that K-FAC can represent.

    Returns:
        Layers and kinds concerned, and the share of the parameters that stays Bayesian.

    Example:
        >>> net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.LayerNorm(3))
        >>> summary = freeze_unsupported(net)
        frozen: Embedding 15; 18 of 33 parameters (54.5%) stay Bayesian
        an embedding looks its rows up, one for each token: freeze it
        >>> summary.layers
        ('0',)
        >>> _ = freeze_unsupported(net)
        frozen: nothing; 18 of 33 parameters (54.5%) stay Bayesian
    """
    names = unsupported_parameters(model, types)
    modules, kinds = dict(model.named_modules()), Counter[str]()
    for name in names:
        p = model.get_parameter(name)
        p.requires_grad_(False)
        owner, _, own = name.rpartition(".")
        kinds[_kind(modules, owner) if owner else own] += p.numel()
    summary = FreezeSummary(
        tuple(_owners_of(names)),
        dict(kinds),
        sum(p.numel() for p in model.parameters() if p.requires_grad),
        sum(p.numel() for p in model.parameters()),
    )
    print(summary)
    return summary


def check_supported(model: nn.Module, types: tuple[type[nn.Module], ...] = SUPPORTED_TYPES) -> None:
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
    norms = len([t for t in types if t in NORM_TYPES])
    *most, last = [
        *sorted(t.__name__ for t in types if t not in NORM_TYPES),
        *["normalisation"] * (norms > 0),
    ]
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
        listed, modules = [], dict(model.named_modules())
        reasons = [REASONS[k] for k in {_kind(modules, o) for o in _owners_of(names)} & {*REASONS}]
        for owner in _owners_of(names):
            kind = _kind(modules, owner)
            own = {name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == owner}
            why = " with a shared weight" if owner in layers else ""
            if owner in layers and not own & {"weight", "bias"}:
                why = f" that computes its weight from {' and '.join(sorted(own))}"
                reasons = [*{*reasons, OLD_HOOKS}]
            listed.append(f"'{owner}' ({kind}{why})")
        raise ValueError(
            f"Expected trainable parameters in {known} layers only, because K-FAC represents no "
            f"other; got trainable parameters in {', '.join(listed)}. Remedy: freeze them with "
            "`laplace_debias.freeze_unsupported(model)`, or choose others, `parameters=...`; they "
            f"keep their trained value and are treated as certain. {'; '.join([*reasons, ''])}"
            f"parametrised weights with an original of more than {MOST_ENTRIES:,} entries become "
            "ordinary ones by `model = laplace_debias.bake_parametrizations(model)`."
        )


def _owners_of(parameter_names: list[str]) -> list[str]:
    """Module names behind parameter names, each once, in order."""
    return list(dict.fromkeys(name.rpartition(".")[0] or name for name in parameter_names))


def _kind(modules: dict[str, nn.Module], owner: str) -> str:
    """Kind of the layer behind a name; attention counts its projections as its own."""
    module = modules.get(owner)
    if module is None:
        return "Parameter"
    parent = modules.get(owner.rpartition(".")[0])
    inside = isinstance(parent, nn.MultiheadAttention) and parent is not module
    return type(parent if inside else module).__name__


def unwrapped(model: nn.Module) -> nn.Module:
    """The network inside a ``DistributedDataParallel``; any other as it is.

    Args:
        model: A network whose parameters every process has in full.

    Returns:
        The network whose parameters have their plain names.

    Raises:
        ValueError: If parameters are spread over processes (FSDP, DTensor): no process could
            compute the factors of a layer.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> unwrapped(net) is net
        True
    """
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return unwrapped(inner)
    # by name: the classes live in modules that are slow to import
    kinds = [type(m) for m in model.modules()] + [type(p) for p in model.parameters()]
    spread = {"FullyShardedDataParallel", "FSDPModule", "DTensor"}
    found = sorted({base.__name__ for kind in kinds for base in kind.__mro__} & spread)
    if found:
        raise ValueError(
            "Expected a network whose parameters every process has in full, got one whose "
            f"parameters are spread over processes ({', '.join(found)}). Remedy: fit it before "
            "sharding, or load its full state dict into the plain network (it needs no gradients "
            "or optimiser state here)."
        )
    return model
