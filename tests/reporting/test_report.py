"""The page: made for both likelihoods, honest about its halves, and read by a real browser."""

import matplotlib

matplotlib.use("agg")

import re  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from laplace_debias.reporting import report  # noqa: E402

CHROMIUM = shutil.which("chromium")


def _made(folder, kind, **kwargs):
    torch.manual_seed(0)
    X = torch.randn(64, 3)
    y = (X[:, 0] > 0).long() if kind == "classification" else X[:, :1] + 0.1 * torch.randn(64, 1)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2 if y.ndim == 1 else 1))
    before = [p.clone() for p in net.parameters()]
    train = DataLoader(TensorDataset(X, y), 8, shuffle=True)
    found = report(
        net, train, DataLoader(TensorDataset(X + 0.1, y), 16), ood_loader=(4 * X, y),
        likelihood=kind, n_draws=1, budgets=(16,), path=folder / f"{kind}.html", **kwargs,
    )  # fmt: skip
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True))
    return found


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    return {kind: _made(folder, kind) for kind in ("classification", "regression")}


@pytest.mark.parametrize("kind", ["classification", "regression"])
def test_every_section_is_there(reports, kind):
    found = reports[kind]
    text = found.path.read_text()
    heads = re.findall("<h2>(.*?)</h2>", text)
    assert heads == [
        "The model", "How biased is a mini-batch?", "Methods compared", "The prior precision",
        "Calibration", "Answering only where it is sure", "Out of distribution",
    ]  # fmt: skip
    assert "100.0% of its parameters are Bayesian" in text
    assert text.count("<figure>") == text.count("data:image/svg+xml") >= 7
    assert not re.search(r'(src|href)="(?!data:)', text)  # nothing from elsewhere
    assert found.recommendation.code.splitlines()[0].split("=")[0] in text


def test_half_of_the_test_data_choose(reports):
    found = reports["classification"]
    assert len(found.predicted["plain"].values) == 32 == found.tuning.n_data
    assert "every other datum of the test set" in found.path.read_text()
    assert set(found.comparison.methods) >= {"plain", "temperature", "prior-only", "diagonal"}


def test_an_unsupported_model_is_refused_before_any_work(tmp_path):
    X, y = torch.randn(20, 3), torch.arange(20) % 2
    net = nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.Linear(4, 2))
    loader = DataLoader(TensorDataset(X, y), 4)
    with pytest.raises(ValueError, match="1.weight"):
        report(net, loader, loader, path=tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def _browse(page, width, scheme, folder, *flags):
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        f"--user-data-dir={folder}", "--enable-logging=stderr", f"--window-size={width},900",
        f"--blink-settings=preferredColorScheme={scheme}", *flags, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    return done.stdout


PROBE = """<script>addEventListener("load", () => { document.title = JSON.stringify([
innerWidth, document.documentElement.scrollWidth, getComputedStyle(document.body).backgroundColor,
[...document.images].filter(i => !i.complete || !i.naturalWidth).length]) })</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize(
    ("kind", "width", "scheme", "paper"),
    [("classification", 1200, 1, "rgb(255, 255, 255)"),
     ("classification", 400, 0, "rgb(23, 23, 26)"), ("regression", 400, 1, "rgb(255, 255, 255)")],
)  # fmt: skip
def test_a_browser_shows_it(reports, tmp_path, kind, width, scheme, paper):
    page = tmp_path / "probe.html"
    page.write_text(reports[kind].path.read_text().replace("</body>", PROBE))
    dom = _browse(page, width, scheme, tmp_path / "profile", "--dump-dom")
    title = re.search("<title>(.*?)</title>", dom).group(1)
    inner, scroll, background, broken = re.fullmatch(
        r'\[(\d+),(\d+),"(.*?)",(\d+)\]', title.replace("&quot;", '"')
    ).groups()
    assert int(scroll) <= int(inner)  # nothing sticks out sideways
    assert background == paper and broken == "0"
