// Ring attention under a causal mask: who has work in which step, for two ways to deal out the sequence.
import { COLORS, element, interactive } from "./dom.js";

// The pieces of the sequence, 0 to 2 * ranks - 1, that a rank holds.
export const chunks = (rank, ranks, zigzag) => (zigzag ? [rank, 2 * ranks - 1 - rank] : [2 * rank, 2 * rank + 1]);

// Work of a rank in a step, in pairs of pieces: 1 where all is seen, 1/2 on the diagonal. The keys come from rank - step.
export function work(rank, step, ranks, zigzag) {
  const from = (rank - step + ranks) % ranks;
  let sum = 0;
  for (const q of chunks(rank, ranks, zigzag)) {
    for (const k of chunks(from, ranks, zigzag)) sum += q > k ? 1 : q === k ? 0.5 : 0;
  }
  return sum;
}

// A step takes as long as its busiest rank: of the time of all, which part is work?
export function efficiency(ranks, zigzag) {
  let [time, sum] = [0, 0];
  for (let step = 0; step < ranks; step++) {
    const all = Array.from({ length: ranks }, (_, rank) => work(rank, step, ranks, zigzag));
    time += Math.max(...all);
    sum += all.reduce((a, b) => a + b, 0);
  }
  return sum / (time * ranks);
}

export function mount(place) {
  const inputs = {
    order: { label: "layout", value: "contiguous", options: ["contiguous", "zigzag"] },
    ranks: { label: "ranks", value: 4, min: 1, max: 8 },
  };
  const [wide, high] = [58, 34];
  interactive(place, inputs, ({ order, ranks }) => {
    const zigzag = order === "zigzag";
    const cells = [];
    for (let rank = 0; rank < ranks; rank++) {
      cells.push(element("text", { x: 50, y: (rank + 1.5) * high, class: "label" }, `${rank}: ${chunks(rank, ranks, zigzag).join(", ")}`));
      for (let step = 0; step < ranks; step++) {
        if (!rank) cells.push(element("text", { x: 100 + (step + 0.5) * wide, y: high / 2, class: "label" }, `step ${step}`));
        const busy = work(rank, step, ranks, zigzag);
        const at = { x: 100 + step * wide + 1, y: (rank + 1) * high + 1, height: high - 2 };
        const from = (rank - step + ranks) % ranks;
        cells.push(
          element("rect", { ...at, width: wide - 2, fill: COLORS.light }),
          element("rect", { ...at, width: (wide - 2) * (busy / 4), fill: COLORS.sky }),
          element("text", { x: 100 + (step + 0.5) * wide, y: (rank + 1.5) * high }, `keys of ${from}`),
        );
      }
    }
    const said = `${Math.round(100 * efficiency(ranks, zigzag))} % of the ranks' time is used; the rest waits for the busiest rank of a step.`;
    const label = `A line per rank with its pieces, a column per step; the bar is the rank's work in the step. ${said}`;
    const width = 100 + ranks * wide;
    const picture = element("svg", { viewBox: `0 0 ${width} ${(ranks + 1) * high}`, width, role: "img", "aria-label": label }, ...cells);
    return [picture, element("output", {}, `${said} A line per rank, with the pieces it holds; the bar is its work in the step, of at most 4 units.`)];
  });
}
