// What the drawings share: elements, inputs, a palette. The rules of each drawing stand in its own file, and need none of this.

export const COLORS = {
  sky: "#56b4e9", orange: "#e69f00", green: "#2fbf93", purple: "#cc79a7", red: "#e0563f", light: "#d5d5d5", blue: "#56b4e9",
};

const SVG = "http://www.w3.org/2000/svg";

export function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "circle", "text", "title", "path"].includes(tag);
  const made = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function table(columns, rows) {
  const line = (cells, tag) => element("tr", {}, ...cells.map((cell) => element(tag, {}, String(cell))));
  return element(
    "div", { class: "scroll" },
    element("table", {}, element("thead", {}, line(columns, "th")), element("tbody", {}, ...rows.map((r) => line(r, "td")))),
  );
}

// Inputs by name: {label, value, and min, max, step of a number, or options}. `draw(values)` gives what stands below them;
// it is called again with every change, and an Error of it is shown as a sentence.
export function interactive(place, inputs, draw) {
  const fields = Object.entries(inputs).map(([name, { label, options, value, ...rest }]) => {
    const field = options
      ? element("select", { name }, ...options.map((o) => element("option", o === value ? { selected: "" } : {}, o)))
      : element("input", { name, value, type: typeof value === "number" ? "number" : "text", ...rest });
    return [name, field, element("label", {}, label, field)];
  });
  const below = element("div");
  const values = () => Object.fromEntries(fields.map(([name, f]) => [name, f.type === "number" ? whole(name, f, inputs[name]) : f.value]));
  const set = (changes) => {
    for (const [name, field] of fields) if (name in changes) field.value = changes[name];
    update();
  };
  const update = () => {
    try {
      below.replaceChildren(...draw(values(), set));
    } catch (error) {
      below.replaceChildren(element("output", {}, error.message));
    }
  };
  place.replaceChildren(element("div", { class: "controls" }, ...fields.map(([, , label]) => label)), below);
  place.addEventListener("input", update);
  update();
}

function whole(name, field, { label, min, max }) {
  const value = Number(field.value);
  if (!Number.isInteger(value) || value < min || value > max) {
    throw new Error(`“${label}” is a whole number from ${min} to ${max}.`);
  }
  return value;
}
