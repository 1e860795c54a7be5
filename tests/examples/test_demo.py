"""The demo runs at a small size, says its three things and leaves its figure and page."""

import pytest

from examples import demo


def test_the_demo_says_three_things(tmp_path, capsys):
    results = demo.main(["--small", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    for part in ("1. What a posterior buys", "2. What a mini-batch does", "3. What to do about it"):
        assert part in printed
    assert set(results["ours"].methods) == {
        "plain", "single", "two-batch", "auto", "full", "temperature"
    }  # fmt: skip
    assert results["ours"].gap_ratio("nll", "auto")[32] < 0.5  # nearer to all data than single
    assert {"demo.png", "report.html"} <= {path.name for path in tmp_path.iterdir()}
    lines = printed.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("part"))
    table = [tuple(line.split()[:2]) for line in lines[start + 1 : start + 10]]
    assert table == [
        ("1", "plain"), ("1", "temperature"), ("1", "full"), ("2", "single"), ("2", "two-batch"),
        ("2", "full"), ("3", "single"), ("3", "two-batch"), ("3", "auto"),
    ]  # fmt: skip
    gap = results["paper"].gap("nll", "single", 32).gap
    found = demo.distances(results["paper"], "single", 32)
    assert len(found) == 2 and sum(found) / 2 == pytest.approx(gap)


def test_every_network_of_the_demo_learns():
    data = demo.digits()["train"]
    X, y = data.tensors
    for network in demo.NETWORKS:
        early, model = demo.train_network(data, 5, network)
        assert (model(X).argmax(1) == y).float().mean() > 0.7, network
        assert not any(p.requires_grad for n, p in early.named_parameters() if "bias" in n)
        assert demo.accuracy(early, data) < demo.accuracy(model, data)
        assert all(p.requires_grad for p in model[-1].parameters()) if network != "tokens" else True
