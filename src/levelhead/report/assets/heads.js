// Every head at the chosen step: the map, and the one that is followed.
(() => {
  const { el, fill, number } = LH;
  const by = (id) => document.getElementById(id);
  let cells = [], built = "";

  function build() {
    const { layers } = Run.data, layout = layers.map((layer) => `${layer.name} ${layer.heads}`).join();
    if (layout === built) return;
    built = layout;
    const most = Math.max(...layers.map((layer) => layer.heads)), longest = Math.max(...layers.map((layer) => layer.short.length));
    cells = layers.map((layer, place) => Array.from({ length: layer.heads }, (_, head) => el("button", {
      type: "button", role: "gridcell", tabindex: -1, "data-testid": "cell", "data-layer": place, "data-head": head,
    })));
    by("map").style.setProperty("--names", `${Math.min(Math.max(longest * 0.58 + 1, 4), innerWidth < 600 ? 9 : 18)}em`);
    by("map").classList.toggle("tall", layers.length > 24);
    by("map").classList.toggle("dense", most > 24); // too many for letters
    by("map").replaceChildren(
      el("div", { role: "row" }, el("span", { class: "corner", role: "columnheader" }, "head"),
        Array.from({ length: most }, (_, head) => el("span", { role: "columnheader" }, String(head)))),
      ...layers.map((layer, place) => el("div", { role: "row" },
        el("span", { role: "rowheader", title: layer.name }, layer.short.split(/(?<=\.)/).flatMap((part) => [part, el("wbr")])), cells[place])));
  }

  const silent = { verdict: "short", level: "info" };
  function move() {
    const { state, data } = Run, seen = new Set();
    cells.forEach((row, layer) => row.forEach((cell, head) => {
      const found = Run.head(Run.place(layer, head)) || silent, key = `${found.verdict} ${found.level}`;
      seen.add(found.verdict);
      if (cell.kept !== key) {
        cell.kept = key;
        cell.className = found.verdict;
        cell.textContent = data.legend[found.verdict].letter;
        cell.setAttribute("aria-label", `${data.layers[layer].short}, head ${head}: ${Run.named(found)}`);
      }
      const chosen = layer === state.layer && head === state.head;
      if (chosen || cell.tabIndex === 0) {
        cell.tabIndex = chosen ? 0 : -1;
        cell.setAttribute("aria-selected", String(chosen));
      }
    }));
    fill("legend", Object.keys(data.legend).filter((verdict) => seen.has(verdict)).map((verdict) => el("li", {}, Run.mark(verdict),
      el("span", {}, el("b", {}, verdict), ` ${data.legend[verdict].meaning}`))));
    detail();
  }

  const step = (at) => number(Run.data.steps[at]);
  function detail() {
    const { state, data } = Run, at = Run.place(state.layer, state.head), found = Run.head(at);
    const name = `${data.layers[state.layer].short}, head ${state.head}`;
    if (!found) {
      fill("detail-title", name);
      fill("detail-words", `No call up to step ${step(Run.now())}.`);
      fill("detail-hint");
      fill("numbers");
      return;
    }
    let since = found.at;
    while (since > 0 && [data.not_there, Run.code(at, found.at)].includes(Run.code(at, since - 1))) since--;
    const rule = data.legend[found.verdict], so = since < found.at ? `, so since step ${step(since)}` : "";
    fill("detail-title", Run.mark(found.verdict), ` ${name}: ${Run.named(found)}`);
    fill("detail-words", `At step ${step(found.at)}${so}: ${rule.meaning}.`);
    fill("detail-hint", ["warning", "error", "critical"].includes(found.level) ? `→ ${rule.hint}` : "");
    fill("numbers", el("dl", { class: "numbers" }, Run.statistics().flatMap((each) => [
      el("dt", { title: data.fields[each].meaning }, data.fields[each].label), el("dd", {}, number(Run.value(each, at, found.at)))])));
  }

  // One listener for all: there may be thousands of cells.
  const map = by("map"), tip = by("tip");
  const cellOf = (event) => event.target.closest("[role=gridcell]");
  map.addEventListener("click", (event) => {
    const cell = cellOf(event);
    if (cell) Run.choose({ layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) });
  });
  map.addEventListener("keydown", (event) => {
    const by = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key], cell = cellOf(event);
    if (event.key === "Escape") tip.hidden = true;
    if (!by || !cell) return;
    event.preventDefault();
    const within = (x, most) => Math.min(Math.max(x, 0), most);
    const row = cells[within(Number(cell.dataset.layer) + by[0], cells.length - 1)];
    row[within(Number(cell.dataset.head) + by[1], row.length - 1)].focus();
  });
  map.addEventListener("pointerover", (event) => {
    const cell = cellOf(event);
    if (!cell || event.pointerType !== "mouse") return;
    const at = Run.place(Number(cell.dataset.layer), Number(cell.dataset.head)), found = Run.head(at);
    tip.replaceChildren(el("strong", {}, cell.getAttribute("aria-label")),
      found ? el("dl", { class: "numbers" }, Run.statistics().slice(0, 8).flatMap((each) => [
        el("dt", {}, Run.data.fields[each].label), el("dd", {}, number(Run.value(each, at, found.at)))])) : "");
    tip.hidden = false;
    const box = cell.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const below = box.bottom + 8 + size.height < innerHeight;
    tip.style.left = `${Math.max(8, Math.min(box.left - 40, innerWidth - size.width - 8))}px`;
    tip.style.top = `${Math.max(8, below ? box.bottom + 8 : box.top - 8 - size.height)}px`;
  });
  map.addEventListener("pointerout", () => { tip.hidden = true; });
  addEventListener("scroll", () => { tip.hidden = true; }, { passive: true, capture: true });

  Run.add({ draw: () => { build(); move(); }, move });
})();
