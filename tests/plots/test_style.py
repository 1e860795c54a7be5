"""Styles that survive greyscale."""

from matplotlib.colors import to_rgb

from laplace_debias.plots.style import _STYLES, label_of, lighten, style_of


def test_no_two_methods_look_alike_without_colour():
    looks = {name: (marker, line) for name, (_, marker, line) in _STYLES.items()}
    del looks["large-batch"]  # stands in for "full"
    assert len(set(looks.values())) == len(looks)


def test_unknown_methods_get_a_style_by_number():
    assert style_of("mine", 0) != style_of("mine", 1)


def test_labels_and_shades():
    assert label_of("ood_nll") == "NLL (ood)" and label_of("mystery") == "mystery"
    assert lighten("black", 1.0) == (1.0, 1.0, 1.0) and lighten("red", 0.0) == to_rgb("red")
