// On a report, a comparison or the doctor's page that the viewer serves: each command that opens a case becomes a link.
"use strict";

// A word of a command as the shell reads it: 'it'"'"'s' is it's.
function unquoted(word) {
  return word.replaceAll(`'"'"'`, "\u0000").replace(/^'|'$/g, "").replaceAll("\u0000", "'");
}

function link(command) {
  const wanted = new URLSearchParams();
  for (const name of ["case", "organ"]) {
    const text = command.querySelector(`[data-view="${name}"]`)?.textContent.trim();
    if (text) wanted.set(name, unquoted(text));
  }
  if (!wanted.has("case")) return;
  if (command.dataset.site) wanted.set("site", command.dataset.site); // another site may have a case of this name
  let open = command.querySelector("a.open-here");
  if (!open) {
    open = Object.assign(document.createElement("a"), { className: "open-here", textContent: "Open" });
    command.append(" ", open);
  }
  const target = `./?${wanted}`;
  if (open.getAttribute("href") !== target) open.setAttribute("href", target);
}

const all = () => document.querySelectorAll(".view-link").forEach(link);
new MutationObserver(all).observe(document.body, { childList: true, subtree: true, characterData: true });
all();
