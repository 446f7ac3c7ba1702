"""Checks of phase 11b: who holds an element of a warpgroup's product, and what the loading warp does next."""

from __future__ import annotations

import random

from flashlab.check.lookup import Row
from flashlab.exercises.rule import rule


@rule(
    "11b.1",
    title="Who holds it?", minutes=15, difficulty="Warm-up",
    hints=[
        "Take the lecture's three tables of steps, and ask of each bit of `row` and of `column` where it comes from.",
        "Rows: bits 0 to 2 are the lane's (its bits 2 to 4), bit 3 is the register's (its bit 1), the rest is the "
        "warp. Columns: bit 0 is the register's, bits 1 and 2 are the lane's, the rest is the register's from "
        "bit 2 on.",
        "warp = row // 16; lane = row % 8 * 4 + column % 8 // 2; register = column % 2 + row // 8 % 2 * 2 + "
        "column // 8 * 4",
    ],
    returns="warp, lane, register",
    strict=True,
    inputs=[(0, 0), (25, 3), (8, 0), (0, 8), (7, 7), (15, 9), (16, 64), (63, 127), (64, 1), (127, 255), (34, 22)],
    draw=lambda r: (r.randrange(192), r.randrange(256)),
    notes={
        "16": "a warp has 16 rows", "row // 8": "the upper and the lower 8 rows of a warp are two registers of "
        "a thread",
        "column // 8": "every 8 columns a thread has four more registers",
    },
    rows=[
        Row("warps-of-one-group", "the warps are counted over all warpgroups: row 64 is in warp 4",
            [("row // 16", "row // 16 % 4")]),
        Row("lanes-by-columns", "lanes go on from row to row: four lanes hold a row's 8 columns, the next four the "
            "next row", [("row % 8 * 4 + column % 8 // 2", "row % 8 + column % 8 // 2 * 8")]),
    ],
)  # fmt: skip
def holder_of(row, column):
    """(warp, lane, register) that hold element (row, column) of the product."""
    # BEGIN SOLUTION
    lane = row % 8 * 4 + column % 8 // 2
    register = column % 2 + row // 8 % 2 * 2 + column // 8 * 4
    return row // 16, lane, register
    # END SOLUTION


def _box(r: random.Random) -> tuple[int, int, int, int]:
    tiles = r.randint(1, 9)
    return r.randrange(2 * tiles), tiles, r.randint(0, 20), r.randint(1, 5)


@rule(
    "11b.2",
    title="The loading warp's next box", minutes=25,
    hints=[
        "Write the boxes of three tiles in a row and number them. Which numbers are V? Which tile is V number b of?",
        "V is every even number but 0, and the last one, 2 * tiles - 1. Its tile is (b - 1) // 2; that of K is "
        "(b + 1) // 2.",
        "The tile is number at = done + tile of its kind. Its place is at % stages. On a new barrier a wait for parity "
        "1 passes at once, so the first round has parity 1: at // stages % 2 ^ 1.",
    ],
    returns="is_v, tile, place, parity",
    strict=True,
    inputs=[
        (b, tiles, done, stages) for tiles, done, stages in ((1, 0, 2), (4, 0, 2), (3, 5, 2), (5, 7, 3))
        for b in range(2 * tiles)
    ],
    draw=_box,
    notes={"done": "places go on being used in turn over all blocks of queries", "1": "the first wait has to pass"},
    rows=[
        Row("last-box-is-k", "the last box is V of the last tile",
            [("b > 0 and (b % 2 == 0 or b == 2 * tiles - 1)", "b > 0 and b % 2 == 0")]),
        Row("k-and-v-in-turn", "that is the order K, V, K, V: K of a tile comes before V of the tile before it",
            [("b > 0 and (b % 2 == 0 or b == 2 * tiles - 1)", "b % 2 == 1"),
             ("(b - 1) // 2 if is_v else (b + 1) // 2", "b // 2")]),
        Row("all-of-k-first", "all boxes of K come before those of V: they are ordered as they are used, K₁ before V₀",
            [("b > 0 and (b % 2 == 0 or b == 2 * tiles - 1)", "b >= tiles"),
             ("(b - 1) // 2 if is_v else (b + 1) // 2", "b % tiles")]),
        Row("turn-for-parity", "parity: it is how often the places were used: of that the last bit, turned round",
            [("at // stages % 2 ^ 1", "at // stages")]),
        *(Row("boxes-for-tiles", f"{what} of K's and V's boxes together: each has places of its own",
              [("at = done + tile", f"at = {at}")])
          for what, at in (("places are used in the order", "2 * done + b"),
                           ("a place is counted", "2 * (done + tile) + is_v"))),
    ],
)  # fmt: skip
def next_box(b, tiles, done, stages):
    """(is_v, tile, place, parity) of box b, 0 to 2 * tiles - 1; is_v is 1 for V and 0 for K."""
    # BEGIN SOLUTION
    is_v = int(b > 0 and (b % 2 == 0 or b == 2 * tiles - 1))
    tile = (b - 1) // 2 if is_v else (b + 1) // 2
    at = done + tile
    return is_v, tile, at % stages, at // stages % 2 ^ 1
    # END SOLUTION
