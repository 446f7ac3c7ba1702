// Which banks of shared memory the eight rows of one ldmatrix tile ask for: the rule is that of p8_4_swizzle.cu's at().
import { COLORS, element, interactive } from "./dom.js";

export const BANKS = 32;

// The byte address of a chunk of 16 bytes, from the tile's start.
export const address = (row, chunk, rowBytes, swizzled) => row * rowBytes + (swizzled ? chunk ^ (row % 8) : chunk) * 16;

export const banks = (byte) => [0, 1, 2, 3].map((i) => (byte / 4 + i) % BANKS);

// How many wavefronts eight rows of 16 bytes need: as many as rows ask for the bank that is asked for most.
export function wavefronts(addresses) {
  const asked = Array(BANKS).fill(0);
  for (const byte of addresses) for (const bank of banks(byte)) asked[bank]++;
  return Math.max(...asked);
}

export function mount(place) {
  const inputs = {
    order: { label: "order", value: "as it comes", options: ["as it comes", "XOR swizzle"] },
    rowBytes: { label: "bytes per row", value: 128, min: 128, max: 512, step: 16 },
    chunk: { label: "chunk of 8 columns", value: 0, min: 0, max: 31 },
  };
  const size = 15;
  interactive(place, inputs, ({ order, rowBytes, chunk }) => {
    const swizzled = order === "XOR swizzle";
    if (rowBytes % 16) throw new Error("A row is a multiple of 16 bytes, so that every chunk is aligned.");
    if (chunk >= Math.floor(rowBytes / 128) * 8) throw new Error(`A row of ${rowBytes} bytes has chunks 0 to ${Math.floor(rowBytes / 128) * 8 - 1}.`);
    const addresses = Array.from({ length: 8 }, (_, row) => address(row, chunk, rowBytes, swizzled));
    const rows = addresses.flatMap((byte, row) => Array.from({ length: BANKS }, (_, bank) => {
      const mine = banks(byte).includes(bank);
      const several = addresses.filter((other) => banks(other).includes(bank)).length > 1;
      const fill = mine ? (several ? COLORS.red : COLORS.blue) : COLORS.light;
      const title = element("title", {}, `row ${row}, bank ${bank}${mine ? ": asked for" : ""}`);
      return element("rect", { x: bank * size + 1, y: row * size + 1, width: size - 2, height: size - 2, fill, opacity: mine ? 1 : 0.5 }, title);
    }));
    const count = wavefronts(addresses);
    const said = `${count} ${count === 1 ? "wavefront" : "wavefronts"} for eight rows of 16 bytes at ${addresses.join(", ")}.`;
    const label = `A line per row, a column per bank. ${said} Blue: asked for once; red: by several rows.`;
    const picture = element("svg", { viewBox: `0 0 ${BANKS * size} ${8 * size}`, width: BANKS * size, role: "img", "aria-label": label }, ...rows);
    return [picture, element("output", {}, `${said} A line per row, a column per bank; red: several rows ask for this bank, and wait for each other.`)];
  });
}
