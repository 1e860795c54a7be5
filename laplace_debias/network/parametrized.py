r"""Weights that a parametrisation computes: what their originals do, and how to do without.

With ``torch.nn.utils.parametrize`` a layer's weight is :math:`W = g(V)`, and what is trained is
:math:`V`. A datum's gradient in V is that in W, pulled back:

.. math:: \frac{\partial f}{\partial V} = G^\top \frac{\partial f}{\partial W}
          = G^\top \mathrm{vec} \sum_t g_t a_t^\top,
          \qquad G = \frac{\partial W}{\partial V}.

K-FAC's block of W, ``kron(B, A)``, becomes :math:`G^\top (B \otimes A)\, G`, which is no Kronecker
product unless :math:`G` is one. So an original of few entries has the block of the generalised
Gauss-Newton matrix itself, one factor, as the scale of a normalisation has. One of many entries
would need the square of their number; there a posterior over W is what K-FAC can give, of the
network that :func:`bake_parametrizations` makes. The two differ in the prior alone where G has full
row rank: :math:`G\, (G^\top K G + \delta I)^{-1} G^\top = (K + \delta\, (G G^\top)^{-1})^{-1}`,
so independent entries of V are W with a prior covariance :math:`G G^\top / \delta`. Where it has
not (a mask, a norm that is fixed), W can go where V cannot.
"""

from __future__ import annotations

import copy
import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

__all__ = [
    "MOST_ENTRIES",
    "Original",
    "bake_parametrizations",
    "effective",
    "effective_step",
    "originals",
    "pulled_back",
]

MOST_ENTRIES = 4096
"""Largest original that gets a block of its own: 128 MiB in double precision."""


class Original(NamedTuple):
    """What a parameter behind a parametrisation belongs to.

    Attributes:
        layer: The layer whose weight or bias is computed from it.
        role: ``"weight"`` or ``"bias"``.
    """

    layer: nn.Module
    role: str


def originals(model: nn.Module) -> dict[int, Original]:
    """The parameters from which parametrisations compute a weight or bias.

    Args:
        model: The network.

    Returns:
        By the ``id`` of the parameter, the layer and which of its tensors; without parameters
        that several parametrisations share.

    Example:
        >>> net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        >>> [original.role for original in originals(net).values()]
        ['weight', 'weight']
    """
    found: dict[int, list[Original]] = {}
    for module in model.modules():
        if not parametrize.is_parametrized(module):
            continue
        for role, part in module.parametrizations.items():  # type: ignore[union-attr, operator]
            for p in part.parameters():
                found.setdefault(id(p), []).append(Original(module, role))
    return {number: owners[0] for number, owners in found.items() if len(owners) == 1}


def effective(layer: nn.Module, role: str) -> Tensor:
    """What a parametrisation computes, attached to its originals, whatever the grad mode.

    Args:
        layer: A layer in evaluation mode.
        role: Which of its tensors.

    Example:
        >>> net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        >>> effective(net, "weight").shape
        torch.Size([2, 3])
    """
    with torch.enable_grad():
        tensor: Tensor = layer.parametrizations[role]()  # type: ignore[index, operator]
    return tensor


def effective_step(W: Tensor, original: Tensor, step: Tensor) -> Tensor:
    r"""The step :math:`G\, \delta V` of an effective weight that a step of its original makes.

    Args:
        W: The effective weight, attached, see :func:`effective`.
        original: The original.
        step: Its step.

    Returns:
        In the shape of the effective weight.

    Example:
        >>> v = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> effective_step(v.square(), v, torch.ones(2))
        tensor([2., 4.])
    """
    with torch.enable_grad():  # the derivative of a backward pass in what it starts from
        u = torch.zeros_like(W, requires_grad=True)
        (g,) = torch.autograd.grad(W, original, u, create_graph=True, allow_unused=True)
        if g is None or not g.requires_grad:
            return torch.zeros_like(W)
        (dW,) = torch.autograd.grad(g, u, step)
    found: Tensor = dW.detach()
    return found


def pulled_back(W: Tensor, original: Tensor, gradients: Tensor) -> Tensor:
    r"""Gradients of an effective weight as those of its original, :math:`G^\top \partial W`.

    Args:
        W: The effective weight, attached, see :func:`effective`.
        original: The original, of p entries.
        gradients: ``[n, *W.shape]``.

    Returns:
        ``[n, p]``.

    Example:
        >>> v = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> pulled_back(v.square(), v, torch.ones(3, 2))
        tensor([[2., 4.], [2., 4.], [2., 4.]])
    """
    with warnings.catch_warnings():  # torch loops over the data where it has no batched rule
        warnings.filterwarnings("ignore", "There is a performance drop")
        (found,) = torch.autograd.grad(
            W, original, gradients, retain_graph=True, is_grads_batched=True, allow_unused=True
        )
    if found is None:
        return gradients.new_zeros(len(gradients), original.numel())
    rows: Tensor = found.flatten(1)
    return rows


def bake_parametrizations(model: nn.Module) -> nn.Module:
    """A copy of a network whose parametrised weights are ordinary ones.

    It computes the same; its Bayesian parameters are the effective weights. Those whose originals
    were all frozen stay frozen.

    Args:
        model: The network, which stays as it is.

    Returns:
        The copy.

    Example:
        >>> import torch
        >>> net = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        >>> baked = bake_parametrizations(net)
        >>> [name for name, _ in baked.named_parameters()]
        ['bias', 'weight']
        >>> torch.allclose(net(torch.ones(1, 3)), baked(torch.ones(1, 3)))
        True
    """
    baked = copy.deepcopy(model)
    modes = [(module, module.training) for module in baked.modules()]
    baked.eval()  # a spectral norm moves on with every look at a weight in train mode
    for module in list(baked.modules()):
        if not parametrize.is_parametrized(module):
            continue
        effective = {
            name: (getattr(module, name).detach().clone(), list(part.parameters()))
            for name, part in module.parametrizations.items()  # type: ignore[union-attr, operator]
        }
        # not `remove_parametrizations`: it changes a class that the copy shares with the original
        module.__class__ = type(module).__bases__[0]
        del module.parametrizations
        for name, (value, originals) in effective.items():
            if originals:
                trained = any(p.requires_grad for p in originals)
                module.register_parameter(name, nn.Parameter(value, requires_grad=trained))
            else:
                module.register_buffer(name, value)
    for module, training in modes:
        module.training = training
    return baked
