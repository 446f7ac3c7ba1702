"""What attention is for: an attention layer and a language model, with the original attention and with ours.

rope                rotary embedding, as models write it and as one kernel
layer               an attention layer with grouped-query attention
language_model      a decoder-only transformer in the sizes of the GPT-2 family, and its training step
text                the text it is trained on, in bytes
train               a short training run
memory              what training keeps in memory, by formula and counted
pager               which pages of a pool hold the tokens of which sequence
caches              keys and values that are kept: dense, static, paged; what each reserves and uses
generate            writing one token after the other, with a cache or without
"""
