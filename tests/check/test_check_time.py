"""The table of check times: it runs what it is given and says how each check ended. No time is asserted."""

from flashlab.bench.check_time import check_time
from flashlab.check import CheckFailed


def test_every_check_gets_a_row():
    calls = []

    def fails():
        raise CheckFailed("no", diagnosis="scale-twice")

    table = check_time({"right": lambda: calls.append(1) or "fine", "wrong": fails}, repeats=2)
    assert len(calls) == 2
    assert [row[0] for row in table.rows] == ["right", "wrong"]
    assert [row[-1] for row in table.rows] == ["fine", "✗ scale-twice"]
    assert all(float(cell) >= 0 for row in table.rows for cell in row[1:4])
