"""The ideas, in the order of the course: from the attention formula to the Triton kernels.

inputs              the one validator of q, k and v
cost                bytes and FLOPs, by formula and counted
options             masks, windows and soft-caps, checked and put one way
reference           the oracle in float64, its low-precision twin, the gradient
online_softmax      phase 0: the state (m, l, o) and its merge
naive, schemes      phase 1: four lines of PyTorch, and the kernels that meet the two walls
simulation          phase 2: the forward pass in plain PyTorch
triton_minimal      phase 3: the forward pass as a Triton kernel
triton_plain        phase 4: the same for a model's tensors, one masked loop
triton_forward      phase 4: a forward pass that a model can use; tiles: with which tiles; ladder: its steps
gluon_forward       phase 11b: phase 4's loop in Gluon, with Hopper's own instructions
simulation_backward phase 5: the backward pass in plain PyTorch
triton_backward     phase 5: its kernels
blockwise           on a CPU outside of a lesson: PyTorch's own products, a block of queries at a time
decode              phase 12: a few queries over a long cache, whole or in pages, as Triton kernels
backends, door      what implementations there are, and `flash_attention`, the one door to them
cache_door          the door for a step of generation, `flash_attention_with_cache`
transformers_door   the door as an attention implementation of Hugging Face transformers
"""
