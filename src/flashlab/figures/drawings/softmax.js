// The online softmax, block by block: the rules are those of flashlab.attention.online_softmax.
import { COLORS, element, interactive, table } from "./dom.js";

const shifted = (x, m) => (m === -Infinity ? 0 : Math.exp(x - m));

// What is known of one query row after a set of keys: the largest score, the sum of exp(score - m), and that of exp(score - m) v.
export function blockState(scores, values) {
  const m = Math.max(...scores);
  const p = scores.map((x) => shifted(x, m));
  return { m, l: p.reduce((a, b) => a + b, 0), o: p.reduce((sum, x, i) => sum + x * values[i], 0) };
}

export function merge(a, b) {
  const m = Math.max(a.m, b.m);
  const [ca, cb] = [shifted(a.m, m), shifted(b.m, m)];
  return { m, l: a.l * ca + b.l * cb, o: a.o * ca + b.o * cb };
}

// The state after each block, and by what the block multiplied the state before it.
export function steps(scores, values, block) {
  const found = [];
  let state = { m: -Infinity, l: 0, o: 0 };
  for (let j = 0; j < scores.length; j += block) {
    const next = merge(state, blockState(scores.slice(j, j + block), values.slice(j, j + block)));
    found.push({ ...next, correction: shifted(state.m, next.m) });
    state = next;
  }
  return found;
}

export function numbers(text) {
  const found = text.split(/[\s,;]+/).filter(Boolean).map((word) => (/^-inf$/i.test(word) ? -Infinity : Number(word)));
  if (!found.length || found.length > 16 || found.some((x) => Number.isNaN(x) || x === Infinity)) {
    throw new Error("Write 1 to 16 numbers, with commas between them; -inf is a masked score.");
  }
  return found;
}

const short = (x) => (Number.isFinite(x) ? String(Number(x.toPrecision(4))) : "-inf");

export function mount(place) {
  const inputs = {
    scores: { label: "scores", value: "1, 2, 0.5, 4, 3, 1, 5, 2" },
    values: { label: "values", value: "1, 0, 2, 1, 3, 0, 1, 2" },
    block: { label: "keys per block", value: 2, min: 1, max: 16 },
    seen: { label: "blocks read", value: 2, min: 0, max: 16 },
  };
  interactive(place, inputs, ({ scores, values, block, seen }) => {
    const [x, v] = [numbers(scores), numbers(values)];
    if (x.length !== v.length) throw new Error(`There are ${x.length} scores and ${v.length} values: give as many of both.`);
    const all = steps(x, v, block);
    const read = all.slice(0, seen);
    const m = read.length ? read.at(-1).m : -Infinity;
    const bars = x.map((score, i) => {
      const on = i < seen * block;
      const weight = on ? shifted(score, m) : 0;
      const title = element("title", {}, `key ${i}: score ${short(score)}, weight ${short(weight)}`);
      return element(
        "g", {},
        element("rect", { x: 30 * i + 3, y: 5, width: 24, height: 90, fill: COLORS.light, opacity: 0.4 }),
        element("rect", { x: 30 * i + 3, y: 95 - 90 * weight, width: 24, height: 90 * weight, fill: COLORS.sky }, title),
        element("text", { x: 30 * i + 15, y: 106, class: "label" }, short(score)),
      );
    });
    const label = `The weight exp(score - m) of each key read so far, m being ${short(m)}`;
    const width = 30 * x.length;
    const picture = element("svg", { viewBox: `0 0 ${width} 115`, width, role: "img", "aria-label": label }, ...bars);
    const rows = read.map((s, i) => [i, short(s.m), short(s.correction), short(s.l), short(s.o), s.l ? short(s.o / s.l) : 0]);
    const moved = read.filter((s, i) => i > 0 && s.correction < 1).length;
    const said = seen < all.length
      ? `${label}. The maximum moved in ${moved} of the blocks after the first: l and o were multiplied by the correction.`
      : `All keys are read: the row of the output is o / l = ${short(all.at(-1).l ? all.at(-1).o / all.at(-1).l : 0)}.`;
    return [picture, element("output", {}, said), table(["block", "m", "correction", "l", "o", "o / l"], rows)];
  });
}
