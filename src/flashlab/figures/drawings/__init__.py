"""Drawings that answer to the reader, in the browser and with no kernel: JavaScript that a cell's output brings along.

play("ring")        as the last line of a cell; the figure above the cell stands for it where no JavaScript runs
"""

import re
from pathlib import Path

from IPython.display import HTML

WORDS = {
    "softmax": "The online softmax, step by step, on numbers of yours.",
    "causal": "Which tiles of a causal mask are whole, masked, or never loaded.",
    "fragments": "Who holds which element of an MMA's operands.",
    "banks": "Which banks eight rows of shared memory ask for.",
    "ring": "A ring of ranks under a causal mask: who works when.",
}


def play(name: str) -> HTML:
    """Show the drawing of that name. Raises ValueError: there is none."""
    if name not in WORDS:
        raise ValueError(f"there is no drawing {name!r}; there are {', '.join(WORDS)}")
    style, shared, own = (
        Path(__file__).with_name(file).read_text(encoding="utf-8") for file in ("style.css", "dom.js", f"{name}.js")
    )
    script = re.sub(r"^import .*\n|^export ", "", shared + own, flags=re.M)  # one module, for one output
    places = f'document.querySelectorAll("[data-drawing={name}]:not(:has(svg))")'
    return HTML(
        f'<div class="drawing" data-drawing="{name}" role="group" aria-label="{WORDS[name]}">\n'
        f"{WORDS[name]} Run this cell to play with it.\n</div>\n"
        f"<style>\n{style}</style>\n"
        f'<script type="module">\n{script}\nfor (const place of {places}) mount(place);\n</script>'
    )
