"""What the notebooks show, one file a subject. Each takes data and draws it; none knows any one kernel.

show        regions of a source, diffs, tables, animations; the look of figures
implementations    the one table of colours: an implementation looks the same in every figure
curves      lines and bars of what was measured or predicted; rooflines
rows        phase 0: a row of scores, read block by block
tiles       phase 2: which tiles are where, while the simulation runs
masks       phase 4: which program computes what, which tiles of a mask are visited
memory      who sees which memory, what a load fetches, which tile is on chip when
fragments   what a lane holds of the operands of an MMA
profiles    a profiler's trace as bars in time, the memory in use, and what the units of a chip do when
rings       phase 13: who has which tokens, work by step and rank, what ranks did when
traces      what a kernel does in which order, and which banks it asks for, from print statements in a copy of it
panels      several small plots of one kind, over sequence lengths; the README's figure
drawings    pictures that answer to the reader, in the browser
ladder      the steps of the series side by side: counted, timed
"""
