"""The checker: it says whether an attention function is right, and where it is not, why.

On any attention function: `verify(fn)`, with its gradient `verify(fn, grads=True)`; and its fronts `verify_one_head`
and `verify_block`.
In an exercise's own check: `expect`, `expect_close`, `CheckFailed`, and `with running("the case"):` around a call of
the learner's function, so that an exception of theirs says what it was run on.
"""

from flashlab.check.expect import expect, expect_close
from flashlab.check.failed import CheckFailed
from flashlab.check.running import running
from flashlab.check.verification import Report, verify, verify_block, verify_one_head

__all__ = ["CheckFailed", "Report", "expect", "expect_close", "running", "verify", "verify_block", "verify_one_head"]
