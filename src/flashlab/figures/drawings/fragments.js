// Who holds which element of the operands of mma.m16n8k16: the rules are those of flashlab.figures.fragments.
import { COLORS, element, interactive } from "./dom.js";

const HUES = [COLORS.sky, COLORS.orange, COLORS.green, COLORS.purple];
export const SHAPES = { A: [16, 16], B: [16, 8], C: [16, 8] };

// [row, column] of what a lane holds in a register; of A and B a register has two halves, of C one number.
const position = {
  A: (lane, register, half) => [(lane >> 2) + 8 * (register % 2), 2 * (lane % 4) + half + 8 * (register >> 1)],
  B: (lane, register, half) => [2 * (lane % 4) + half + 8 * register, lane >> 2],
  C: (lane, register) => [(lane >> 2) + 8 * (register >> 1), 2 * (lane % 4) + (register % 2)],
};
const REGISTERS = { A: 4, B: 2, C: 4 };

// By [row][column] of the operand: {lane, register, half}.
export function holders(operand) {
  const [rows, columns] = SHAPES[operand];
  const found = Array.from({ length: rows }, () => Array(columns).fill(null));
  for (let lane = 0; lane < 32; lane++) {
    for (let register = 0; register < REGISTERS[operand]; register++) {
      for (let half = 0; half < (operand === "C" ? 1 : 2); half++) {
        const [row, column] = position[operand](lane, register, half);
        found[row][column] = { lane, register, half };
      }
    }
  }
  return found;
}

export function mount(place) {
  const inputs = {
    operand: { label: "operand", value: "A", options: ["A", "B", "C"] },
    lane: { label: "lane", value: 5, min: 0, max: 31 },
  };
  const size = 30;
  interactive(place, inputs, ({ operand, lane }, set) => {
    const [rows, columns] = SHAPES[operand];
    const cells = holders(operand).flatMap((line, row) => line.map((held, column) => {
      const mine = held.lane === lane;
      const name = `${operand.toLowerCase()}${held.register}`;
      return element(
        "g", { onclick: () => set({ lane: held.lane }) },
        element("rect", {
          x: column * size + 1, y: row * size + 1, width: size - 2, height: size - 2, fill: HUES[held.register],
          opacity: mine ? 1 : 0.45, stroke: mine ? "currentColor" : "none", "stroke-width": 2.5,
        }),
        element("text", mine ? { x: (column + 0.5) * size, y: (row + 0.5) * size } : { x: (column + 0.5) * size, y: (row + 0.5) * size, class: "label" }, `${held.lane} ${name}`),
        element("title", {}, `row ${row}, column ${column}: lane ${held.lane}, ${name}`),
      );
    }));
    const own = Array.from({ length: REGISTERS[operand] }, (_, register) => {
      const halves = operand === "C" ? [0] : [0, 1];
      return `${operand.toLowerCase()}${register} at ${halves.map((h) => `(${position[operand](lane, register, h).join(", ")})`).join(" and ")}`;
    });
    const width = columns * size;
    const label = `The ${rows} × ${columns} elements of ${operand}, each with the lane and the register that hold it`;
    const picture = element("svg", { viewBox: `0 0 ${width} ${rows * size}`, width, role: "img", "aria-label": label }, ...cells);
    return [picture, element("output", {}, `Lane ${lane} holds ${own.join(", ")}. Click an element to see who holds it.`)];
  });
}
