// The viewer: chooses a case, loads it coarse and then fine, and answers keys.
import { CT_WINDOWS, OTHER_WINDOWS, PaneView, VIEWS, rangeOfWindow } from "./panes.js";
import { fillCases, fillOrgans, fillRemarks, fillSort, sorted } from "./lists.js";

const SMALL = 4e6;        // so many voxels are loaded at once; larger scans show a coarse picture first
const AUTOMATIC = 48e6;   // voxels of all pictures together that are loaded without being asked for
const PATIENCE_MS = 6000; // and never more than this computer draws in so long
const AIR = -500;         // a scan with values below is a CT

const byId = (id) => document.getElementById(id);
const wanted = new URLSearchParams(location.search);
let study, order = [], number = 0, about = null, views = [], loading = new AbortController();
let view = "axial", windowName = "", outlined = false, chosen = "", isCT = false, everything = false;
const off = new Set();
let volumes = new Map();

const get = async (address, signal) => {
  const response = await fetch(address, { signal });
  if (!response.ok) throw new Error((await response.text()).slice(0, 500));
  return response;
};
const colours = () => Object.fromEntries(study.organs.map((organ) => [organ.name, organ.colour]));
const look = () => ({ colours: colours(), off, opacity: byId("opacity").value / 100, view });
const state = (text) => { document.body.dataset.state = text; };
const shownPanes = () => views.filter((pane) => !pane.element.hidden);
const windows = () => (isCT ? CT_WINDOWS : OTHER_WINDOWS);

async function start() {
  if (!("WebGL2RenderingContext" in globalThis)) return fail("This browser draws no WebGL 2, which the viewer needs. Use a current Firefox, Chrome or Edge.");
  study = await (await get("study")).json();
  document.title = `${study.title} – panorgan view`;
  byId("study").textContent = study.title;
  byId("page").hidden = !study.page;
  byId("page").textContent = { doctor: "Doctor’s page", comparison: "Comparison" }[study.kind] ?? "Report";
  fillSort(study, sortCases);
  chosen = study.organs.some((organ) => organ.name === wanted.get("organ")) ? wanted.get("organ") : "";
  if (study.cases.some((entry) => chosen in entry.dice)) byId("sort").value = chosen;
  order = sorted(study.cases, byId("sort").value);
  await open(asked() ?? order[0]);
}

// The case of the address: a number, a name, or `group/name`; of several with that name, the one of its site.
function asked() {
  if (study.cases[wanted.get("number")]) return Number(wanted.get("number"));
  const named = study.cases.filter((entry) => [entry.name, `${entry.group}/${entry.name}`].includes(wanted.get("case")));
  const found = named.find((entry) => entry.group === wanted.get("site")) ?? named[0];
  return found && study.cases.indexOf(found);
}

function sortCases() {
  order = sorted(study.cases, byId("sort").value);
  fillCases(study, order, byId("sort").value, number, open);
}

async function open(next) {
  loading.abort();
  loading = new AbortController();
  const { signal } = loading;
  number = next;
  everything = false;
  state("loading");
  const entry = study.cases[number];
  byId("case-name").textContent = entry.name;
  byId("case-facts").textContent = [entry.group, entry.note].filter(Boolean).join(" · ");
  byId("where").textContent = "";
  sortCases();
  fillRemarks(entry.remarks, showRemark);
  try {
    about = await (await get(`case/${number}`, signal)).json();
    const large = about.panes.some((facts) => facts.voxels > SMALL);
    const coming = large ? fetchAll(study.first_voxels, signal) : null;
    coming?.catch(() => {}); // it is awaited below, after the canvases are there
    await makePanes();
    volumes = new Map();
    listOrgans();
    await load(coming, signal);
    if (!signal.aborted) prefetch(signal);
  } catch (error) {
    if (!signal.aborted) fail(error.message);
  }
}

function fail(text) {
  state("failed");
  byId("where").textContent = text;
}

async function makePanes() {
  views.splice(about.panes.length).forEach((pane) => pane.close());
  const kept = views.length;
  about.panes.forEach((facts, index) => {
    if (index < kept) views[index].reuse(facts);
    else views.push(new PaneView(facts, showWhere));
  });
  byId("panes").replaceChildren(...views.map((pane) => pane.element));
  byId("layout").hidden = !(about.panes.some((pane) => pane.reference) && about.panes.length > 1);
  arrange();
  for (const [index, pane] of views.entries()) {
    pane.title(pane.facts.title, pane.facts.problem ? ` ${pane.facts.problem}` : diceText(pane.facts.dice));
    pane.caption.classList.toggle("problem", Boolean(pane.facts.problem));
    if (index >= kept) await pane.attach();
    pane.setView(view);
  }
  for (const pane of views) {
    pane.nv.broadcastTo(views.filter((other) => other !== pane).map((other) => other.nv), { "2d": true, "3d": true });
  }
}

function diceText(dice) {
  const values = chosen && chosen in dice ? [dice[chosen]] : Object.values(dice);
  return values.length ? ` Dice ${(values.reduce((a, b) => a + b, 0) / values.length).toFixed(3)}` : "";
}

// The reference has its own picture, or lies as an outline over the others.
function arrange() {
  const over = outlined && !byId("layout").hidden;
  views.forEach((pane) => { pane.element.hidden = over && pane.facts.reference; });
  byId("panes").dataset.count = shownPanes().length;
  byId("layout").setAttribute("aria-pressed", String(over));
}

// `coming`: the coarse pictures of a large scan, which are on their way.
async function load(coming, signal) {
  let each = AUTOMATIC / views.length;
  if (coming) {
    const drawn = await draw(await coming, signal);
    each = Math.min(each, study.first_voxels * PATIENCE_MS / drawn);
    mark("preview");
  }
  getVolumes(signal);
  const cut = views.some((pane) => pane.facts.voxels > each);
  byId("full").hidden = !cut;
  if (!coming || each > 2 * study.first_voxels) await draw(await fetchAll(cut ? Math.floor(each) : 0, signal), signal);
  mark("ready");
}

const painted = () => new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)));

// Scan and labels of every picture with at most so many voxels each (0: all of them); null for one with a problem.
function fetchAll(most, signal) {
  const query = most ? `?most=${most}` : "";
  const scans = new Map();
  const fetchOnce = (place) => {
    if (!scans.has(place)) scans.set(place, get(place + query, signal).then((response) => response.arrayBuffer()));
    return scans.get(place);
  };
  return Promise.all(about.panes.map((facts, index) => {
    if (facts.problem) return null;
    const labels = facts.labels ? fetchOnce(`labels/${number}/${index}`) : null;
    return Promise.all([fetchOnce(`scan/${number}/${facts.scan}`), labels]);
  }));
}

// Shows what was fetched. Returns how long drawing took, in ms.
async function draw(there, signal) {
  signal.throwIfAborted();
  const began = performance.now();
  for (const [index, pane] of views.entries()) {
    if (!there[index]) continue;
    const [scan, labels] = there[index];
    pane.labelBuffer = labels;
    pane.fresh = pane.scan === null;
    pane.look = look();
    await pane.show(scan, labels, windowName ? rangeOfWindow(windows()[windowName]) : undefined);
    signal.throwIfAborted();
  }
  chooseWindows();
  await drawOutlines();
  if (views.some((pane) => pane.fresh)) firstPlace();
  await painted();
  return performance.now() - began;
}

function mark(name) {
  const now = Math.round(performance.now());
  document.body.dataset.firstPictureMs ??= now;
  document.body.dataset[`${name}Ms`] = now;
  state(name);
}

// Where to look first: the finding, the organ that was asked for, or the slice with most of all organs.
function firstPlace() {
  views.forEach((pane) => { pane.fresh = false; });
  const remark = study.cases[number].remarks.find((one) => one.at_mm);
  if (remark && !chosen) return showRemark(remark);
  if (chosen && goToOrgan(chosen)) return;
  const drawn = listed().map((organ) => organ.name);
  const visible = drawn.filter((organ) => !off.has(organ));
  const slices = views.map((pane) => pane.fullestSlice(visible.length ? visible : drawn));
  const fullest = slices.reduce((a, b) => (b.count > a.count ? b : a));
  if (fullest.count) goTo(fullest.mm);
  else views.find((pane) => pane.scan)?.step(0);
}

function goToOrgan(organ) {
  const place = views.map((pane) => pane.fullestSlice([organ]).mm).find(Boolean);
  if (place) goTo(place);
  return Boolean(place);
}

function goTo(mm) {
  views.forEach((pane) => pane.goTo(mm));
}

function showRemark(remark) {
  if (remark.organ && study.organs.some((organ) => organ.name === remark.organ)) {
    chosen = remark.organ;
    off.delete(remark.organ);
    refresh();
    if (!remark.at_mm) goToOrgan(remark.organ);
  }
  if (remark.at_mm) goTo(remark.at_mm);
}

function chooseWindows() {
  const first = views.find((pane) => pane.scan);
  if (!first) return;
  const ct = about.ct ?? first.range[0] < AIR;
  const select = byId("window");
  if (ct !== isCT || !select.options.length) {
    isCT = ct;
    select.replaceChildren(...Object.keys(windows()).map((name) => new Option(name)));
    windowName = select.value = Object.keys(windows())[0];
  }
  views.forEach((pane) => pane.setWindow(windows()[windowName]));
}

async function drawOutlines() {
  const reference = views.find((pane) => pane.facts.reference && pane.labelBuffer);
  const over = outlined && reference && !byId("layout").hidden;
  for (const pane of views) {
    if (pane !== reference && pane.scan && (over || pane.outline)) {
      await pane.setOutline(over ? reference.labelBuffer : null, reference?.facts.labels, look());
    }
  }
}

async function getVolumes(signal) {
  for (const [index, pane] of views.entries()) {
    if (!pane.facts.labels) continue;
    try {
      volumes.set(pane.facts, await (await get(`volumes/${number}/${index}`, signal)).json());
    } catch (error) {
      if (signal.aborted) return;
      volumes.set(pane.facts, {});
      byId("organ-note").textContent = error.message;
    }
    listOrgans();
  }
  document.body.dataset.volumes = "ready";
}

// The next case of the list is read by the server already while this one is looked at.
function prefetch(signal) {
  const next = order[order.indexOf(number) + 1];
  if (next === undefined) return;
  get(`case/${next}`, signal).then((response) => response.json()).then((content) => content.panes.forEach((pane, index) => {
    if (pane.problem || pane.voxels <= SMALL) return;
    const query = `?most=${study.first_voxels}`;
    if (pane.scan === index) get(`scan/${next}/${index}${query}`, signal).catch(() => {});
    if (pane.labels) get(`labels/${next}/${index}${query}`, signal).catch(() => {});
  })).catch(() => {});
}

const listed = () => study.organs.filter((organ) => about.panes.some((pane) => pane.labels?.includes(organ.name)));

function listOrgans() {
  fillOrgans({ organs: listed(), panes: about.panes, off, volumes, chosen }, toggle, (organ) => {
    chosen = organ;
    goToOrgan(organ);
    listOrgans();
  });
}

function toggle(organ) {
  if (!off.delete(organ)) off.add(organ);
  refresh();
}

function toggleAll() {
  const names = listed().map((organ) => organ.name);
  const anyOn = names.some((name) => !off.has(name));
  names.forEach((name) => (anyOn ? off.add(name) : off.delete(name)));
  refresh();
}

function refresh() {
  views.forEach((pane) => { pane.paint(look()); pane.redraw(); });
  listOrgans();
}

function setView(name) {
  view = name;
  views.forEach((pane) => { pane.setView(view); pane.paint(look()); pane.redraw(); });
  for (const button of byId("views").children) button.setAttribute("aria-pressed", String(button.dataset.view === view));
}

function setWindow(name) {
  windowName = byId("window").value = name;
  views.forEach((pane) => pane.setWindow(windows()[name]));
}

async function setOutlined(on) {
  outlined = on;
  arrange();
  await drawOutlines();
  views.forEach((pane) => { pane.nv.resizeListener(); });
}

async function loadEverything() {
  if (everything || byId("full").hidden) return;
  everything = true;
  byId("full").hidden = true;
  state("loading");
  try {
    await draw(await fetchAll(0, loading.signal), loading.signal);
    mark("ready");
  } catch (error) {
    if (!loading.signal.aborted) fail(error.message);
  }
}

function step(count) {
  const pane = shownPanes().find((one) => one.scan);
  if (!pane) return;
  pane.step(count);
  shownPanes().filter((other) => other !== pane).forEach((other) => other.goTo(pane.mm));
}

function neighbour(count) {
  const next = order[order.indexOf(number) + count];
  if (next !== undefined) open(next);
}

function showWhere(pane, where) {
  if (pane.element.hidden) return;
  const [x, y, z] = where.mm;
  const { value, organ } = pane.at(where);
  const parts = [`${x.toFixed(0)} ${y.toFixed(0)} ${z.toFixed(0)} mm`];
  if (value !== undefined) parts.push(isCT ? `${Math.round(value)} HU` : `value ${Number(value.toPrecision(4))}`);
  for (const other of shownPanes()) {
    if (!other.labels) continue;
    const name = other === pane ? organ : organAt(other, where.mm);
    const title = study.organs.find((one) => one.name === name)?.title ?? "nothing";
    parts.push(shownPanes().length > 1 ? `${other.facts.title}: ${title}` : title);
  }
  byId("where").textContent = parts.join(" · ");
  document.body.dataset.slice = where.vox.map((v) => Math.round(v)).join(",");
}

function organAt(pane, mm) {
  const [x, y, z] = pane.labels.mm2vox(mm);
  const label = Math.round(pane.labels.getValue(x, y, z));
  return label ? pane.facts.labels[label - 1] : "";
}

const KEYS = {
  ArrowRight: () => neighbour(1), ArrowLeft: () => neighbour(-1),
  ArrowUp: (event) => step(event.shiftKey ? 10 : 1), ArrowDown: (event) => step(event.shiftKey ? -10 : -1),
  a: () => setView("axial"), c: () => setView("coronal"), s: () => setView("sagittal"), r: () => setView("render"),
  m: () => setView("multi"), o: () => !byId("layout").hidden && setOutlined(!outlined), f: loadEverything,
  w: () => { const names = Object.keys(windows()); setWindow(names[(names.indexOf(windowName) + 1) % names.length]); },
  0: toggleAll, "?": () => byId("help").showModal(),
};

// First of all listeners: NiiVue has keys of its own on a canvas.
addEventListener("keydown", (event) => {
  const typing = event.target.closest?.("select, input[type=range], dialog");
  if (typing || event.ctrlKey || event.metaKey || event.altKey || !about) return;
  const organ = /^[1-9]$/.test(event.key) ? listed()[event.key - 1] : undefined;
  const action = organ ? () => toggle(organ.name) : KEYS[event.key];
  if (!action) return;
  event.preventDefault();
  event.stopPropagation();
  action(event);
}, { capture: true });

for (const button of byId("views").children) button.addEventListener("click", () => setView(button.dataset.view));
byId("window").addEventListener("change", (event) => setWindow(event.target.value));
byId("layout").addEventListener("click", () => setOutlined(!outlined));
byId("full").addEventListener("click", loadEverything);
byId("all-organs").addEventListener("click", toggleAll);
byId("opacity").addEventListener("input", refresh);
byId("help-button").addEventListener("click", () => byId("help").showModal());
if (Object.hasOwn(VIEWS, wanted.get("view") ?? "")) view = wanted.get("view");
for (const button of byId("views").children) button.setAttribute("aria-pressed", String(button.dataset.view === view));
start().catch((error) => fail(error.message));
