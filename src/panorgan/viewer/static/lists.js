// The lists beside the pictures: cases, organs with their volumes, and remarks.
function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

const byId = (id) => document.getElementById(id);
const mean = (numbers) => numbers.reduce((sum, one) => sum + one, 0) / numbers.length;
export const ml = (value) => (value === undefined ? "–" : value >= 100 ? value.toFixed(0) : value.toFixed(1));

// The Dice that a case is sorted by: of one organ, or the mean of all. Undefined where there is none.
export function diceOf(entry, organ) {
  const values = Object.values(entry.dice);
  return organ ? entry.dice[organ] : values.length ? mean(values) : undefined;
}

// Numbers of the cases in the order of the list: worst first; cases without a score as they came, at the end.
export function sorted(cases, organ) {
  const order = cases.map((_, number) => number);
  const score = (number) => diceOf(cases[number], organ) ?? Infinity;
  return order.sort((one, other) => (score(one) === score(other) ? one - other : score(one) - score(other)));
}

export function fillSort(study, onChange) {
  const scored = study.organs.filter((organ) => study.cases.some((entry) => organ.name in entry.dice));
  byId("sort-label").hidden = scored.length === 0;
  byId("sort").replaceChildren(
    make("option", { value: "", textContent: "mean Dice" }),
    ...scored.map((organ) => make("option", { value: organ.name, textContent: organ.title })),
  );
  byId("sort").addEventListener("change", onChange);
}

export function fillCases(study, order, organ, chosen, onChoose) {
  byId("case-list").replaceChildren(...order.map((number) => {
    const entry = study.cases[number];
    const dice = diceOf(entry, organ);
    const button = make("button", { type: "button" }, make("span", { className: "name", textContent: entry.name }));
    button.dataset.case = number;
    if (entry.group) button.append(make("span", { className: "of", textContent: entry.group }));
    if (dice !== undefined) {
      const bar = make("span", { className: "bar" });
      bar.style.setProperty("--part", dice);
      button.append(make("span", { className: "dice", textContent: dice.toFixed(3) }), bar);
    }
    const worst = entry.remarks[0];
    if (worst) {
      const count = entry.remarks.length;
      const text = count > 1 ? `${worst.code} and ${count - 1} more` : worst.code;
      button.append(make("span", { className: `remark is-${worst.severity}`, textContent: text }));
    }
    if (number === chosen) button.setAttribute("aria-current", "true");
    button.addEventListener("click", () => onChoose(number));
    return make("li", {}, button);
  }));
  byId("case-list").querySelector("[aria-current]")?.scrollIntoView({ block: "nearest" });
}

// One row per organ of the case: off or on, and of every pane its volume and Dice; of several panes Dice is below.
export function fillOrgans(state, onToggle, onFind) {
  const { organs, panes, off, volumes, chosen } = state;
  const drawn = panes.filter((pane) => pane.labels);
  const scored = panes.filter((pane) => Object.keys(pane.dice).length);
  const below = scored.length > 1;
  const unit = (pane) => (below && scored.includes(pane) ? "ml, Dice" : "ml");
  const head = ["", "Organ", ...drawn.map((pane) => (drawn.length > 1 ? `${pane.title}, ${unit(pane)}` : unit(pane)))];
  const dice = below ? [] : scored.map(() => "Dice");
  byId("organ-head").replaceChildren(make("tr", {}, ...[...head, ...dice].map((text) => make("th", { scope: "col", textContent: text }))));
  byId("organ-list").replaceChildren(...organs.map((organ, index) => {
    const box = make("input", { type: "checkbox", checked: !off.has(organ.name), id: `organ-${index}` });
    box.addEventListener("change", () => onToggle(organ.name));
    const swatch = make("span", { className: "swatch" });
    swatch.style.setProperty("--colour", organ.colour);
    const find = make("button", { type: "button", className: "find", title: `Go to ${organ.title}`, textContent: organ.title });
    find.addEventListener("click", () => onFind(organ.name));
    const key = index < 9 ? make("kbd", { textContent: index + 1 }) : "";
    const row = make("tr", {}, make("td", {}, box, make("label", { htmlFor: box.id, title: organ.title }, swatch), key), make("td", {}, find));
    row.dataset.organ = organ.name;
    if (organ.name === chosen) row.className = "chosen";
    for (const pane of drawn) {
      const known = volumes.get(pane);
      const value = pane.labels.includes(organ.name) ? known?.[organ.name] : undefined;
      const cell = make("td", { className: "number", textContent: known || !pane.labels.includes(organ.name) ? ml(value) : "…" });
      if (value !== undefined) cell.dataset.ml = value;
      if (below && scored.includes(pane)) cell.append(make("span", { className: "of-pane", textContent: pane.dice[organ.name]?.toFixed(3) ?? "–" }));
      row.append(cell);
    }
    for (const pane of below ? [] : scored) row.append(make("td", { className: "number", textContent: pane.dice[organ.name]?.toFixed(3) ?? "–" }));
    return row;
  }));
  byId("all-organs").textContent = off.size < organs.length ? "All off" : "All on";
  byId("organs").hidden = organs.length === 0;
}

export function fillRemarks(remarks, onChoose) {
  byId("remarks").hidden = remarks.length === 0;
  byId("remarks").replaceChildren(...remarks.map((remark) => {
    const button = make("button", { type: "button", className: `remark is-${remark.severity}` },
      make("code", { textContent: remark.code }), ` ${remark.text}`);
    button.addEventListener("click", () => onChoose(remark));
    return button;
  }));
}
