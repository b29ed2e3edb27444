"""A slice of `python -m tests.fuzz.run`."""

from tests.fuzz.run import run


def test_mutated_inputs_end_in_a_result_or_one_message() -> None:
    tally = run(range(120))
    assert not tally.problems, "\n".join(tally.problems)
    assert sum(tally.outcomes.values()) == 120
    assert tally.outcomes["exit 2"] + tally.outcomes["refused"] > 60
