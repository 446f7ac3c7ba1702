"""FlashAttention's backward pass in plain torch, one tile at a time: what phase 5's kernels do, line for line.

Nothing of the size N x M was kept by the forward pass. From q, k and the log-sum-exp a tile of P is computed again:

    P  = exp(scale * Q K^T - lse)                a row of P sums to 1, so the shift is known beforehand
    dV = P^T dO
    dS = P * (dO V^T - delta)                    delta = rowsum(dO * O): what the division by the row's sum gives back
    dQ = scale * dS K,     dK = scale * dS^T Q

dV and dK sum over queries, dQ over keys. So there are two loops: one keeps a block of keys and walks over the queries,
the other keeps a block of queries and walks over the keys. Each tile of P is computed twice, and no sum is shared.

Sources: Dao et al., "FlashAttention" (2022), Algorithm 4; two kernels without atomics: the Triton tutorial "Fused
Attention".
"""

import torch

from flashlab.attention.inputs import check_block, check_causal, check_qkv, check_results, scale_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def delta_sim(O: torch.Tensor, dO: torch.Tensor) -> torch.Tensor:
    """rowsum(dO * O) in float32, [M]; O and dO: [M, HEAD_DIM]."""
    return (O.float() * dO.float()).sum(dim=1)


def probabilities_sim(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, distance: int | None, scale: float
) -> torch.Tensor:
    """A tile of P, float32 [rows of q, rows of k].

    distance: None where all is seen; else row i of the tile sees its columns j <= i + distance.
    """
    p = torch.exp(scale * (q @ k.T) - lse[:, None])  # lse is +inf in a row that sees no key: P is 0 there
    if distance is not None:
        i, j = torch.arange(len(q), device=q.device), torch.arange(len(k), device=k.device)
        p = p.masked_fill(j[None, :] > i[:, None] + distance, 0.0)
    return p


def key_block_sim(
    K_block: torch.Tensor, V_block: torch.Tensor, start_n: int, Q: torch.Tensor, dO: torch.Tensor,
    lse: torch.Tensor, delta: torch.Tensor, N: int, BLOCK_M: int, scale: float, causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dK and dV of one block of keys, which begins at row start_n of N, from one query head; float32."""
    k, v = K_block.float(), V_block.float()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    M = Q.shape[0]
    begin = max(0, start_n - (N - M)) if causal else 0  # the first query that sees the block's first key
    for start_m in range(begin, M, BLOCK_M):
        rows = slice(start_m, min(start_m + BLOCK_M, M))
        q, do = Q[rows].float(), dO[rows].float()
        p = probabilities_sim(q, k, lse[rows], start_m + N - M - start_n if causal else None, scale)
        dv = dv + p.to(dO.dtype).float().T @ do
        ds = p * (do @ v.T - delta[rows, None])
        dk = dk + ds.to(Q.dtype).float().T @ q
    return scale * dk, dv


def query_block_sim(
    Q_block: torch.Tensor, dO_block: torch.Tensor, start_m: int, K: torch.Tensor, V: torch.Tensor,
    lse: torch.Tensor, delta: torch.Tensor, M: int, BLOCK_N: int, scale: float, causal: bool,
) -> torch.Tensor:  # fmt: skip
    """dQ of one block of queries that begins at row start_m of M; lse and delta are the block's. float32."""
    q, do = Q_block.float(), dO_block.float()
    dq = torch.zeros_like(q)
    N = K.shape[0]
    end = min(N, start_m + len(q) + N - M) if causal else N  # behind the last key that its last row sees
    for start_n in range(0, end, BLOCK_N):
        columns = slice(start_n, min(start_n + BLOCK_N, N))
        k, v = K[columns].float(), V[columns].float()
        p = probabilities_sim(q, k, lse, start_m + N - M - start_n if causal else None, scale)
        ds = p * (do @ v.T - delta[:, None])
        dq = dq + ds.to(K.dtype).float() @ k
    return scale * dq


def flash_attention_backward_sim(
    grad_o: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor,
    BLOCK_M: int = 64, BLOCK_N: int = 64, *, causal: bool = False, scale: float | None = None,
    grad_lse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk, dv from what the forward pass took and gave.

    Args:
        q, o, grad_o: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim]; one dtype.
        lse: [batch, heads, seq_q], natural logarithm; -inf where a row sees no key. grad_lse: like lse, or None.
    Returns:
        Each like its input. A key head's gradient is the sum over the query heads that read it.
    Raises:
        TypeError, ValueError: see `check_qkv`, `check_results`, `check_block`, `scale_of`.
    """
    check_qkv(q, k, v, dtypes=_DTYPES, same_v=True)
    check_results(q, {"grad_o": grad_o, "o": o}, {"lse": lse, "grad_lse": grad_lse}, dtypes=False)
    check_causal(causal)
    check_block("BLOCK_M", BLOCK_M)
    check_block("BLOCK_N", BLOCK_N)
    scale = scale_of(scale, q.shape[3])
    lse = lse.float().masked_fill(torch.isneginf(lse), float("inf"))
    dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    M, N = q.shape[2], k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            Q, dO, L = q[b, h], grad_o[b, h], lse[b, h]
            K, V = k[b, h // group], v[b, h // group]
            delta = delta_sim(o[b, h], dO)
            if grad_lse is not None:
                delta = delta - grad_lse[b, h]  # d lse / d score is P too
            for start_n in range(0, N, BLOCK_N):
                columns = slice(start_n, min(start_n + BLOCK_N, N))
                parts = key_block_sim(K[columns], V[columns], start_n, Q, dO, L, delta, N, BLOCK_M, scale, causal)
                dk[b, h // group, columns] += parts[0]
                dv[b, h // group, columns] += parts[1]
            for start_m in range(0, M, BLOCK_M):
                rows = slice(start_m, min(start_m + BLOCK_M, M))
                dq[b, h, rows] = query_block_sim(
                    Q[rows], dO[rows], start_m, K, V, L[rows], delta[rows], M, BLOCK_N, scale, causal
                )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
