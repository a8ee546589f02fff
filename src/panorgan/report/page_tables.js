// Below every table: its content as LaTeX and CSV, to copy and to save. The same rules as in page_tables.py.
const Tables = (() => {
  const LATEX = {
    "\\": "\\textbackslash{}", "&": "\\&", "%": "\\%", "$": "\\$", "#": "\\#", "_": "\\_", "{": "\\{", "}": "\\}",
    "~": "\\textasciitilde{}", "^": "\\textasciicircum{}", "<": "$<$", ">": "$>$", "±": "$\\pm$", "×": "$\\times$",
    "−": "$-$", "–": "--", "▲": "$\\uparrow$", "▼": "$\\downarrow$", "●": "$\\bullet$", "○": "$\\circ$",
    "✓": "\\checkmark{}", "λ": "$\\lambda$", "·": "$\\cdot$", "\u00a0": "~",
  };
  const latexText = (text) => Array.from(text, (letter) => LATEX[letter] ?? letter).join("");
  const tidy = (text) => text.replace(/[ \t\r\n]+/g, " ").replace(/^ | $/g, "");

  // Text of a cell without what is only spoken, and apart from it what stands in small print.
  function textOf(cell) {
    let main = "";
    const small = [];
    const walk = (node) => {
      if (node.nodeType === Node.TEXT_NODE) main += node.data;
      else if (node.nodeType === Node.ELEMENT_NODE && !node.matches(".hidden, .no-mark, title")) {
        if (node.matches(".sub")) small.push(tidy(node.textContent));
        else node.childNodes.forEach(walk);
      }
    };
    cell.childNodes.forEach(walk);
    return { main: tidy(main), small: small.filter(Boolean).join(" ") };
  }

  const whole = (cell) => [cell.main, cell.small].filter(Boolean).join(" ");

  // Rows of slots; a cell of several rows or columns fills the slots to its right and below with empty ones.
  function rowsOf(table, part) {
    const rows = [];
    const taken = new Map();
    for (const tr of table.querySelectorAll(`:scope > ${part} > tr`)) {
      const row = [];
      const at = rows.length;
      for (const cell of tr.cells) {
        while (taken.has(`${at},${row.length}`)) row.push(taken.get(`${at},${row.length}`));
        const found = { ...textOf(cell), span: cell.colSpan, best: cell.matches(".best") };
        const column = row.length;
        for (let i = 0; i < cell.colSpan; i += 1) {
          row.push(i ? { ...found, span: 0 } : found);
          for (let j = 1; j < cell.rowSpan; j += 1) {
            taken.set(`${at + j},${column + i}`, { main: "", small: "", span: 1, best: false });
          }
        }
      }
      rows.push(row);
    }
    return rows;
  }

  const read = (table) => ({
    caption: table.closest("[aria-label]")?.getAttribute("aria-label") ?? "",
    head: rowsOf(table, "thead"), body: rowsOf(table, "tbody"), foot: rowsOf(table, "tfoot"),
  });

  function latexCell(cell, column) {
    let text = latexText(cell.main);
    if (cell.best) text = `\\textbf{${text}}`;
    if (cell.small) text = [text, `{\\scriptsize ${latexText(cell.small)}}`].filter(Boolean).join(" ");
    return cell.span > 1 ? `\\multicolumn{${cell.span}}{${column ? "c" : "l"}}{${text}}` : text;
  }

  function latex(table) {
    const width = Math.max(1, ...[...table.head, ...table.body, ...table.foot].map((row) => row.length));
    const line = (row) => `    ${row.filter((cell) => cell.span).map(latexCell).join(" & ")} \\\\`;
    return [
      "% \\usepackage{booktabs,amssymb}", "\\begin{table}", "  \\centering", `  \\caption{${latexText(table.caption)}}`,
      `  \\begin{tabular}{l${"r".repeat(width - 1)}}`, "    \\toprule", ...table.head.map(line), "    \\midrule",
      ...table.body.map(line), ...(table.foot.length ? ["    \\midrule", ...table.foot.map(line)] : []),
      "    \\bottomrule", "  \\end{tabular}", "\\end{table}", "",
    ].join("\n");
  }

  // A text that a spreadsheet would take for a formula gets a leading quote, as in csv_cells.py.
  function csvCell(text) {
    const safe = /^'*[=+\-@\t\r\n＝＋－＠]/.test(text) && !/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text) ? `'${text}` : text;
    return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
  }

  function csv(table) {
    const heads = table.head[0].map((_, column) =>
      table.head.map((row) => whole(row[column])).filter(Boolean).join(" "));
    return [heads, ...[...table.body, ...table.foot].map((row) => row.map((cell) => (cell.span ? whole(cell) : "")))]
      .map((row) => `${row.map(csvCell).join(",")}\n`).join("");
  }

  const make = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (typeof value === "function") element.addEventListener(name, value);
      else if (value !== false) element.setAttribute(name, value);
    }
    element.append(...children);
    return element;
  };

  async function copy(text, button) {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      const area = make("textarea", { class: "hidden" });
      area.value = text;
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    const words = (button.dataset.words ??= button.textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = words; }, 1500);
  }

  function save(text, name, type) {
    const url = URL.createObjectURL(new Blob([text], { type }));
    make("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10000);
  }

  // `content` gives the table when a button is pressed.
  function tools(content, name) {
    const button = (words, act) => make("button", { type: "button", click: (event) => act(event.currentTarget) }, words);
    return make("p", { class: "tools" },
      button("Copy LaTeX", (self) => copy(latex(content()), self)),
      button("Copy CSV", (self) => copy(csv(content()), self)),
      button("Save .tex", () => save(latex(content()), `${name}.tex`, "text/x-tex")),
      button("Save .csv", () => save(csv(content()), `${name}.csv`, "text/csv")));
  }

  document.querySelectorAll(".table > table:not(.looks)").forEach((table) => {
    const section = table.closest("[id]")?.id || "table";
    const details = make("details", { class: "export" }, make("summary", {}, "LaTeX, CSV"), tools(() => read(table), section));
    table.parentElement.after(details);
  });

  // Commands: the page knows where it lies once it is opened from disk.
  const quoted = (word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'"'"'`)}'`);
  const here = location.protocol === "file:"
    ? decodeURIComponent(location.pathname).replace(/\/[^/]*$/, "").replace(/^\/(?=[A-Za-z]:)/, "") : "";
  const folder = (place, at) => [here || place, at].filter(Boolean).join("/");

  function command(link) {
    const button = link.querySelector(".copy");
    button.hidden = false;
    button.addEventListener("click", () => copy(tidy(link.querySelector("code").textContent), button));
    return link;
  }
  if (here) {
    document.querySelectorAll('[data-view="run"]').forEach((run) => { run.textContent = quoted(folder("", run.dataset.at)); });
  }
  document.querySelectorAll(".view-link").forEach(command);

  return { make, tools, quoted, folder, command, tidy, csv };
})();
