// Follows a run: the server sends the state and the log as events, and this page draws them.

import { Chart } from "./charts.js";
import { RunRecord, meanDice, organDice } from "./record.js";
import { ago, clock, duration, number, organ, pace, size } from "./words.js";

const SHOWN_LINES = 200;
const byId = (id) => document.getElementById(id);
const charts = {
  loss: new Chart(byId("loss"), "no loss yet"),
  dice: new Chart(byId("dice"), "nothing validated yet"),
  traffic: new Chart(byId("traffic"), "no traffic yet"),
};
let record = new RunRecord();
let status = null;

function make(tag, content, attributes = {}) {
  const made = document.createElement(tag);
  if (content instanceof Array) made.append(...content);
  else made.textContent = content ?? "";
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// -- the head ---------------------------------------------------------------------------------------------------------

function drawHead() {
  if (!status) return;
  byId("title").textContent = status.title;
  byId("detail").textContent = status.detail;
  const state = byId("state");
  state.textContent = status.words;
  state.dataset.state = status.state;
  byId("advice").textContent = status.advice;
  byId("folder").textContent = status.folder;
  byId("warnings").replaceChildren(...status.warnings.map((words) => make("p", words)));
  byId("progress").max = status.total || 1;
  byId("progress").value = status.rounds_done;
  document.title = `${status.total ? `${status.rounds_done}/${status.total} · ` : ""}${status.title} – ${status.state}`;
  drawMoments();
}

// What changes with the clock alone.
function drawMoments() {
  if (!status) return;
  const now = Date.now() / 1000;
  byId("tiles").replaceChildren(...[roundTile(now), timeTile(now), diceTile(), trafficTile()].filter(Boolean));
  byId("waits").replaceChildren(...status.waits.map((wait) => {
    const time = wait.since ? ` (${duration(now - wait.since)})` : "";
    return make("p", [make("b", `Waiting for ${wait.site}`), `: ${wait.why}${time}`], { "data-site": wait.site });
  }));
  for (const cell of document.querySelectorAll("#sites [data-seen]")) cell.textContent = ago(now - Number(cell.dataset.seen));
}

function tile(id, heading, value, ...lines) {
  const parts = [make("dt", heading), make("dd", value, { class: "value" })];
  return make("div", [...parts, ...lines.filter(Boolean).map((line) => make("dd", line))], { class: "tile", id });
}

function roundTile(now) {
  const all = status.total ? ` of ${status.total}` : "";
  const done = status.total && status.rounds_done >= status.total;
  const time = status.since && status.doing ? ` (${duration(now - status.since)})` : "";
  const stage = status.stage && status.stage !== "train" ? `stage ${status.stage}` : "";
  const value = done ? `${status.rounds_done}${all}` : `${status.number}${all}`;
  return tile("tile-round", done ? "Rounds done" : "Round", value, status.doing ? status.doing + time : "", stage);
}

function timeTile(now) {
  if (status.state === "finished" || status.round_seconds === null) return null;
  const each = `${pace(status.round_seconds)} per round`;
  if (status.eta_seconds === null) return tile("tile-time", "Time left", "–", each);
  if (status.state !== "running") return tile("tile-time", "Time left", duration(status.eta_seconds), "once it goes on", each);
  const left = Math.max(0, status.eta_seconds - (now - status.time));
  return tile("tile-time", "Time left", duration(left), `until ${clock(now + left)}`, each);
}

function diceTile() {
  const newest = record.validated().at(-1), best = record.best();
  if (!newest) return null;
  const words = best ? `best ${number(best.dice)} in round ${best.round}` : "";
  return tile("tile-dice", "Validation Dice", number(meanDice(newest.validation)), `round ${newest.number}`, words);
}

function trafficTile() {
  const rounds = record.inOrder();
  const sent = rounds.reduce((sum, round) => sum + round.bytes_sent, 0);
  const received = rounds.reduce((sum, round) => sum + round.bytes_received, 0);
  return sent + received ? tile("tile-traffic", "Traffic", size(sent + received), `${size(sent)} to the sites, ${size(received)} back`) : null;
}

// -- tables -----------------------------------------------------------------------------------------------------------

function drawSites() {
  const known = new Map((status?.sites ?? []).map((site) => [site.name, site]));
  for (const site of record.labels.keys()) if (!known.has(site)) known.set(site, { name: site, state: "", words: "" });
  const last = new Map(record.losses().map((one) => [one.name, one.points.at(-1)[1]]));
  const newest = record.validated().at(-1);
  const withStates = [...known.values()].some((site) => site.words);
  const heads = ["Site", withStates && "State", withStates && "Answer", withStates && "Last seen", "Loss", "Dice", "Labels (training cases)"];
  fill("sites", heads, [...known.values()].sort((a, b) => (a.name < b.name ? -1 : 1)), (site) => {
    const labels = Object.entries(record.labels.get(site.name) ?? {}).map(([name, cases]) => `${organ(name)} (${cases})`).join(", ");
    const states = [
      make("td", site.words, { class: "words" }),
      make("td", site.seconds == null ? "" : pace(site.seconds)),
      make("td", "", site.last_seen ? { "data-seen": site.last_seen } : {}),
    ];
    return make("tr", [
      make("th", site.name, { scope: "row" }),
      ...(withStates ? states : []),
      make("td", last.has(site.name) ? number(last.get(site.name)) : ""),
      make("td", newest ? number(meanDice(newest.validation, site.name)) : ""),
      make("td", labels, { class: "labels" }),
    ], { "data-state": site.state, "data-site": site.name });
  });
  drawMoments();
}

function fill(id, heads, rows, row) {
  const section = byId(id);
  section.hidden = !rows.length;
  section.querySelector("thead").replaceChildren(make("tr", heads.filter(Boolean).map((head) => make("th", head, { scope: "col" }))));
  section.querySelector("tbody").replaceChildren(...rows.map(row));
}

function drawScores() {
  const rounds = record.validated(), newest = rounds.at(-1), before = rounds.at(-2);
  if (!newest) {
    byId("scores").hidden = true;
    return;
  }
  const sites = Object.keys(newest.validation).sort();
  const organs = [...new Set(sites.flatMap((site) => Object.keys(newest.validation[site])))].sort();
  const then = before ? `, with the change since round ${before.number}` : "";
  byId("scores-words").textContent = `Mean Dice of each site's validation cases in round ${newest.number}${then}. A site scores what it annotates.`;
  const cell = (name, site) => {
    const value = name ? organDice(newest.validation, name, site) : meanDice(newest.validation, site);
    const old = before && (name ? organDice(before.validation, name, site) : meanDice(before.validation, site));
    const change = value === undefined || old == null || Math.abs(value - old) < 0.0005 ? "" : value > old ? "up" : "down";
    return make("td", value === undefined ? "" : number(value), { class: change, "data-site": site ?? "" });
  };
  fill("scores", ["Organ", ...sites, "Mean over sites"], [...organs, ""], (name) =>
    make("tr", [make("th", name ? organ(name) : "All organs", { scope: "row" }), ...[...sites, undefined].map((site) => cell(name, site))], {
      "data-organ": name || "all",
    }));
}

// -- charts and log ---------------------------------------------------------------------------------------------------

function drawCharts() {
  const rounds = record.inOrder();
  byId("curves").hidden = !rounds.length;
  if (!rounds.length) return;
  const last = rounds.at(-1).total || rounds.at(-1).number, best = record.best();
  const marks = record.marks();
  charts.loss.update({ series: record.losses(), last, marks, format: (value) => tidy(value) });
  const site = byId("dice-site").value || undefined;
  const bestMark = best ? [{ number: best.round, words: `best: round ${best.round}` }] : [];
  const organs = record.dice(site).map((one) => ({ ...one, name: organ(one.name) }));
  charts.dice.update({ series: organs, last, marks: bestMark, top: 1, format: (value) => value.toFixed(2) });
  const points = (key) => rounds.map((round) => [round.number, round[key]]);
  const traffic = [{ name: "to the sites", points: points("bytes_sent") }, { name: "back to the server", points: points("bytes_received") }];
  charts.traffic.update({ series: traffic.filter((one) => one.points.some((point) => point[1])), last, marks, format: size });
}

const tidy = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(2));

function drawSiteChoice() {
  const chooser = byId("dice-site"), chosen = chooser.value;
  const sites = [...new Set(record.validated().flatMap((round) => Object.keys(round.validation)))].sort();
  const wanted = ["", ...sites].join("\n");
  if (chooser.dataset.wanted === wanted) return;
  chooser.dataset.wanted = wanted;
  chooser.replaceChildren(make("option", "all (mean)", { value: "" }), ...sites.map((site) => make("option", site, { value: site })));
  chooser.value = sites.includes(chosen) ? chosen : "";
}

function drawLog() {
  const marked = byId("log-filter").value === "marked";
  const lines = record.lines.filter((line) => !marked || line.level);
  const troubles = record.lines.filter((line) => line.level === "trouble").reduce((sum, line) => sum + line.times, 0);
  const notices = record.lines.filter((line) => line.level === "notice").length;
  const counts = `${troubles} refused, failed or missing, ${notices} ${notices === 1 ? "notice" : "notices"}.`;
  const cut = lines.length > SHOWN_LINES ? ` The newest ${SHOWN_LINES} lines of ${lines.length}.` : "";
  byId("log-words").textContent = record.lines.length ? counts + cut : "Nothing has been written yet.";
  byId("log-lines").replaceChildren(...lines.slice(-SHOWN_LINES).reverse().map((line) => {
    const words = `${line.times > 1 ? `${line.times} × ` : ""}${line.line}`;
    const text = make("span", line.code ? [make("code", line.code), words] : words);
    return make("li", [make("time", clock(line.time, true)), text], line.level ? { "data-level": line.level } : {});
  }));
}

function drawRecord() {
  drawSiteChoice();
  drawSites();
  drawCharts();
  drawScores();
  drawLog();
  document.body.dataset.rounds = record.rounds.size;
}

// -- events from the server -------------------------------------------------------------------------------------------

const source = new EventSource("events");
let news = false;

source.addEventListener("open", () => {
  byId("connection").textContent = "connected";
  delete byId("connection").dataset.lost;
});
source.addEventListener("error", () => {
  byId("connection").textContent = "connection lost: is 'watch' still running? Trying again";
  byId("connection").dataset.lost = "";
});
source.addEventListener("reset", () => {
  record = new RunRecord();
  news = true;
});
source.addEventListener("log", (message) => {
  for (const event of JSON.parse(message.data)) record.add(event);
  news = true;
});
source.addEventListener("status", (message) => {
  status = JSON.parse(message.data);
  drawHead();
  drawSites();
  if (news) drawRecord();
  news = false;
});
byId("dice-site").addEventListener("change", drawCharts);
byId("log-filter").addEventListener("change", drawLog);
setInterval(drawMoments, 1000);
