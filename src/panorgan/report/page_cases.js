// The table of single cases: sorted, filtered, and joined with the points of the plots.
(() => {
  const source = document.getElementById("case-data");
  if (!source) return;
  const { make, tools, quoted, folder, command, tidy } = Tables;
  const data = JSON.parse(source.textContent);
  const { columns, rows } = data;
  const AT_ONCE = 100;
  const REACH = 16; // pixels between the pointer and a point
  const shownColumns = columns.map((_, index) => index).filter((index) => !columns[index].hidden);
  const numbers = shownColumns.filter((index) => columns[index].digits !== undefined);
  const roleAt = (role) => columns.findIndex((column) => column.role === role);
  const word = (row, index) => (index < 0 ? "" : columns[index].words[rows[row][index]]);
  const number = (row, index) => {
    const value = rows[row][index];
    return value === null ? "–" : value.toFixed(columns[index].digits);
  };
  const text = (row, index) => (columns[index].words ? word(row, index) : number(row, index));
  const worstUp = (index) => columns[index].better !== "lower";
  const state = { sort: data.leading, up: worstUp(data.leading), limit: AT_ONCE, rows: [], picked: -1, column: data.leading };

  // -- rows in order

  const words = columns.map((column) => column.words && Intl.Collator("en", { numeric: true }));
  const rank = (index) => (row) => (columns[index].better === "zero" && rows[row][index] !== null
    ? -Math.abs(rows[row][index]) : rows[row][index]);
  function compare(first, second) {
    const { sort, up } = state;
    if (words[sort]) return (up ? 1 : -1) * words[sort].compare(word(first, sort), word(second, sort));
    const [a, b] = [first, second].map(rank(sort));
    if (a === null || b === null) return (a === null) - (b === null); // without a value: last, in either direction
    return (up ? 1 : -1) * (a - b);
  }

  const search = make("input", { type: "search", placeholder: "case or site", size: 14, input: refilter });
  const lead = columns[data.leading];
  const bound = lead.better === "lower" ? "at least" : "at most"; // the poor ones
  const most = make("input", { type: "number", min: 0, step: lead.digits ? 0.05 : 1, input: refilter });
  const choices = shownColumns.filter((index) => columns[index].choose && columns[index].words.length > 1)
    .map((index) => ({ index, select: make("select", { change: refilter }, make("option", { value: "" }, "all"),
      ...columns[index].words.map((name, at) => [name, at])
        .sort((a, b) => words[index].compare(a[0], b[0])).map(([name, at]) => make("option", { value: at }, name))) }));

  const poor = (value, limit) => value !== null && (bound === "at least" ? value >= limit : value <= limit);

  function passes(row) {
    if (choices.some(({ index, select }) => select.value !== "" && rows[row][index] !== Number(select.value))) return false;
    if (most.value !== "" && !poor(rows[row][data.leading], Number(most.value))) return false;
    const wanted = search.value.trim().toLowerCase();
    return !wanted || ["case", "site"].some((role) => word(row, roleAt(role)).toLowerCase().includes(wanted));
  }

  function refilter() {
    state.limit = AT_ONCE;
    arrange();
  }

  function arrange() {
    state.rows = rows.map((_, row) => row).filter(passes).sort((a, b) => compare(a, b) || a - b);
    const all = state.rows.length === rows.length;
    count.textContent = all ? `${rows.length} rows` : `${state.rows.length} of ${rows.length} rows`;
    draw();
  }

  // -- the table

  function best(row) {
    if (!data.best) return new Set();
    const known = numbers.map((index) => text(row, index)).filter((value) => value !== "–");
    const top = String(known.reduce((a, b) => (Number(a) >= Number(b) ? a : b), "-1"));
    return new Set(known.every((value) => value === top) ? [] : numbers.filter((index) => text(row, index) === top));
  }

  const heads = shownColumns.map((index) => {
    const button = make("button", { type: "button", click: () => sortBy(index) }, columns[index].name);
    return make("th", { scope: "col", "data-column": index, class: columns[index].words ? "word" : "" }, button);
  });
  const body = make("tbody", { click: chosen, keydown: moved });
  const table = make("table", { class: "case-rows" }, make("thead", {}, make("tr", {}, ...heads)), body);
  const count = make("output", { class: "count" });
  const more = make("button", { type: "button", class: "more", click: () => { state.limit += 5 * AT_ONCE; draw(); } });

  function rowElement(row, first) {
    const marked = best(row);
    const cells = shownColumns.map((index, place) => make(place ? "td" : "th",
      { ...(place ? {} : { scope: "row" }), "data-column": index, class: [columns[index].words ? "word" : "", marked.has(index) ? "best" : ""].join(" ").trim() },
      text(row, index)));
    return make("tr", { "data-row": row, tabindex: first ? 0 : -1, "aria-current": row === state.picked && "true" }, ...cells);
  }

  function draw() {
    heads.forEach((head, place) => {
      const sorted = shownColumns[place] === state.sort;
      if (sorted) head.setAttribute("aria-sort", state.up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    const shown = state.rows.slice(0, state.limit);
    const entry = shown.includes(state.picked) ? state.picked : shown[0];
    body.replaceChildren(...shown.map((row) => rowElement(row, row === entry)));
    if (!shown.length) body.append(make("tr", {}, make("td", { class: "word", colspan: shownColumns.length }, "No case matches.")));
    const left = state.rows.length - shown.length;
    more.hidden = left <= 0;
    more.textContent = `Show ${Math.min(left, 5 * AT_ONCE)} more of ${left}`;
  }

  function sortBy(index) {
    state.up = state.sort === index ? !state.up : columns[index].words ? true : worstUp(index);
    state.sort = index;
    arrange();
  }

  // -- one case: its row, its points, its name, its command

  const said = make("span", { class: "said" });
  const link = command(document.getElementById("view-link").content.firstElementChild.cloneNode(true));
  const panel = make("div", { class: "picked", role: "status", hidden: "" }, said, link);

  function name(row, column) {
    const where = ["case", "site", "organ"].map((role) => word(row, roleAt(role))).filter(Boolean).join(" · ");
    const values = numbers.length && columns[column].digits !== undefined
      ? `${columns[column].name} ${number(row, column)}` : "";
    return [where, values].filter(Boolean).join(" · ");
  }

  function pick(row, column, scroll) {
    state.picked = row;
    state.column = column;
    if (!state.rows.includes(row)) {
      search.value = "";
      most.value = "";
      choices.forEach(({ select }) => { select.value = ""; });
      arrange();
    }
    state.limit = Math.max(state.limit, state.rows.indexOf(row) + 1);
    draw();
    const shown = body.querySelector(`[data-row="${row}"]`);
    if (scroll) shown.parentElement.closest(".table").scrollTop = shown.offsetTop - 120;
    panel.hidden = false;
    said.textContent = name(row, column);
    const which = roleAt("run");
    const run = (columns[column].runs ?? columns[data.leading].runs ?? [])[which < 0 ? 0 : rows[row][which]];
    link.hidden = run === undefined || run === null;
    if (!link.hidden) fillIn(row, run);
    markPoints(row);
    return shown;
  }

  // SITE/CASE where several sites of a run have a case of this name.
  function inFull(row, name) {
    const [ofCase, ofSite] = [roleAt("case"), roleAt("site")];
    const twins = data.place && ofSite >= 0 && rows.some((_, other) => (
      word(other, ofCase) === name && word(other, ofSite) !== word(row, ofSite)));
    return twins ? `${word(row, ofSite)}/${name}` : name;
  }

  function fillIn(row, run) {
    const key = (role) => {
      const column = columns[roleAt(role)];
      return column ? (column.keys ?? column.words)[rows[row][roleAt(role)]] : "";
    };
    const parts = { run: data.place ? folder(data.place, run) : run, case: inFull(row, key("case")), organ: key("organ") };
    link.dataset.site = word(row, roleAt("site"));
    link.querySelectorAll("[data-view]").forEach((span) => { span.textContent = quoted(parts[span.dataset.view]); });
  }

  function chosen(event) {
    const row = event.target.closest("[data-row]");
    if (!row) return;
    const cell = event.target.closest("[data-column]");
    const column = cell ? Number(cell.dataset.column) : data.leading;
    pick(Number(row.dataset.row), columns[column].digits === undefined ? data.leading : column, false).focus({ preventScroll: true });
  }

  function moved(event) {
    const row = event.target.closest("[data-row]");
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    if (row && step && row[step]) {
      event.preventDefault();
      row.tabIndex = -1;
      row[step].tabIndex = 0;
      row[step].focus();
    } else if (row && (event.key === "Enter" || event.key === " ")) {
      event.preventDefault();
      pick(Number(row.dataset.row), data.leading, false).focus();
    }
  }

  // -- points

  const plots = [...document.querySelectorAll("svg.points, svg.strip")].map((svg) => {
    const single = [...svg.querySelectorAll("circle[data-row]")].map((dot) => ({
      x: dot.cx.baseVal.value, y: dot.cy.baseVal.value, column: data.leading, row: Number(dot.dataset.row),
      words: dot.textContent,
    }));
    const points = [...svg.querySelectorAll(".dots")].flatMap((path) => {
      const column = Number(path.closest("[data-column]").dataset.column);
      const places = path.getAttribute("d").match(/[\d.-]+,[\d.-]+/g) ?? [];
      const rowsHere = path.dataset.rows.split(" ").map(Number);
      return places.map((place, index) => {
        const [x, y] = place.split(",").map(Number);
        return { x, y, column, row: rowsHere[index] };
      });
    });
    return { svg, points: [...single, ...points] };
  });
  const tip = make("div", { class: "tip", hidden: "" });
  document.body.append(tip);

  function markPoints(row) {
    plots.forEach(({ svg, points }) => {
      svg.querySelectorAll(".mark").forEach((mark) => mark.remove());
      points.filter((point) => point.row === row).forEach((point) => {
        const mark = document.createElementNS(svg.namespaceURI, "circle");
        for (const [key, value] of Object.entries({ class: "mark", cx: point.x, cy: point.y, r: 7 })) mark.setAttribute(key, value);
        svg.append(mark);
      });
    });
  }

  function nearest({ svg, points }, event) {
    const box = svg.getBoundingClientRect();
    const scale = box.width / svg.viewBox.baseVal.width;
    let found = null;
    let least = REACH;
    for (const point of points) {
      const distance = Math.hypot(box.left + point.x * scale - event.clientX, box.top + point.y * scale - event.clientY);
      if (distance < least) [found, least] = [point, distance];
    }
    return found;
  }

  plots.forEach((plot) => {
    plot.svg.addEventListener("pointermove", (event) => {
      const point = nearest(plot, event);
      tip.hidden = !point;
      plot.svg.classList.toggle("on-point", Boolean(point));
      if (!point) return;
      tip.textContent = point.words ?? name(point.row, point.column);
      tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
      tip.style.top = `${event.clientY + 16}px`;
    });
    plot.svg.addEventListener("pointerleave", () => { tip.hidden = true; });
    plot.svg.addEventListener("click", (event) => {
      const point = nearest(plot, event);
      if (point) pick(point.row, point.column, true);
    });
  });

  // -- the whole

  const field = (label, input) => make("label", {}, `${label} `, input);
  const content = () => ({
    caption: "Single cases", foot: [],
    head: [shownColumns.map((index) => ({ main: columns[index].name, small: "", span: 1, best: false }))],
    body: state.rows.map((row) => {
      const marked = best(row);
      return shownColumns.map((index) => ({ main: tidy(text(row, index)), small: "", span: 1, best: marked.has(index) }));
    }),
  });
  document.getElementById("case-list").append(
    make("div", { class: "filters", role: "search", "aria-label": "Filter cases" },
      field("Search", search),
      ...choices.map(({ index, select }) => field(columns[index].name, select)),
      field(`${lead.name} ${bound}`, most), count),
    make("div", { class: "table tall", tabindex: 0, role: "region", "aria-label": "Single cases" }, table),
    more, panel, tools(content, "cases"));
  arrange();
})();
