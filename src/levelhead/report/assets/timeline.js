// Everything over the steps: the strip of heads, the findings, what was logged, and the slider under them.
(() => {
  const { el, fill, number } = LH;
  const by = (id) => document.getElementById(id);
  const MOST_ROWS = 480; // pixels that the strip may be tall, so that it is seen whole
  let rows = [], tall = 1;

  // Steps on the axis: in the middle of its column, which reaches halfway to its neighbours.
  const edge = () => {
    const { steps } = Run.data, last = steps.length - 1;
    return last ? [steps[0] - (steps[1] - steps[0]) / 2, steps[last] + (steps[last] - steps[last - 1]) / 2] : [steps[0] - 1, steps[0] + 1];
  };
  const share = (step) => { const [from, to] = edge(); return (step - from) / (to - from || 1); };
  const stepAt = (part) => { const [from, to] = edge(); return Run.nearest(from + part * (to - from)); };

  // ------------------------------------------------------------ the strip

  // A row is a head; where there are too many for that, a layer, which shows its worst head.
  function layRows() {
    const { layers } = Run.data, single = Run.heads <= MOST_ROWS;
    rows = layers.flatMap((layer, place) => (single
      ? Array.from({ length: layer.heads }, (_, head) => ({ layer: place, head, from: Run.place(place, head), to: Run.place(place, head) + 1 }))
      : [{ layer: place, head: null, from: Run.place(place, 0), to: Run.place(place, 0) + layer.heads }]));
    tall = Math.max(1, Math.min(20, Math.floor(MOST_ROWS / rows.length)));
    if (!single) tall = Math.max(3, tall);
    return single;
  }

  // Of a row's heads at a step: the one that a reader should see.
  function worstOf(row, step, name, low) {
    let worst = NaN;
    for (let at = row.from; at < row.to; at++) {
      const x = Run.value(name, at, step);
      if (!Number.isNaN(x) && (Number.isNaN(worst) || (low ? x < worst : x > worst))) worst = x;
    }
    return worst;
  }

  function paint() {
    const { data, state } = Run, { steps } = data, single = layRows();
    const name = Run.statistic(), field = data.fields[name], low = field.bad === "low";
    const nothing = Draw.pixel(Draw.rgb("page"));
    const column = (part) => stepAt(part);
    let colourOf;
    if (state.by === "verdict") {
      const order = Run.order(), known = order.map((verdict) => (LH.colour(verdict).startsWith("#") ? Draw.pixel(Draw.rgb(verdict)) : Draw.pixel(Draw.rgb("card"))));
      const rank = (code) => data.levels.length * order.length - (code % data.levels.length) * order.length - Math.floor(code / data.levels.length);
      colourOf = (row, step) => {
        let worst = data.not_there, most = -1;
        for (let at = rows[row].from; at < rows[row].to; at++) {
          const code = Run.code(at, step);
          if (code !== data.not_there && rank(code) > most) [worst, most] = [code, rank(code)];
        }
        return worst === data.not_there ? nothing : known[Math.floor(worst / data.levels.length)];
      };
      fill("ramp", el("span", {}, "the colours of the verdicts, listed below"));
    } else {
      const values = rows.map((row) => steps.map((_, step) => worstOf(row, step, name, low)));
      const [min, max] = Draw.ends(values.flat(), field.log), where = Draw.scale(min, max, low ? 255 : 0, low ? 0 : 255, field.log);
      const colours = Draw.ramp(["strip-0", "strip-1", "strip-2", "strip-3"]);
      colourOf = (row, step) => (Number.isNaN(values[row][step]) ? nothing : colours[Math.max(0, Math.min(255, Math.round(where(values[row][step]))))]);
      ramp(colours, min, max, field.log, low, data.guides[name] || []);
    }
    Draw.cells(by("strip-canvas"), rows.length, tall, column, colourOf);
    by("strip-canvas").setAttribute("aria-label", `${field.label} of every head over the steps ${steps[0]} to ${steps[steps.length - 1]}; the slider below and the map of heads say the same in words`);
    fill("strip-words", `${single ? "Each row is a head" : "Each row is a layer and shows its worst head"}, from the first step to the last; ${state.by === "verdict" ? "the colour is its verdict" : low ? "darker is lower, which is worse" : "the stronger the colour, the larger"}. Drag across it, or tap a row.`);
    nameRows();
  }

  function nameRows() {
    const { layers } = Run.data;
    const first = layers.map((_, place) => rows.findIndex((row) => row.layer === place));
    let free = -Infinity;
    fill("strip-names", layers.map((layer, place) => {
      const top = first[place] * tall, room = ((first[place + 1] ?? rows.length) - first[place]) * tall;
      if (top < free) return null;
      free = top + 15;
      return el("span", { style: `top:${top + Math.max(0, (Math.min(room, 40) - 14) / 2)}px`, title: layer.name }, layer.short);
    }));
    by("strip-names").style.height = `${rows.length * tall}px`;
  }

  function ramp(colours, min, max, log, low, guides) {
    const at = Draw.scale(min, max, low ? 100 : 0, low ? 0 : 100, log);
    const shades = Array.from({ length: 9 }, (_, i) => Draw.css(colours[Math.round((i / 8) * 255)]));
    const inside = guides.filter((guide) => guide.at > min && guide.at < max);
    fill("ramp", el("span", {}, Draw.short(Number((low ? max : min).toPrecision(2)))),
      el("span", { class: "shades", style: `background:linear-gradient(90deg, ${shades.join(", ")})` },
        inside.map((guide) => el("i", { style: `left:${at(guide.at)}%`, title: guide.label }))),
      el("span", {}, Draw.short(Number((low ? min : max).toPrecision(2)))));
  }

  // ------------------------------------------------------------ findings and what was logged

  function drawSpans() {
    const { spans, alerts, steps } = Run.data;
    const lanes = []; // where spans overlap they stand below each other
    const bars = spans.map((span) => {
      const lane = lanes.findIndex((end) => end < span.from), row = lane < 0 ? lanes.length : lane;
      lanes[row] = span.to;
      const left = share(steps[span.from]) * 100, width = Math.max(0.6, (share(steps[span.to]) - share(steps[span.from])) * 100);
      return el("button", {
        type: "button", class: `span ${span.mark} ${["info", "ok"].includes(span.level) ? "quiet" : ""}`, title: span.text,
        style: `left:${left}%;width:${width}%;top:${row * 24}px`, onclick: () => Run.choose({ at: span.to }),
      }, el("span", {}, span.name));
    });
    const flat = alerts.flatMap((group) => group.alerts.map((alert) => ({ ...alert, mark: alert.level === "ok" ? "healthy" : group.mark, verdict: group.verdict })));
    const top = lanes.length * 24, seen = new Set();
    const diamonds = flat.filter(({ step, mark }) => { const key = `${step} ${mark}`; return !seen.has(key) && seen.add(key); }).map((alert) => el("button", {
      type: "button", class: `alert-mark ${alert.mark}`, style: `left:${share(alert.step) * 100}%;top:${top}px`,
      "aria-label": `Alert at step ${alert.step}: ${alert.where} ${alert.verdict}`, title: `Step ${number(alert.step)}: ${alert.where} ${alert.verdict} (${alert.level})`,
      onclick: () => Run.choose({ at: Run.nearest(alert.step), layer: alert.layer, head: alert.head }),
    }));
    by("spans").style.height = `${top + (diamonds.length ? 26 : 4)}px`;
    fill("spans", bars, diamonds);
    by("findings-lane").hidden = !bars.length && !diamonds.length;
  }

  function drawScalars() {
    const { scalars } = Run.data, [from, to] = edge();
    fill("scalars", scalars.map((scalar) => el("div", { class: "lane" },
      el("div", { class: "names" }), el("div", { class: "track cursor scalar" }))));
    by("scalars").querySelectorAll(".scalar").forEach((node, place) => {
      const { steps, values, label } = scalars[place], [min, max] = Draw.ends(values), digits = (x) => number(Number(x.toPrecision(3)));
      node.previousSibling.replaceChildren(el("span", { class: "end", style: "top:2px" }, digits(max)),
        el("span", { style: "top:38px;color:var(--ink)", title: label }, label), el("span", { class: "end", style: "bottom:2px" }, digits(min)));
      Draw.chart(node, {
        x: { min: from, max: to }, y: { min, max }, height: 96, left: 0, right: 0, label: `${label} over the steps`,
        lines: [{ xs: steps, ys: values, class: "logged", dots: values.length < 20 }],
      });
    });
  }

  function drawAxis() {
    const [from, to] = edge(), { steps } = Run.data, wide = by("axis").clientWidth;
    fill("axis", Draw.ticks(steps[0], steps[steps.length - 1] || steps[0] + 1, Math.max(2, Math.floor(wide / 90)))
      .filter((tick) => tick >= from && tick <= to)
      .map((tick) => el("span", { style: `left:${share(tick) * 100}%` }, number(tick))), el("b", {}, "step"));
  }

  // ------------------------------------------------------------ where we are

  function move() {
    const { state, data } = Run, at = Run.now(), step = data.steps[at];
    by("timeline").style.setProperty("--at", share(step));
    const slider = by("slider");
    Object.assign(slider, { max: Run.last(), value: at, disabled: Run.last() < 1 });
    slider.setAttribute("aria-valuetext", `step ${step}`);
    if (document.activeElement !== by("at")) by("at").value = step;
    Object.assign(by("at"), { min: data.steps[0], max: data.steps[Run.last()] });
    by("back").disabled = at === 0;
    by("forward").disabled = by("newest").disabled = at === Run.last();
    const row = rows.findIndex((each) => each.layer === state.layer && (each.head === null || each.head === state.head));
    Object.assign(by("chosen-row").style, { top: `${row * tall - 1}px`, height: `${tall + 2}px` });
  }

  function draw() {
    Run.pick("statistic", [["verdict", "verdict"], ...Run.statistics().map((name) => [name, Run.data.fields[name].label])],
      Run.state.by === "verdict" ? "verdict" : Run.statistic(), (chosen) => Run.choose({ by: chosen }));
    paint();
    drawSpans();
    drawScalars();
    drawAxis();
    move();
  }

  // A drag goes through the steps; what ends where it began is a tap, and chooses the row as well.
  const strip = by("strip");
  let began = null;
  const follow = (event) => {
    const box = strip.getBoundingClientRect();
    Run.choose({ at: stepAt(Math.max(0, Math.min(1, (event.clientX - box.left) / box.width))) });
  };
  strip.addEventListener("pointerdown", (event) => { began = event; strip.setPointerCapture(event.pointerId); });
  strip.addEventListener("pointermove", (event) => { if (began && event.buttons && Math.abs(event.clientX - began.clientX) > 3) follow(event); });
  strip.addEventListener("pointercancel", () => { began = null; });
  strip.addEventListener("pointerup", (event) => {
    if (!began) return;
    const tap = Math.hypot(event.clientX - began.clientX, event.clientY - began.clientY) < 6;
    const row = rows[Math.floor((event.clientY - strip.getBoundingClientRect().top) / tall)];
    began = null;
    follow(event);
    if (tap && row) Run.choose({ layer: row.layer, head: row.head ?? worstHead(row) });
  });
  function worstHead(row) {
    const name = Run.statistic(), low = Run.data.fields[name].bad === "low", worst = worstOf(row, Run.now(), name, low);
    for (let at = row.from; at < row.to; at++) if (Run.value(name, at, Run.now()) === worst) return at - row.from;
    return 0;
  }

  by("slider").oninput = (event) => Run.choose({ at: Number(event.target.value) });
  by("at").onchange = (event) => Run.choose({ at: Run.nearest(Number(event.target.value)) });
  by("back").onclick = () => Run.choose({ at: Math.max(0, Run.now() - 1) });
  by("forward").onclick = () => Run.choose({ at: Math.min(Run.last(), Run.now() + 1) });
  by("newest").onclick = () => Run.choose({ at: Run.last() });
  Run.add({ draw, move });
})();
