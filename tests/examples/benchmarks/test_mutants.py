"""The mutator: what it changes, what it leaves alone, and that its sample is seeded."""

import ast

from examples.benchmarks import mutants

SOURCE = '''
def f(x: int = 3) -> "int":
    """Doc with 1 + 1."""
    if x < 2 and x:
        raise ValueError("x" + "y")
    g(x)
    return x.sum() * True
'''


def test_every_mutant_differs_in_one_place_and_can_be_compiled():
    found = list(mutants.mutants_of("laplace_debias/kfac/f.py", SOURCE))
    plain = ast.unparse(ast.parse(SOURCE))
    assert len({source for _, source in found}) == len(found) and plain not in found
    for _, source in found:
        compile(source, "f", "exec")
    assert {mutant.what for mutant, _ in found} == {
        "if x < 2 and x:  ->  if not (x < 2 and x):", "x < 2 and x  ->  x < 2 or x",
        "x < 2  ->  x <= 2", "2  ->  4", "g(x)  ->  None", "x.sum() * True  ->  x.sum() / True",
        "x.sum  ->  x.mean", "True  ->  False", "3  ->  6",
    }  # fmt: skip


def test_samples_are_seeded():
    one, two = (mutants.sample(mutants.ROOT, 20, seed) for seed in (0, 1))
    assert one == mutants.sample(mutants.ROOT, 20, 0) != two
    assert {room for path, _ in one for room in [path.split("/")[1]]} <= set(mutants.ROOMS)


def test_namesake_tests_come_first():
    for path, _ in mutants.sample(mutants.ROOT, 20, 0):
        namesake, room = mutants.stage_tests(path)
        assert path in namesake and room == [f"tests/{path.split('/')[1]}"]
