// What every page does: loads a fold when it is opened, and lets keys scroll what is too wide.

for (const fold of document.querySelectorAll("details.later")) {
  fold.addEventListener("toggle", async () => {
    const link = fold.querySelector(":scope > a");
    if (!fold.open || !link) return;
    const page = new DOMParser().parseFromString(await (await fetch(link.href)).text(), "text/html");
    const body = page.querySelector("article section");
    body.querySelector("h1").remove();
    body.removeAttribute("id");
    link.replaceWith(...body.childNodes);
    reachable(fold);
  });
}

// Sphinx marks what was searched for, in a picture too, whose titles have no box: without one it would stop there.
SVGTitleElement.prototype.getBBox = () => new DOMRect();

// A fold of a solution says itself what it does; myst-nb's label hides that from who hears the page.
for (const fold of document.querySelectorAll("summary[aria-label]")) fold.removeAttribute("aria-label");

// A keyboard scrolls only what can have the focus.
function reachable(root) {
  for (const box of root.querySelectorAll("pre, .table-wrapper, .scroll, div.cell_output, mjx-container[display=true], .wide")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}
function all() {
  const room = document.querySelector("article").clientWidth;
  for (const formula of document.querySelectorAll("span.math")) {
    formula.classList.toggle("wide", formula.getBoundingClientRect().width > room || formula.scrollWidth > room);
  }
  reachable(document);
}
addEventListener("load", () => (window.MathJax?.startup?.promise ?? Promise.resolve()).then(all));
addEventListener("resize", all);

const find = document.getElementById("find");
if (find) find.value = decodeURIComponent(location.pathname).split("/").pop().replace(/\.html$/, "").replace(/^\d+_|_/g, " ").trim();
