"""What a call says that has to fail."""

from collections.abc import Callable
from typing import Any

import pytest

from flashlab.check import CheckFailed


def failure_of(call: Callable[..., Any], *given: Any, **options: Any) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        call(*given, **options)
    return caught.value
