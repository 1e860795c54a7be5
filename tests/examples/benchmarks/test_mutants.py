"""What is drawn from cosmic-ray's mutants, which tests a mutant meets, and what is reported."""

import sqlite3

import pytest

from examples.benchmarks import mutants

SOURCE = """def f(x: int | None = 3) -> "int | None":
    if x is None:
        raise ValueError(f"{x} + {1 + 1}")
    return x * 2
"""
PATH = "laplace_debias/kfac/f.py"
PLACES = {  # line, column: operators
    (1, 13): ["ReplaceBinaryOperator_BitOr_Add"],
    (1, 22): ["NumberReplacer", "NumberReplacer"],
    (2, 9): ["ReplaceComparisonOperator_Is_IsNot"],
    (3, 36): ["ReplaceBinaryOperator_Add_Sub"],
    (4, 13): ["ReplaceBinaryOperator_Mul_LShift", "ReplaceBinaryOperator_Mul_Add"],
}


@pytest.fixture
def session(tmp_path):
    """What `cosmic-ray init` writes, in so far as it is read here."""
    (tmp_path / PATH).parent.mkdir(parents=True)
    (tmp_path / PATH).write_text(SOURCE)
    path = tmp_path / "session.sqlite"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE work_items (job_id)")
        db.execute("CREATE TABLE work_results (worker_outcome, output, test_outcome, diff, job_id)")
        columns = "start_pos_row, start_pos_col, end_pos_row, end_pos_col, occurrence, job_id"
        db.execute(f"CREATE TABLE mutation_specs (module_path, operator_name, {columns})")
        for (row, column), operators in PLACES.items():
            for k, name in enumerate(operators):
                job = f"{row}-{column}-{k}"
                spec = (PATH, f"core/{name}", row, column, row, column + 1, k, job)
                db.execute("INSERT INTO mutation_specs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", spec)
                db.execute("INSERT INTO work_items VALUES (?)", (job,))
    return path


def _rows(session, query):
    with sqlite3.connect(session) as db:
        return db.execute(query).fetchall()


def test_a_sample_has_one_mutant_of_each_place_that_is_run(session):
    mutants.keep_sample(session, session.parent, 300, 0)
    rows = _rows(session, "SELECT start_pos_row, start_pos_col, job_id FROM mutation_specs")
    assert {row[:2] for row in rows} == {(1, 22), (2, 9), (4, 13)} and len(rows) == 3
    assert (4, 13, "4-13-1") in rows  # no shift of a tensor
    assert {row[2:] for row in rows} == set(_rows(session, "SELECT job_id FROM work_items"))


def test_samples_are_seeded(session):
    content, samples = session.read_bytes(), []
    for seed in (0, 0, *range(20)):
        session.write_bytes(content)
        mutants.keep_sample(session, session.parent, 1, seed)
        samples.append(_rows(session, "SELECT job_id FROM work_items"))
    assert samples[0] == samples[1] and all(len(sample) == 1 for sample in samples)
    assert {job for sample in samples for (job,) in sample} == {
        "1-22-0",
        "1-22-1",
        "2-9-0",
        "4-13-1",
    }


def test_namesake_tests_come_first():
    for room in mutants.ROOMS:
        for file in (mutants.ROOT / "laplace_debias" / room).glob("[a-z]*.py"):
            path = str(file.relative_to(mutants.ROOT))
            namesake, whole = (mutants.stage_tests(path, stage) for stage in mutants.STAGES)
            assert path in namesake and whole == [f"tests/{room}"]
            assert all((mutants.ROOT / test).exists() for test in namesake)


@pytest.mark.parametrize(
    ("body", "passed"),
    [("assert True", True), ("assert False", False), ("while True: pass", False)],
)
def test_failing_and_endless_tests_do_not_pass(tmp_path, monkeypatch, body, passed):
    monkeypatch.setattr(mutants, "WALL_SECONDS", 3 if "while" in body else 60)
    (tmp_path / "test_it.py").write_text(f"def test_it():\n    {body}\n")
    assert mutants.passes(tmp_path, ["test_it.py"], 20) is passed


def test_only_survivors_are_shown(session):
    with sqlite3.connect(session) as db:
        for job, outcome in (("2-9-0", "survived"), ("4-13-1", "namesake")):
            row = ("NORMAL", f"{outcome}\n", "", f"diff of {job}", job)
            db.execute("INSERT INTO work_results VALUES (?, ?, ?, ?, ?)", row)
    text = mutants.report(session)
    assert text.startswith("2 tried\nkfac  2  namesake: 1, survived: 1\n")
    assert "diff of 2-9-0" in text and "diff of 4-13-1" not in text
