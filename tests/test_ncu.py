"""What is read from Nsight Compute's table."""

from flashlab.bench import ncu

TABLE = """LAUNCH {"n": 1}
==PROF== Profiling "first" - 0: 0%....50%....100% - 3 passes
==PROF== Profiling "second" - 1: 0%....50%....100% - 3 passes
LAUNCH {"n": 2}
==PROF== Profiling "third" - 2: 0%....50%....100% - 3 passes
"ID","Kernel Name","dram__bytes_read.sum"
"","","byte"
"0","first","1,024"
"1","second","2048"
"2","third",""
"""


def test_a_kernel_belongs_to_what_was_announced_last():
    rows = ncu.parse(TABLE, {"read": "dram__bytes_read.sum"})
    assert [(r["kernel"], r["launch"], r["read"]) for r in rows] == [
        ("first", {"n": 1}, 1024.0), ("second", {"n": 1}, 2048.0), ("third", {"n": 2}, None),
    ]  # fmt: skip


def test_without_its_own_lines_each_announcement_is_a_kernel_or_nothing_is_known():
    quiet = "\n".join(line for line in TABLE.splitlines() if not line.startswith("=="))
    assert [r["launch"] for r in ncu.parse(quiet, {"read": "dram__bytes_read.sum"})] == [None] * 3
    one_each = quiet.replace('LAUNCH {"n": 2}', 'LAUNCH {"n": 2}\nLAUNCH {"n": 3}')
    assert [r["launch"]["n"] for r in ncu.parse(one_each, {"read": "dram__bytes_read.sum"})] == [1, 2, 3]


def test_no_table_is_no_rows():
    assert ncu.parse("==ERROR== no kernels were profiled", {"read": "x"}) == []
