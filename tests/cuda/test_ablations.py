"""The last kernel without each of its ideas: still attention, and without what was taken out."""

import pytest
from test_series import run

from flashlab.kernels import whole
from flashlab.kernels.ablations import ABLATIONS, WHOLE

# heads, kv_heads, seq_q, seq_k, causal
CASES = ((2, 1, 200, 230, True), (1, 1, 130, 300, False), (2, 2, 640, 640, True))
# To compile them takes long: by default every fourth one. The bench tries all, on a GPU.
BOTH = [
    pytest.param(a, d, id=f"{a.name}-{d}", marks=pytest.mark.long if d == 128 or i % 4 else [])
    for i, a in enumerate(ABLATIONS) for d in (64, 128)
]  # fmt: skip


@pytest.mark.parametrize("ablation, head_dim", BOTH)
@pytest.mark.every(3)
def test_it_computes_the_same(ablation, head_dim):
    for case in CASES:
        run(ablation.text(), case, head_dim=head_dim, sms=2)  # few: so many blocks that the keys are not divided


def test_each_is_another_kernel():
    texts = {a.text() for a in ABLATIONS}
    assert len(texts) == len(ABLATIONS) and whole(WHOLE.name) not in texts
    assert len({a.name for a in ABLATIONS}) == len(ABLATIONS)
