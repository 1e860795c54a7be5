"""Many classes at a small size: variances are the exact ones where the probability is."""

from examples.benchmarks import many_classes


def test_many_classes_example(capsys):
    found = many_classes.main(["--small", "--classes", "200", "--size", "16", "--check"])
    assert found["off"] < 0.05
    assert "forward passes" in capsys.readouterr().out
