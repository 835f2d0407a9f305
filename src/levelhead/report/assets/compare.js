// Two runs or models: the map of differences, the chosen head in both, and their curves over each other.
(async () => {
  const { data, el, fill, number } = LH;
  const { fields, layers, sides, legend, levels } = data;
  const by = (id) => document.getElementById(id);
  const order = Object.keys(legend), KINDS = ["before", "after"], MAIN = 9; // statistics that stand before the others
  const state = { ...data.chosen, by: data.statistic };

  // ------------------------------------------------------------ numbers of both, by layer and head

  // Where the heads of each layer begin, in the order that a side has them.
  const startsOf = (counts) => {
    let sum = 0;
    return Object.fromEntries(Object.entries(counts).map(([name, heads]) => { const at = sum; sum += heads; return [name, at]; }));
  };
  const total = (counts) => Object.values(counts).reduce((a, b) => a + b, 0);
  const now = [], courses = [];
  for (const side of sides) {
    const count = total(side.layers), starts = startsOf(side.layers), values = {};
    for (const [name, text] of Object.entries(side.now)) values[name] = await Packed.floats(text, 1, count);
    now.push({ starts, values });
    if (!side.course) continue;
    const { packed, steps, layers: counts } = side.course, lines = {}, many = total(counts);
    for (const [name, text] of Object.entries(packed)) lines[name] = await Packed.floats(text, steps.length, many);
    courses.push({ starts: startsOf(counts), many, steps, lines });
  }
  const place = (which, layer, head) => now[which].starts[layers[layer].names[which]] + head;
  const value = (which, layer, head, name) => now[which].values[name][place(which, layer, head)];
  const verdict = (which, layer, head) => {
    const code = sides[which].codes[place(which, layer, head)];
    return { verdict: order[Math.floor(code / levels.length)], level: levels[code % levels.length], rank: code % levels.length };
  };
  const named = ({ verdict: name, level }) => (["info", "ok"].includes(level) ? name : `${name} (${level})`);
  const known = Object.keys(fields).filter((name) => now.every(({ values }) => values[name].some((x) => !Number.isNaN(x))));

  // From one to the other: above 0 is worse. On a logarithmic axis it is the ratio that counts.
  function change(layer, head, name) {
    if (name === "verdict") return verdict(0, layer, head).rank - verdict(1, layer, head).rank;
    const [was, is] = [0, 1].map((which) => value(which, layer, head, name)), field = fields[name];
    const moved = field.log && was > 0 && is > 0 ? Math.log(is / was) : is - was;
    return field.bad === "low" ? -moved : moved;
  }

  // ------------------------------------------------------------ the map

  let cells = [];
  function build() {
    const most = Math.max(...layers.map((layer) => layer.heads)), longest = Math.max(...layers.map((layer) => layer.short.length));
    cells = layers.map((layer, at) => Array.from({ length: layer.heads }, (_, head) => el("button", {
      type: "button", role: "gridcell", class: "changed", tabindex: -1, "data-testid": "cell", "data-layer": at, "data-head": head,
    })));
    by("map").style.setProperty("--names", `${Math.min(Math.max(longest * 0.58 + 1, 4), innerWidth < 600 ? 9 : 18)}em`);
    by("map").classList.toggle("tall", layers.length > 24);
    by("map").classList.toggle("dense", most > 24); // too many for letters
    by("map").replaceChildren(
      el("div", { role: "row" }, el("span", { class: "corner", role: "columnheader" }, "head"),
        Array.from({ length: most }, (_, head) => el("span", { role: "columnheader" }, String(head)))),
      ...layers.map((layer, at) => el("div", { role: "row" }, el("span", { role: "rowheader", title: layer.names[1] }, layer.short), cells[at])));
  }

  // Of every head, and the largest among them.
  function changesIn(name) {
    const changes = layers.map((layer, at) => Array.from({ length: layer.heads }, (_, head) => change(at, head, name)));
    return { changes, most: changes.flat().reduce((most, x) => (Number.isFinite(x) ? Math.max(most, Math.abs(x)) : most), 1e-12) };
  }

  // The same in small for the statistics that tell most, the verdict first.
  function drawMaps() {
    const shown = ["verdict", ...known.slice(0, MAIN)].slice(0, 6), most = Math.max(...layers.map((layer) => layer.heads));
    fill("maps", shown.map((name) => el("button", { type: "button", class: "multiple", "aria-pressed": String(name === state.by), onclick: () => choose({ by: name }) },
      el("span", {}, name === "verdict" ? name : fields[name].label), el("span", { class: "small-map" }, el("canvas", { "aria-hidden": "true" })))));
    by("maps").querySelectorAll("canvas").forEach((canvas, i) => {
      const { changes, most: far } = changesIn(shown[i]), [card, warm, cool] = ["card", "warm", "cool"].map(Draw.rgb);
      Draw.cells(canvas, layers.length, Math.max(2, Math.min(10, Math.floor(90 / layers.length))), (share) => Math.min(most - 1, Math.floor(share * most)), (row, column) => {
        const moved = changes[row][column] || 0, end = moved > 0 ? warm : cool;
        return Draw.pixel(card.map((part, c) => part + (end[c] - part) * Math.min(1, Math.abs(moved) / far) ** 0.7));
      });
    });
  }

  function drawMap() {
    const { changes, most } = changesIn(state.by);
    cells.forEach((row, layer) => row.forEach((cell, head) => {
      const moved = changes[layer][head], [was, is] = [0, 1].map((which) => verdict(which, layer, head));
      const share = Number.isFinite(moved) ? Math.round(100 * Math.min(1, Math.abs(moved) / most) ** 0.7) : 0;
      cell.style.setProperty("--share", `${Math.round(share * 0.62)}%`); // the letter stays readable
      cell.style.setProperty("--side", moved > 0 ? "var(--warm)" : "var(--cool)");
      cell.textContent = legend[is.verdict].letter;
      const numbers = state.by === "verdict" ? "" : `; ${fields[state.by].label} ${number(value(0, layer, head, state.by))} to ${number(value(1, layer, head, state.by))}`;
      cell.title = `${layers[layer].short}, head ${head}: ${was.verdict === is.verdict ? named(is) : `${named(was)} to ${named(is)}`}${numbers}`;
      cell.setAttribute("aria-label", cell.title);
      const chosen = layer === state.layer && head === state.head;
      cell.tabIndex = chosen ? 0 : -1;
      cell.setAttribute("aria-selected", String(chosen));
    }));
    const field = fields[state.by];
    fill("map-words", `Each row is a layer, each cell a head: the letter is its verdict in ${sides[1].name}, the colour how far it moved.`);
    const sided = state.by === "verdict" || field.bad;
    const words = sided ? ["better", "worse"] : ["smaller", "larger"];
    fill("ramp", el("span", {}, words[0]), el("span", { class: "shades sided" }), el("span", {}, words[1]));
  }

  // ------------------------------------------------------------ the chosen head

  function drawDetail() {
    const { layer, head } = state, both = [0, 1].map((which) => verdict(which, layer, head));
    fill("detail-title", `${layers[layer].short}, head ${head}: ${both[0].verdict === both[1].verdict && both[0].level === both[1].level ? named(both[1]) : `${named(both[0])} → ${named(both[1])}`}`);
    const reasons = [0, 1].map((which) => sides[which].reasons?.[place(which, layer, head)]);
    fill("detail-words", reasons[0] ? sides.flatMap((side, which) => [`${side.name}: ${reasons[which]}.`, el("br")]) : "");
    fill("detail-head", el("tr", {}, el("th", { scope: "col" }, "statistic"), sides.map((side) => el("th", { scope: "col", class: "number" }, side.name))));
    const rows = known.map((name) => el("tr", {}, el("th", { scope: "row", title: fields[name].meaning }, fields[name].label),
      [0, 1].map((which) => el("td", { class: "number" }, number(value(which, layer, head, name))))));
    fill("detail-rows", rows.slice(0, MAIN));
    fill("more-rows", rows.slice(MAIN));
  }

  function drawCurves() {
    if (courses.length < 2) return;
    const { layer, head } = state, name = courses.every(({ lines }) => state.by in lines) ? state.by : data.statistic, field = fields[name];
    by("curves").hidden = false;
    fill("curves-title", `${layers[layer].short}, head ${head}: ${field.label}`);
    fill("key-before", sides[0].name);
    fill("key-after", sides[1].name);
    const lines = courses.map(({ starts, many, steps, lines: all }, which) => {
      const at = starts[layers[layer].names[which]] + head;
      return { xs: steps, ys: steps.map((_, i) => all[name][i * many + at]), class: KINDS[which] };
    });
    over(by("chart"), lines, field.label, innerWidth < 600 ? 280 : 340, field.log, data.guides[name] || []);
    const logged = sides.map((side) => side.course.scalars), shared = logged[0].filter(({ name: one }) => logged[1].some((other) => other.name === one));
    fill("scalars", shared.flatMap(({ name: one }) => [el("h3", {}, one), el("div", { class: "plot" })]));
    by("scalars").querySelectorAll(".plot").forEach((node, i) => over(node, logged.map((all, which) => {
      const found = all.find((each) => each.name === shared[i].name);
      return { xs: found.steps, ys: found.values, class: KINDS[which] };
    }), shared[i].name, 200));
  }
  function over(node, lines, label, height, log = false, guides = []) {
    const [min, max] = Draw.ends(lines.flatMap(({ ys }) => ys), log), [first, last] = Draw.ends(lines.flatMap(({ xs }) => xs));
    Draw.chart(node, {
      x: { min: first, max: last, label: "step" }, y: { min, max, log }, lines, height,
      guides: guides.filter(({ at }) => at >= min && at <= max), label: `${label} over the steps, both`,
    });
  }

  // ------------------------------------------------------------ choosing

  const address = () => `#head=${state.layer}.${state.head}&by=${state.by}`;
  function draw() {
    drawMap();
    drawMaps();
    drawDetail();
    drawCurves();
  }
  function choose(change) {
    Object.assign(state, change);
    if (address() !== location.hash) history.pushState(null, "", address());
    draw();
  }
  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1)), [layer, head] = (given.get("head") || "").split(".").map(Number);
    Object.assign(state, layer in layers && head < layers[layer].heads ? { layer, head } : data.chosen);
    state.by = given.get("by") === "verdict" || known.includes(given.get("by")) ? given.get("by") : data.statistic;
    LH.select("statistic", [["verdict", "verdict"], ...known.map((name) => [name, fields[name].label])], state.by, (chosen) => choose({ by: chosen }));
  }
  const cellOf = (event) => event.target.closest("[role=gridcell]");
  by("map").addEventListener("click", (event) => {
    const cell = cellOf(event);
    if (cell) choose({ layer: Number(cell.dataset.layer), head: Number(cell.dataset.head) });
  });
  by("map").addEventListener("keydown", (event) => {
    const go = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key], cell = cellOf(event);
    if (!go || !cell) return;
    event.preventDefault();
    const row = cells[Math.min(Math.max(Number(cell.dataset.layer) + go[0], 0), cells.length - 1)];
    row[Math.min(Math.max(Number(cell.dataset.head) + go[1], 0), row.length - 1)].focus();
  });

  fill("headline", data.headline);
  fill("sides", sides.flatMap((side) => [el("dt", {}, side.name), el("dd", {}, side.about)]));
  fill("notes", data.notes.map((note) => el("li", {}, note)));
  for (const which of ["better", "worse"]) fill(which, data[which].length ? data[which].map((said) => el("li", {}, said)) : el("li", { class: "soft" }, "nothing"));
  fill("made", data.made);
  build();
  readAddress();
  draw();
  addEventListener("popstate", () => { readAddress(); draw(); });
  Draw.onChange(draw);
})();
