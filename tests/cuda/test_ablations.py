"""The last kernel without each of its ideas: still attention, and without what was taken out."""

import pytest
import torch

from flashlab.attention import reference
from flashlab.cuda import load_inline
from flashlab.kernels import whole
from flashlab.kernels.ablations import ABLATIONS, WHOLE

CASES = (
    (2, 1, 200, 230, True),
    (1, 1, 130, 300, False),
    (2, 2, 640, 640, True),
)  # heads, kv_heads, seq_q, seq_k, causal
# To compile them takes long: by default every fourth one. The bench tries all, on a GPU.
BOTH = [
    pytest.param(a, d, id=f"{a.name}-{d}", marks=pytest.mark.long if d == 128 or i % 4 else [])
    for i, a in enumerate(ABLATIONS) for d in (64, 128)
]  # fmt: skip


@pytest.mark.parametrize("ablation, head_dim", BOTH)
@pytest.mark.every(3)
def test_it_computes_the_same(ablation, head_dim):
    module = load_inline(ablation.text(), backend="emulator", head_dim=head_dim, dtype=torch.float16)
    generator = torch.Generator().manual_seed(1)
    for heads, kv_heads, m, n, causal in CASES:
        q, k, v = (
            torch.randn(1, h, rows, head_dim, generator=generator).half()
            for h, rows in ((heads, m), (kv_heads, n), (kv_heads, n))
        )
        o, lse = module.forward(q, k, v, causal=causal, sms=2)  # few: so many blocks that the keys are not divided
        want, want_lse = reference.attention(q, k, v, causal=causal)
        assert (o - want).abs().max() <= 2e-3
        assert torch.where(lse == want_lse, 0.0, (lse - want_lse).abs()).max() <= 1e-4


def test_each_is_another_kernel():
    texts = {a.text() for a in ABLATIONS}
    assert len(texts) == len(ABLATIONS) and whole(WHOLE.name) not in texts
    assert len({a.name for a in ABLATIONS}) == len(ABLATIONS)
