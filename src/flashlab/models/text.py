"""The text that the small models are trained on: the words of lectures 0 to 9, as bytes.

`lessons.txt` beside this file holds it, so that an installed package has it too: the lectures' markdown cells in order,
with blank lines between. It is a copy that was taken once, and stays as it is when a lecture is reworded: two runs can
only be compared if both read the same text.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import torch

FILE = Path(__file__).parent / "lessons.txt"
SHA256 = "e79a511921f0f901878fe11050f828a5370be20e4736da8cf03510a729514279"
"""Of the file: a run on another text is another run."""


def load() -> torch.Tensor:
    """Return the text as bytes: [length], uint8.

    Raises:
        ValueError: the file is not the one that recorded runs have read.
    """
    data = FILE.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise ValueError(f"{FILE.name} is not the text that the recorded losses belong to: it has been changed")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batches(
    text: torch.Tensor, batch: int, seq_len: int, *, seed: int = 0, device: torch.device | str | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (tokens, targets) without end: pieces of the text from random places, and the same one byte later.

    The places come from a generator on the CPU, so that one seed gives the same batches on every device.

    text: [length], uint8; ValueError where it is not longer than seq_len. Each is [batch, seq_len], int64.
    """
    if len(text) <= seq_len:
        raise ValueError(f"the text has {len(text)} bytes; a piece of {seq_len} and the byte after it do not fit")
    generator = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(len(text) - seq_len, (batch, 1), generator=generator)
        pieces = text[start + torch.arange(seq_len + 1)].long().to(device)
        yield pieces[:, :-1], pieces[:, 1:]
