"""Layers with a forward of their own are looked into, for their very weight alone."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from laplace_debias.network.layers import has_own_forward
from laplace_debias.network.products import conv_geometry
from laplace_debias.network.recorder import Recorder


class Own(nn.Conv1d):
    """Calls its convolution as it is told."""

    call = None

    def forward(self, x):
        """Do it."""
        return type(self).call(self, x)


def recorded(call):
    layer = type("Kind", (Own,), {"call": call})(2, 3, 3)
    recorder = Recorder([layer], keep_inputs=True)
    with recorder.recording():
        layer(torch.ones(1, 2, 7))
    return layer, recorder.calls[layer]


def test_the_geometry_of_the_call_counts_not_the_layers():
    def call(self, x):
        return F.conv1d(F.pad(x, (2, 1)), self.weight, self.bias, stride=2, dilation=(2,))

    layer, (found,) = recorded(call)
    assert found.module is layer and found.kept_input.shape == (1, 2, 10)
    geometry = found.geometry
    assert (geometry.stride, geometry.dilation, geometry.padding) == ((2,), (2,), (0,))
    assert found.shape == (1, 3, 3)


def test_another_weight_is_not_the_layers():
    layer, (found,) = recorded(lambda self, x: F.conv1d(x, 2 * self.weight, self.bias))
    assert found.geometry is layer and found.kept_input.shape == (1, 2, 7)


def test_a_layer_that_raises_leaves_nothing_behind():
    with pytest.raises(RuntimeError, match="gone"):
        recorded(lambda self, x: (_ for _ in ()).throw(RuntimeError("gone")))
    _, (found,) = recorded(lambda self, x: F.conv1d(x, self.weight))
    assert found.kept_input.shape == (1, 2, 7)
    from torch.overrides import _get_current_function_mode_stack

    assert not _get_current_function_mode_stack()


def test_what_has_a_forward_of_its_own():
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x
    kinds = [nn.Linear(2, 2), nn.Conv3d(1, 1, 1), Own(1, 1, 1), patched]
    assert [has_own_forward(layer) for layer in kinds] == [False, False, True, True]


@pytest.mark.parametrize("padding", ["same", 1, (1,)])
def test_geometries_hold_no_numbers(padding):
    geometry = conv_geometry(torch.ones(4, 1, 3), padding=padding, groups=2)
    assert isinstance(geometry, nn.Conv1d) and geometry.weight.is_meta
    assert geometry.padding == (padding if padding == "same" else (1,))
