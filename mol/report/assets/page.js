"use strict";
const form = document.getElementById("filter");
const rows = [...document.querySelectorAll("table.cells tbody tr")];
let lines; // read when a record is first opened
const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

// "-setting" means every kind but settings
function matches(value, wanted) {
  if (!wanted) return true;
  return wanted.startsWith("-") ? value !== wanted.slice(1) : value === wanted;
}

function applyFilter() {
  const wanted = Object.fromEntries(new FormData(form));
  const words = wanted.text.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of rows) {
    const fits = ["verdict", "table", "kind"].every((key) => matches(row.dataset[key], wanted[key]))
      && words.every((word) => texts.get(row).includes(word));
    row.hidden = !fits;
    shown += fits;
  }
  for (const table of document.querySelectorAll("table.cells")) {
    table.parentElement.hidden = !table.querySelector("tbody tr:not([hidden])");
  }
  const narrowed = wanted.text || wanted.verdict || wanted.table || wanted.kind !== "-setting";
  for (const section of document.querySelectorAll("section.experiment")) {
    section.hidden = narrowed && !section.querySelector("table.cells tbody tr:not([hidden])");
  }
  form.querySelector("output").textContent = `${shown} of ${rows.length} numbers`;
}

function sortKey(cell) {
  const text = (cell.dataset.sort ?? cell.textContent).trim();
  const number = Number(text.replaceAll(",", "").replace(/^[~≈<]/, "").split(" ")[0].replace(/[%×†]$/, ""));
  return { text, number: text && !Number.isNaN(number) ? number : null };
}

function compare(a, b) {
  if (a.number !== null && b.number !== null) return a.number - b.number;
  if (a.number !== null || b.number !== null) return a.number !== null ? -1 : 1;
  return a.text.localeCompare(b.text);
}

function sortBy(header) {
  const table = header.closest("table");
  const descending = header.getAttribute("aria-sort") === "ascending";
  const index = header.cellIndex;
  const body = table.tBodies[0];
  const keyed = [...body.rows].map((row) => ({ row, key: sortKey(row.cells[index]) }));
  keyed.sort((a, b) => (descending ? -1 : 1) * compare(a.key, b.key));
  body.append(...keyed.map((entry) => entry.row));
  for (const other of table.querySelectorAll("th[aria-sort]")) other.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", descending ? "descending" : "ascending");
}

// A record is a list of places of lines that all records share
function fillRecord(pre) {
  lines ??= document.getElementById("lines").textContent.split("\n");
  pre.textContent = pre.dataset.lines.split(" ").map((place) => lines[place]).join("\n");
}

function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target) return;
  if (target.closest("[hidden]")) {
    form.reset();
    form.elements.kind.value = "";
    applyFilter();
  }
  for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  target.scrollIntoView();
}

form.hidden = false;
form.addEventListener("input", applyFilter);
form.addEventListener("reset", () => setTimeout(applyFilter));
form.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("click", (event) => {
  const sort = event.target.closest(".sort");
  if (sort) sortBy(sort.closest("th"));
  const pick = event.target.closest(".tiles button");
  if (pick) {
    form.elements.verdict.value = pick.dataset.verdict;
    form.elements.kind.value = pick.dataset.kind;
    applyFilter();
    form.scrollIntoView();
  }
});
document.addEventListener("toggle", (event) => {
  const pre = event.target.open && event.target.querySelector(":scope > pre:empty");
  if (pre) fillRecord(pre);
}, true); // toggle does not bubble
addEventListener("hashchange", openTarget);
applyFilter();
openTarget();
