r"""Products of the Jacobian with many steps of the weights, from one pass through the network.

A backward pass of a vector u over the outputs, :math:`g(u) = J^\top u`, is linear in u. So the
derivative of :math:`\langle g(u), v \rangle` with respect to u is :math:`J v`, whatever u is: one
forward and one backward pass are recorded once, and each step v takes one pass through that record.
Forward mode would pass the network itself again for every step, or hold all steps at once.

A layer that runs under ``torch.no_grad`` is constant here, as it is for the exact way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from laplace_debias.data.inputs import Inputs
from laplace_debias.network.calling import call_model
from laplace_debias.network.positions import classes_last
from laplace_debias.network.preserve import Change, held

__all__ = ["linearised", "plain_attention"]

Product = Callable[[Sequence[Tensor]], Tensor]
"""Turns steps, in the shapes of the parameters, into ``J v`` in the shape of the outputs."""


def linearised(
    model: nn.Module, x: Inputs, params: Sequence[Tensor], keep_graph: bool = False
) -> tuple[Tensor, Product]:
    """Outputs of a network, and its Jacobian as a function of steps.

    Args:
        model: The network, in evaluation mode with gradients on.
        x: The data.
        params: The parameters, which require gradients.
        keep_graph: Allow differentiating outputs and products with respect to the inputs.

    Returns:
        Outputs ``[n, *positions, C]`` and the function.

    Example:
        >>> net = nn.Linear(2, 1, bias=False)
        >>> f, product = linearised(net, torch.tensor([[1.0, 3.0]]), [net.weight])
        >>> product([torch.tensor([[10.0, 1.0]])])
        tensor([[13.]])
    """
    f = classes_last(call_model(model, x))
    kept = f if keep_graph else f.detach()
    used: list[tuple[int, Tensor]] = []
    if f.requires_grad:
        u = torch.zeros_like(f, requires_grad=True)
        grads = torch.autograd.grad(f, params, u, create_graph=True, allow_unused=True)
        used = [(i, g) for i, g in enumerate(grads) if g is not None and g.requires_grad]

    def product(steps: Sequence[Tensor]) -> Tensor:
        if not used:
            return torch.zeros_like(f)
        (moved,) = torch.autograd.grad(
            [g for _, g in used],
            u,
            [steps[i] for i, _ in used],
            retain_graph=True,
            create_graph=keep_graph,
            allow_unused=True,
        )
        return torch.zeros_like(f) if moved is None else moved

    return kept, product


@contextmanager
def plain_attention() -> Iterator[None]:
    """Avoid the fused attention kernels, which cannot be differentiated twice."""
    with held([Change("attention kernels", _switched_off)]):
        yield


def _switched_off() -> Callable[[], None]:
    """Switch the fused attention kernels off; return what undoes it."""
    switches = ExitStack()
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    switches.callback(torch.backends.mha.set_fastpath_enabled, fast)
    switches.enter_context(sdpa_kernel(SDPBackend.MATH))
    return switches.close
