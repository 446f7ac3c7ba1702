// How a search ranks what it finds: a lecture before what only mentions it, and first of all the one that is named so.
const NAMED = NAMES;
const asked = (new URLSearchParams(location.search).get("q") ?? "").trim().toLowerCase();
var Scorer = {
  objNameMatch: 11, objPartialMatch: 6, objPrio: {}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  score: ([page, , , , score]) => {
    if (NAMED[page]?.includes(asked)) return score + 100;
    return score + (page.startsWith("lectures/") ? 8 : /^(notes|changelog|contributing)/.test(page) ? -4 : 0);
  },
};
