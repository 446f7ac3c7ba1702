// Rules of the drawings that tests/test_site.py does not compare with the package's: `node --test site/tests/drawings.test.js`.
import assert from "node:assert/strict";
import test from "node:test";
import { address, wavefronts } from "../../src/flashlab/figures/drawings/banks.js";
import { chunks, efficiency, work } from "../../src/flashlab/figures/drawings/ring.js";
import { numbers, steps } from "../../src/flashlab/figures/drawings/softmax.js";

test("a row that is masked so far has no weight, and is no NaN", () => {
  const [first, second] = steps([-Infinity, -Infinity, 3], [1, 2, 7], 2);
  assert.deepEqual([first.l, first.o], [0, 0]);
  assert.deepEqual([second.m, second.l, second.o, second.correction], [3, 1, 7, 0]);
});

test("what is no list of numbers is refused with a sentence", () => {
  assert.deepEqual(numbers("1, -inf 2;3"), [1, -Infinity, 2, 3]);
  for (const text of ["", "1, two", "inf", Array(17).fill(1).join(" ")]) assert.throws(() => numbers(text), /1 to 16 numbers/);
});

test("the swizzle and a padded row have no conflict, the plain row eight", () => {
  const count = (rowBytes, swizzled) => wavefronts(Array.from({ length: 8 }, (_, row) => address(row, 3, rowBytes, swizzled)));
  assert.deepEqual([count(128, false), count(128, true), count(256, true), count(144, false)], [8, 1, 1, 1]);
});

test("the ring deals out every chunk once, does all the work, and the zigzag wastes less", () => {
  for (let ranks = 1; ranks <= 8; ranks++) {
    for (const zigzag of [false, true]) {
      const dealt = Array.from({ length: ranks }, (_, r) => chunks(r, ranks, zigzag)).flat().sort((a, b) => a - b);
      assert.deepEqual(dealt, [...Array(2 * ranks).keys()]);
      let sum = 0;
      for (let rank = 0; rank < ranks; rank++) for (let step = 0; step < ranks; step++) sum += work(rank, step, ranks, zigzag);
      assert.equal(sum, (2 * ranks) ** 2 / 2);
    }
    assert.equal(efficiency(ranks, true), 1);
    if (ranks > 1) assert.ok(efficiency(ranks, false) < 0.8);
  }
});
