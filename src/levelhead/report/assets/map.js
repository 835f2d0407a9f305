"use strict";
// A map of layers × heads: buttons with a letter each, every statistic on hover or focus.
const HeadMap = (() => {
  const { el, number, data } = LH;

  const mark = (verdict) =>
    el("span", { class: `mark ${verdict}`, "aria-hidden": "true" }, data.legend[verdict].letter);

  const fieldOf = (name) => data.fields[name] || data.main[name];
  const percent = (share) => (share == null ? "–" : `${share > 0 && share < 0.005 ? "<1" : Math.round(100 * share)}%`);
  const value = (name, x) => (fieldOf(name).share ? percent(x) : number(x));

  const numbers = (head, names = Object.keys(data.fields)) =>
    el("dl", { class: "numbers" }, names.flatMap((name) => [
      el("dt", {}, fieldOf(name).label), el("dd", {}, value(name, head[name])),
    ]));

  function tip(node, name, head) {
    const box = document.getElementById("tip");
    const level = ["info", "ok"].includes(head.level) ? "" : ` (${head.level})`;
    box.replaceChildren(
      el("strong", {}, `${name}, head ${head.head}: ${head.verdict}${level}`),
      el("p", {}, head.reason), numbers(head, data.compared && Object.keys(data.compared)));
    box.hidden = false;
    const at = node.getBoundingClientRect(), size = box.getBoundingClientRect();
    const within = (value, most) => `${Math.max(8, Math.min(value, most - 8))}px`;
    const edge = node.closest(".map").getBoundingClientRect().right + 12;
    if (edge + size.width + 8 < innerWidth) { // beside the map, which then stays in sight
      box.style.left = `${edge}px`;
      box.style.top = within(at.top - 60, innerHeight - size.height);
      return;
    }
    const below = at.bottom + 8 + size.height < innerHeight;
    box.style.left = within(at.left - 40, innerWidth - size.width);
    box.style.top = within(below ? at.bottom + 8 : at.top - 8 - size.height, innerHeight);
  }
  const hide = () => { document.getElementById("tip").hidden = true; };
  addEventListener("scroll", hide, { passive: true, capture: true });
  addEventListener("keydown", (event) => event.key === "Escape" && hide());

  const verdictOf = (head) => ({ class: head.verdict, text: data.legend[head.verdict].letter, words: head.verdict });

  // rows: [{name, heads}]; onSelect(layer, head) when one is chosen; shown(head, layer): what a cell
  // says of a head, in text or with a picture
  function draw(id, rows, chosen, onSelect, shown = verdictOf) {
    const cells = rows.map((row, layer) => row.heads.map((head) => {
      const selected = chosen && chosen.layer === layer && chosen.head === head.head;
      const { class: kind, style, text, words } = shown(head, layer);
      return el("button", {
        type: "button", role: "gridcell", "data-testid": "cell", class: kind, style, "aria-selected": String(!!selected),
        tabindex: selected ? 0 : -1, "data-layer": layer, "data-head": head.head,
        "aria-label": `${row.name}, head ${head.head}: ${words}. ${head.reason}`,
        onclick: () => onSelect(layer, head.head),
        onpointerenter: (event) => event.pointerType === "mouse" && tip(event.currentTarget, row.name, head),
        onpointerleave: hide,
        onfocus: (event) => event.currentTarget.matches(":focus-visible") && tip(event.currentTarget, row.name, head),
        onblur: hide,
        onkeydown: (event) => {
          const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
          if (!step) return;
          event.preventDefault();
          const line = cells[Math.min(Math.max(layer + step[0], 0), cells.length - 1)];
          const next = line[Math.min(Math.max(head.head + step[1], 0), line.length - 1)];
          event.currentTarget.tabIndex = -1;
          next.tabIndex = 0;
          next.focus();
        },
      }, text);
    }));
    if (!chosen && cells.length) cells[0][0].tabIndex = 0;
    const most = Math.max(...rows.map((row) => row.heads.length));
    const longest = Math.max(...rows.map((row) => row.name.length));
    const grid = document.getElementById(id);
    const focused = grid.contains(document.activeElement) ? document.activeElement.dataset : null;
    const scrolled = grid.scrollLeft;
    grid.style.setProperty("--names", `${Math.min(Math.max(longest * 0.58 + 1, 4), innerWidth < 600 ? 9 : 18)}em`);
    grid.setAttribute("role", "grid");
    grid.replaceChildren(
      el("div", { role: "row" }, el("span", { class: "corner" }, "head"),
        Array.from({ length: most }, (_, head) => el("span", { role: "columnheader" }, String(head)))),
      ...rows.map((row, layer) => el("div", { role: "row" },
        el("span", { role: "rowheader" }, row.name.split(/(?<=\.)/).flatMap((part) => [part, el("wbr")])), cells[layer])));
    grid.scrollLeft = scrolled;
    if (focused) cells[focused.layer]?.[focused.head]?.focus();
  }

  // One row: each verdict that occurs and how often; choosing some leaves the others pale.
  function chips(id, heads, chosen, onToggle) {
    const counts = Object.keys(data.legend)
      .map((verdict) => [verdict, heads.filter((head) => head.verdict === verdict).length])
      .filter(([, many]) => many);
    LH.fill(id, counts.map(([verdict, many]) => el("button", {
      type: "button", class: "chip", "aria-pressed": String(chosen.has(verdict)), title: data.legend[verdict].meaning,
      onclick: () => onToggle(verdict),
    }, mark(verdict), ` ${verdict} `, el("b", {}, number(many)))));
  }

  return { draw, chips, mark, numbers, value, percent, verdictOf };
})();
