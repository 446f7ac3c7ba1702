"""flashlab comes before triton, in whatever order a test imports them: it decides whether kernels are interpreted."""

import flashlab  # noqa: F401
