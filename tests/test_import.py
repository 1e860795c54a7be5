"""The package says what to do where its surroundings do not fit."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def imported(folder: Path, what: str = "import laplace_debias") -> subprocess.CompletedProcess:
    """Import the package in a process of its own, with a folder before all others."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", what],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_a_torchvision_of_another_torch_is_named_with_a_remedy(tmp_path):
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    metadata = tmp_path / "torchvision-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.1\n")
    result = imported(tmp_path)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert result.stderr.count("Traceback") == 1  # no trace of a dependency before it
    assert last.startswith("ImportError: Expected a torchvision") and "pip uninstall" in last


def test_without_it_there_is_nothing_to_say(tmp_path):
    result = imported(tmp_path)
    assert result.returncode == 0, result.stderr


def test_reports_without_matplotlib_say_what_to_install(tmp_path):
    hidden = "import sys; from importlib import util; found = util.find_spec; "
    hidden += "util.find_spec = lambda n, *a: None if n == 'matplotlib' else found(n, *a); "
    result = imported(tmp_path, hidden + "import laplace_debias.reporting")
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: Expected matplotlib") and "pip install" in last
