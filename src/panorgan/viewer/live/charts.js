// Line charts as inline SVG. Colours and sizes of text are in live.css; nothing is set by a style attribute in markup.

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 250, LEFT = 56, RIGHT = 12, TOP = 16, BOTTOM = 34;
const COLOURS = 8;
const DASHES = ["", "7 3", "2 3", "8 3 2 3"];

export function svg(tag, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== "") made.textContent = text;
  return made;
}

// One chart in a figure. `update` takes { series: [{ name, points: [[x, y], …], mean }], format, top, marks, last }.
export class Chart {
  constructor(figure, emptyWords) {
    this.emptyWords = emptyWords;
    this.picture = svg("svg", { class: "chart", role: "img", tabindex: "0" });
    this.readout = document.createElement("p");
    this.readout.className = "readout";
    this.legend = document.createElement("ul");
    this.legend.className = "legend";
    figure.append(this.picture, this.readout, this.legend);
    this.content = { series: [], marks: [], last: 1, format: String };
    this.cursor = null;
    this.width = 0;
    new ResizeObserver(() => this.draw()).observe(figure);
    this.picture.addEventListener("pointermove", (event) => this.point(event));
    this.picture.addEventListener("pointerleave", () => this.move(null));
    this.picture.addEventListener("keydown", (event) => this.key(event));
  }

  update(content) {
    this.content = { marks: [], format: String, ...content };
    this.draw();
  }

  draw() {
    const width = Math.max(Math.round(this.picture.parentElement.clientWidth), 240);
    const { series, marks, format } = this.content;
    const known = series.filter((one) => one.points.length);
    this.picture.replaceChildren();
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.numbers = [...new Set(known.flatMap((one) => one.points.map((point) => point[0])))].sort((a, b) => a - b);
    this.width = width;
    if (!known.length) {
      this.picture.append(svg("text", { x: width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, this.emptyWords));
      this.picture.setAttribute("aria-label", this.emptyWords);
      this.legend.replaceChildren();
      this.move(null);
      return;
    }
    const values = known.flatMap((one) => one.points.map((point) => point[1]));
    const ticks = niceTicks(Math.min(0, ...values), this.content.top ?? Math.max(...values), 5);
    this.scale(ticks, width);
    this.axes(ticks, width, format);
    for (const mark of marks) this.mark(mark);
    known.forEach((one, index) => this.line(one, index));
    this.picture.append(this.pointer = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" }));
    this.picture.setAttribute("aria-label", describe(known, format));
    this.explain(known, format);
    this.move(this.cursor);
  }

  scale(ticks, width) {
    const last = Math.max(this.content.last || 1, ...this.numbers), first = Math.min(1, ...this.numbers);
    const low = ticks[0], high = ticks[ticks.length - 1];
    this.x = (number) => LEFT + (last === first ? 0.5 : (number - first) / (last - first)) * (width - LEFT - RIGHT);
    this.y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low || 1)) * (HEIGHT - TOP - BOTTOM);
    this.range = [first, last];
  }

  axes(ticks, width, format) {
    for (const tick of ticks) {
      const y = this.y(tick);
      this.picture.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y, y2: y }));
      this.picture.append(svg("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, format(tick)));
    }
    const [first, last] = this.range;
    const step = Math.max(1, niceStep((last - first) / Math.max(2, Math.floor(width / 90))));
    for (let number = first === 1 ? 1 : Math.ceil(first / step) * step; number <= last; number = number === 1 && step > 1 ? step : number + step) {
      this.picture.append(svg("text", { x: this.x(number), y: HEIGHT - BOTTOM + 16, "text-anchor": "middle" }, number));
    }
    this.picture.append(svg("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 3, "text-anchor": "middle" }, "round"));
  }

  mark({ number, words }) {
    const x = this.x(number), late = x > this.width * 0.6;
    this.picture.append(svg("line", { class: "mark", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    this.picture.append(svg("text", { x: x + (late ? -4 : 4), y: TOP - 4, "text-anchor": late ? "end" : "start" }, words));
  }

  line(one, index) {
    const kind = one.mean ? "mean" : `c${index % COLOURS}`, dash = DASHES[Math.floor(index / COLOURS) % DASHES.length];
    const path = one.points.map(([number, value], i) => `${i ? "L" : "M"}${this.x(number).toFixed(1)},${this.y(value).toFixed(1)}`);
    const common = { "data-name": one.name };
    this.picture.append(svg("path", { class: `line ${kind}`, d: path.join(""), "stroke-dasharray": one.mean ? "" : dash, ...common }));
    if (one.points.length > 40) return;
    for (const [number, value] of one.points) {
      this.picture.append(svg("circle", { class: `dot fill ${kind}`, cx: this.x(number), cy: this.y(value), r: 2.6, ...common }));
    }
  }

  explain(known, format) {
    this.legend.replaceChildren(...known.map((one, index) => {
      const kind = one.mean ? "mean" : `c${index % COLOURS}`, dash = DASHES[Math.floor(index / COLOURS) % DASHES.length];
      const item = document.createElement("li"), key = svg("svg", { viewBox: "0 0 24 10", "aria-hidden": "true" });
      key.classList.add("chart");
      key.append(svg("line", { class: `line ${kind}`, x1: 0, x2: 24, y1: 5, y2: 5, "stroke-dasharray": one.mean ? "" : dash }));
      const value = document.createElement("b");
      value.textContent = format(one.points[one.points.length - 1][1]);
      item.append(key, one.name, value);
      item.addEventListener("pointerenter", () => this.highlight(one.name));
      item.addEventListener("pointerleave", () => this.highlight(null));
      return item;
    }));
  }

  highlight(name) {
    this.picture.classList.toggle("single", name !== null);
    for (const part of this.picture.querySelectorAll("[data-name]")) part.classList.toggle("on", part.dataset.name === name);
  }

  point(event) {
    if (!this.numbers.length) return;
    const box = this.picture.getBoundingClientRect(), x = ((event.clientX - box.left) * this.width) / box.width;
    this.move(this.numbers.reduce((best, number) => (Math.abs(this.x(number) - x) < Math.abs(this.x(best) - x) ? number : best)));
  }

  key(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!step || !this.numbers.length) return;
    event.preventDefault();
    const at = this.cursor === null ? (step > 0 ? -1 : this.numbers.length) : this.numbers.indexOf(this.cursor);
    this.move(this.numbers[Math.min(Math.max(at + step, 0), this.numbers.length - 1)]);
  }

  move(number) {
    this.cursor = number;
    const { series, format } = this.content;
    if (number === null || !this.numbers.includes(number)) {
      this.readout.textContent = "";
      this.pointer?.setAttribute("visibility", "hidden");
      return;
    }
    this.pointer.setAttribute("visibility", "visible");
    for (const end of ["x1", "x2"]) this.pointer.setAttribute(end, this.x(number));
    const parts = series.map((one) => [one.name, one.points.find((point) => point[0] === number)]).filter((part) => part[1]);
    this.readout.textContent = `round ${number}: ${parts.map(([name, point]) => `${name} ${format(point[1])}`).join(" · ")}`;
  }
}

function describe(known, format) {
  const ends = known.map((one) => `${one.name} from ${format(one.points[0][1])} to ${format(one.points[one.points.length - 1][1])}`);
  return `${ends.join("; ")}.`;
}

function niceStep(rough) {
  if (!(rough > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(rough)), share = rough / power;
  return (share <= 1 ? 1 : share <= 2 ? 2 : share <= 5 ? 5 : 10) * power;
}

function niceTicks(low, high, count) {
  if (high <= low) high = low + 1;
  const step = niceStep((high - low) / count), ticks = [];
  for (let tick = Math.floor(low / step) * step; tick < high + step * 0.999; tick += step) ticks.push(Number(tick.toPrecision(12)));
  return ticks;
}
