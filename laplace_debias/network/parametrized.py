r"""Weights that a parametrisation computes, as weights of their own.

With ``torch.nn.utils.parametrize`` a layer's weight is :math:`W = g(V)`, and what is trained is
:math:`V`. K-FAC's block is one of W, ``kron(B, A)``; that of V is
:math:`G^\top (B \otimes A)\, G` with :math:`G = \partial W / \partial V`, which is no Kronecker
product unless :math:`G` is one. So a trainable V is refused. A posterior over W itself is what
K-FAC can give: of a network that computes the same with W in the place of :math:`g(V)`.
"""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.utils import parametrize

__all__ = ["bake_parametrizations"]


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
