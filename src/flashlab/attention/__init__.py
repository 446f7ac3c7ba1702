"""The ideas, in the order of the course: from the attention formula to the Triton kernels.

inputs              the one validator of q, k and v
cost                bytes and FLOPs, by formula and counted
reference           the oracle in float64, its low-precision twin, the gradient
online_softmax      phase 0: the state (m, l, o) and its merge
naive, schemes      phase 1: four lines of PyTorch, and the kernels that meet the two walls
simulation          phase 2: the forward pass in plain PyTorch
triton_minimal      phase 3: the forward pass as a Triton kernel
triton_forward      phase 4: the same for a model: any heads, lengths, masks, dtypes; gluon_forward: Hopper by hand
transformers_attention   the door as an attention of Hugging Face's transformers
"""
