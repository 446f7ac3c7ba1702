// Which tiles of a causal mask a kernel visits: the rule is that of flashlab.attention.triton_forward.tile_edges.
import { COLORS, element, interactive } from "./dom.js";

// For each block of queries its tiles: [first key, end, is masked]. Query i sees the keys up to i + N - M.
export function walks(M, N, blockM, blockN) {
  const last = N - M;
  const found = [];
  for (let start = 0; start < M; start += blockM) {
    const stop = Math.min(start + blockM, M);
    const end = Math.max(Math.min(N, stop + last), 0);
    const whole = Math.floor(Math.max(Math.min(N, start + last + 1), 0) / blockN) * blockN;
    const tiles = [];
    for (let key = 0; key < whole; key += blockN) tiles.push([key, key + blockN, false]);
    for (let key = whole; key < end; key += blockN) tiles.push([key, Math.min(key + blockN, end), true]);
    found.push(tiles);
  }
  return found;
}

export function mount(place) {
  const inputs = {
    M: { label: "queries", value: 40, min: 1, max: 64 },
    N: { label: "keys", value: 40, min: 1, max: 64 },
    blockM: { label: "BLOCK_M", value: 8, min: 1, max: 64 },
    blockN: { label: "BLOCK_N", value: 8, min: 1, max: 64 },
  };
  interactive(place, inputs, ({ M, N, blockM, blockN }) => {
    const size = Math.min(12, Math.floor(440 / N));
    const found = walks(M, N, blockM, blockN);
    const box = (x, y, width, height, fill, words) => element(
      "rect", { x: x * size + 1, y: y * size + 1, width: width * size - 1, height: height * size - 1, fill },
      element("title", {}, words),
    );
    const tiles = found.flatMap((walk, i) => walk.map(([begin, end, masked]) => {
      const words = `queries from ${i * blockM}, keys ${begin} to ${end - 1}: ${masked ? "masked" : "whole"}`;
      return box(begin, i * blockM, end - begin, Math.min(blockM, M - i * blockM), masked ? COLORS.orange : COLORS.sky, words);
    }));
    const seen = Array.from({ length: M }, (_, i) => Array.from({ length: Math.max(0, Math.min(N, i + N - M + 1)) }, (_, j) => (
      `M${(j + 0.5) * size - 1} ${(i + 0.5) * size}h2`))).flat().join("");
    const [whole, masked] = [false, true].map((kind) => found.flat().filter((tile) => tile[2] === kind).length);
    const all = Math.ceil(M / blockM) * Math.ceil(N / blockN);
    const said = `${whole} tiles are whole (blue), ${masked} masked (orange), ${all - whole - masked} of ${all} never loaded (grey).`;
    const picture = element(
      "svg", { viewBox: `0 0 ${N * size + 1} ${M * size + 1}`, width: N * size + 1, role: "img", "aria-label": `A line per query, a column per key. ${said}` },
      element("rect", { width: N * size + 1, height: M * size + 1, fill: COLORS.light }), ...tiles,
      element("path", { d: seen, stroke: "#000", "stroke-width": 2 }),
    );
    return [picture, element("output", {}, `${said} A dot is a pair of query and key that counts.`)];
  });
}
