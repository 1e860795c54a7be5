"""The demo runs at a small size, says its three things and leaves its figure and page."""

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
    table = [line.split()[0] for line in printed.splitlines()[1:8]]
    assert table[:2] == ["method", "plain"] and "temperature" in table


def test_every_network_of_the_demo_learns():
    data = demo.digits()["train"]
    X, y = data.tensors
    for network in demo.NETWORKS:
        model = demo.train_network(data, 5, network)
        assert (model(X).argmax(1) == y).float().mean() > 0.7, network
        assert all(p.requires_grad for p in model[-1].parameters()) if network != "tokens" else True
