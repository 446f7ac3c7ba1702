// The rules of the drawings, each against a second way to say it: `node --test site/tests/drawings.test.js`.
// tests/test_site.py compares them with the package's.
import assert from "node:assert/strict";
import test from "node:test";
import { address, wavefronts } from "../../src/flashlab/figures/drawings/banks.js";
import { walks } from "../../src/flashlab/figures/drawings/causal.js";
import { holders, SHAPES } from "../../src/flashlab/figures/drawings/fragments.js";
import { chunks, efficiency, work } from "../../src/flashlab/figures/drawings/ring.js";
import { numbers, steps } from "../../src/flashlab/figures/drawings/softmax.js";

test("the online softmax ends where the softmax does, in blocks of any size", () => {
  const x = [1, -Infinity, 2, 40, 3, 1, 41];
  const v = [1, 5, 0, 2, 1, 3, -1];
  const e = x.map((s) => Math.exp(s - 41));
  const want = e.reduce((a, p, i) => a + p * v[i], 0) / e.reduce((a, b) => a + b, 0);
  for (let block = 1; block <= 8; block++) {
    const { l, o } = steps(x, v, block).at(-1);
    assert.ok(Math.abs(o / l - want) < 1e-12);
  }
});

test("a row that is masked so far has no weight, and is no NaN", () => {
  const [first, second] = steps([-Infinity, -Infinity, 3], [1, 2, 7], 2);
  assert.deepEqual([first.l, first.o], [0, 0]);
  assert.deepEqual([second.m, second.l, second.o, second.correction], [3, 1, 7, 0]);
});

test("what is no list of numbers is refused with a sentence", () => {
  assert.deepEqual(numbers("1, -inf 2;3"), [1, -Infinity, 2, 3]);
  for (const text of ["", "1, two", "inf", Array(17).fill(1).join(" ")]) assert.throws(() => numbers(text), /1 to 16 numbers/);
});

test("every element of an operand has one holder, and every lane as many", () => {
  for (const [operand, [rows, columns]] of Object.entries(SHAPES)) {
    const all = holders(operand).flat();
    const keys = new Set(all.map((h) => `${h.lane} ${h.register} ${h.half}`));
    assert.equal(keys.size, rows * columns);
    for (let lane = 0; lane < 32; lane++) assert.equal(all.filter((h) => h.lane === lane).length, (rows * columns) / 32);
  }
});

test("the swizzle and a padded row have no conflict, the plain row eight", () => {
  const count = (rowBytes, swizzled) => wavefronts(Array.from({ length: 8 }, (_, row) => address(row, 3, rowBytes, swizzled)));
  assert.deepEqual([count(128, false), count(128, true), count(256, true), count(144, false)], [8, 1, 1, 1]);
});

test("the tiles of a causal mask hold what is seen, and are masked where not all is", () => {
  for (const [M, N, bm, bn] of [[40, 40, 8, 8], [7, 30, 4, 8], [30, 7, 8, 4], [13, 17, 5, 3], [1, 1, 64, 64]]) {
    const covered = new Set();
    walks(M, N, bm, bn).forEach((walk, block) => walk.forEach(([begin, end, masked]) => {
      let hidden = 0;
      for (let i = block * bm; i < Math.min(M, (block + 1) * bm); i++) {
        for (let j = begin; j < end; j++) {
          if (j <= i + N - M) covered.add(`${i} ${j}`);
          else hidden++;
        }
      }
      if (hidden) assert.ok(masked, `a tile of ${M} by ${N} hides ${hidden}`);
    }));
    let seen = 0;
    for (let i = 0; i < M; i++) seen += Math.max(0, Math.min(N, i + N - M + 1));
    assert.equal(covered.size, seen);
  }
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
