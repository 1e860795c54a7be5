"""Break one line at a time with cosmic-ray, and see whether a test notices.

A seeded sample of the mutants of ``kfac/``, ``debias/`` and ``predictive/``, of the last commit and
in a clone of it: the tree that is worked in is not written to. cosmic-ray lists the mutants, writes
each into the clone and keeps the results; the same call goes on where it was stopped. Its test
command asks this process, which has imported PyTorch already, to fork and run the tests of the file
that differs: its doctests and namesake test, and if these pass those of its room::

    make mutants
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import os
import random
import re
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("kfac", "debias", "predictive")
STAGES = {"namesake": 100, "room": 600}
"""CPU seconds after which the tests of a stage have failed: a mutant may loop for ever."""
WALL_SECONDS = 1800
"""The same for a mutant that waits for ever."""

NOT_FOR_FLOATS = re.compile(r".*ReplaceBinaryOperator_\w+_(LShift|RShift|BitOr|BitAnd|BitXor)")
"""Operators that floating-point tensors refuse: every test kills these mutants."""

CONFIG = """[cosmic-ray]
module-path = [{modules}]
timeout = {timeout}
excluded-modules = []
test-command = "sh -c 'echo try > ../ask; read code stage < ../answer; echo $stage; exit $code'"
distributor.name = "local"
"""


def idle_spans(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where a mutant is not worth a try: annotations, which are not run, and errors' messages.

    Args:
        source: A module.

    Returns:
        Start and end (line, column) of each.

    Example:
        >>> idle_spans("x: int | None = 1")
        [((1, 3), (1, 13))]
    """
    nodes: list[ast.AST | None] = []
    for node in ast.walk(ast.parse(source)):
        nodes += [getattr(node, "annotation", None), getattr(node, "returns", None)]
        nodes += [node] if isinstance(node, ast.Raise) else []
    return [
        ((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset))  # type: ignore
        for n in nodes
        if n is not None
    ]


def keep_sample(session: Path, folder: Path, n: int, seed: int) -> None:
    """Delete all mutants of a session but a sample: n places without replacement, a mutant of each.

    A place in the source has up to a dozen mutants (``a * b`` one for each other operator), so a
    sample of mutants would be one of arithmetic.

    Args:
        session: What ``cosmic-ray init`` wrote.
        folder: The clone.
        n: How many; all places if there are fewer.
        seed: Decides which.
    """
    places: dict[tuple[str, int, int, int, int], list[str]] = {}
    idle: dict[str, list[tuple[tuple[int, int], tuple[int, int]]]] = {}
    with sqlite3.connect(session) as db:
        rows = db.execute(
            "SELECT module_path, start_pos_row, start_pos_col, end_pos_row, end_pos_col,"
            " operator_name, job_id FROM mutation_specs ORDER BY 1, 2, 3, 4, 5, 6, occurrence"
        )
        for path, row, column, end_row, end_column, operator, job in rows:
            if path not in idle:
                idle[path] = idle_spans((folder / path).read_text())
            start, end = (row, column), (end_row, end_column)
            if any(a <= start and end <= b for a, b in idle[path]) or NOT_FOR_FLOATS.match(
                operator
            ):
                continue
            places.setdefault((path, *start, *end), []).append(job)
        draw = random.Random(seed)
        chosen = draw.sample(sorted(places), min(n, len(places)))
        jobs = [(draw.choice(places[place]),) for place in chosen]
        db.execute("CREATE TEMP TABLE chosen (job_id VARCHAR)")
        db.executemany("INSERT INTO chosen VALUES (?)", jobs)
        for table in ("mutation_specs", "work_items"):
            db.execute(f"DELETE FROM {table} WHERE job_id NOT IN (SELECT job_id FROM chosen)")


def stage_tests(path: str, stage: str) -> list[str]:
    """What is run for a mutant of a file.

    Args:
        path: The file, from the repository's root.
        stage: One of ``STAGES``.

    Returns:
        Arguments of pytest.

    Example:
        >>> stage_tests("laplace_debias/kfac/grams.py", "namesake")
        ['laplace_debias/kfac/grams.py', 'tests/kfac/test_grams.py']
    """
    _, room, name = Path(path).parts
    if stage == "room":
        return [f"tests/{room}"]
    namesake = f"tests/{room}/test_{name}"
    return [path] + ([namesake] if (ROOT / namesake).exists() else [])


def passes(folder: Path, tests: list[str], seconds: int) -> bool:
    """Run tests of the library in a clone, in a fork of this process.

    Args:
        folder: The clone.
        tests: Arguments of pytest.
        seconds: CPU time that they may take.

    Returns:
        Whether all passed in time.
    """
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(folder)
        signal.alarm(WALL_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        for name in [m for m in sys.modules if m.split(".")[0] in ("examples", "tests")]:
            del sys.modules[name]
        sys.path.insert(0, str(folder))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
        os._exit(int(pytest.main([*options, *tests])))
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests started
    return status == 0


def prepare(work: Path, tool: Path, n: int, seed: int) -> None:
    """Clone the last commit, list its mutants and keep a sample, if that was not done before."""
    clone, session = work / "clone", work / "session.sqlite"
    if not session.exists():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        modules = ", ".join(f'"laplace_debias/{room}"' for room in ROOMS)
        timeout = len(STAGES) * WALL_SECONDS + 60
        (work / "config.toml").write_text(CONFIG.format(modules=modules, timeout=timeout))
        new = work / "new.sqlite"
        subprocess.run([tool, "init", "../config.toml", new], cwd=clone, check=True)
        keep_sample(new, clone, n, seed)
        new.rename(session)
    subprocess.run(["git", "checkout", "--quiet", "--force", "."], cwd=clone, check=True)
    with sqlite3.connect(session) as db:  # a stopped run has no answer to its last question
        db.execute(
            "DELETE FROM work_results WHERE worker_outcome = 'NORMAL' AND trim(output, char(10))"
            " NOT IN ('survived', 'namesake', 'room')"
        )
    for pipe in ("ask", "answer"):
        (work / pipe).unlink(missing_ok=True)
        os.mkfifo(work / pipe)


def serve(work: Path, tool: Path, stages: list[str]) -> None:
    """Let cosmic-ray try what it has not tried, and run the tests that it asks for."""
    clone = work / "clone"
    command = f"{tool} exec ../config.toml ../session.sqlite; echo end > ../ask"
    process = subprocess.Popen(["sh", "-c", command], cwd=clone)
    while (work / "ask").read_text().strip() != "end":
        changed = subprocess.run(
            ["git", "diff", "--name-only"], cwd=clone, check=True, capture_output=True, text=True
        ).stdout.split()
        failed = (s for s in stages if not passes(clone, stage_tests(changed[0], s), STAGES[s]))
        outcome = next(failed, "survived")
        (work / "answer").write_text(f"{int(outcome != 'survived')} {outcome}\n")
    process.wait()


def report(session: Path) -> str:
    """Counts by room and outcome, then every survivor's diff.

    Args:
        session: A session of cosmic-ray's.

    Returns:
        Text.
    """
    with sqlite3.connect(session) as db:
        rows = db.execute(
            "SELECT module_path, trim(output, char(10)), diff FROM mutation_specs"
            " JOIN work_results USING (job_id) ORDER BY module_path, start_pos_row"
        ).fetchall()
    lines = [f"{len(rows)} tried"]
    for room in ROOMS:
        outcomes = [out for path, out, _ in rows if Path(path).parts[1] == room]
        counts = [f"{out}: {outcomes.count(out)}" for out in sorted(set(outcomes))]
        lines.append(f"{room}  {len(outcomes)}  {', '.join(counts)}")
    return "\n".join([*lines, *(diff for _, out, diff in rows if out == "survived")])


def main() -> None:
    """Try a sample and print who survived."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tool", type=Path, default=ROOT / ".venv-mutants/bin/cosmic-ray")
    parser.add_argument("--n", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--work", type=Path, default=ROOT / "build/mutants")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.dont_write_bytecode = True
    import hypothesis  # noqa: F401
    import laplace  # noqa: F401
    import matplotlib  # noqa: F401
    import torch
    import torchmetrics  # noqa: F401

    torch.set_num_threads(1)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    work = args.work.resolve() / f"{commit}-{args.seed}"
    prepare(work, args.tool.absolute(), args.n, args.seed)
    serve(work, args.tool.absolute(), args.stages)
    print(report(work / "session.sqlite"))


if __name__ == "__main__":
    main()
