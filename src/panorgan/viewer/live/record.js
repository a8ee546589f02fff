// What the log says, event by event: rounds by number (of one repeated after a kill, the last counts), sites, lines.

import { mean } from "./words.js";

const KEPT_LINES = 2000;

export class RunRecord {
  constructor() {
    this.rounds = new Map();
    this.labels = new Map();
    this.lines = [];
  }

  add(event) {
    if (event.line) this.addLine(event);
    if (event.event === "round") this.rounds.set(event.number, event);
    for (const [site, labels] of Object.entries(event.sites ?? {})) this.labels.set(site, labels);
  }

  addLine(event) {
    const last = this.lines[this.lines.length - 1];
    if (last && last.line === event.line) {
      last.time = event.time;
      last.times += 1;
      return;
    }
    this.lines.push({ time: event.time, line: event.line, level: event.level, code: event.code, times: 1 });
    if (this.lines.length > KEPT_LINES) this.lines.splice(0, this.lines.length - KEPT_LINES);
  }

  inOrder() {
    return [...this.rounds.values()].sort((a, b) => a.number - b.number);
  }

  losses() {
    const rounds = this.inOrder(), sites = names(rounds.map((round) => round.losses));
    return sites.map((site) => ({ name: site, points: pointsOf(rounds, (round) => round.losses[site]) }));
  }

  validated() {
    return this.inOrder().filter((round) => round.validation && Object.values(round.validation).some((own) => Object.keys(own).length));
  }

  // Dice per organ: of one site, or the mean over the sites that annotate it.
  dice(site) {
    const rounds = this.validated();
    const value = (round, organ) => organDice(round.validation, organ, site);
    const organs = names(rounds.flatMap((round) => (site ? [round.validation[site] ?? {}] : Object.values(round.validation))));
    const lines = organs.map((organ) => ({ name: organ, points: pointsOf(rounds, (round) => value(round, organ)) }));
    const overall = { name: "mean", mean: true, points: pointsOf(rounds, (round) => meanDice(round.validation, site)) };
    return lines.length ? [...lines, overall] : [];
  }

  // Where stages begin.
  marks() {
    const rounds = this.inOrder(), marks = [];
    rounds.forEach((round, i) => {
      if (i && round.stage !== rounds[i - 1].stage) marks.push({ number: round.number, words: round.stage });
    });
    return marks;
  }

  best() {
    const last = this.inOrder().at(-1);
    return last?.best ?? null;
  }
}

export function organDice(validation, organ, site) {
  const values = (site ? [validation[site] ?? {}] : Object.values(validation)).filter((own) => own[organ] != null).map((own) => own[organ]);
  return values.length ? mean(values) : undefined;
}

// The mean over sites of each site's mean, by which the best round is chosen.
export function meanDice(validation, site) {
  const sites = (site ? [validation[site] ?? {}] : Object.values(validation)).map((own) => Object.values(own)).filter((own) => own.length);
  return sites.length ? mean(sites.map(mean)) : undefined;
}

function names(contents) {
  return [...new Set(contents.flatMap((one) => Object.keys(one ?? {})))].sort();
}

function pointsOf(rounds, value) {
  return rounds.map((round) => [round.number, value(round)]).filter((point) => point[1] !== undefined && point[1] !== null);
}
