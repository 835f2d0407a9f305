// A statistic over the steps: of the chosen layer's heads, of every layer in small; and the alerts.
(() => {
  const { el, fill, number } = LH;
  const by = (id) => document.getElementById(id);
  const FEW = 16; // heads that a small picture can tell apart

  const linesOf = (layer, name) => Array.from({ length: Run.data.layers[layer].heads }, (_, head) => Run.line(name, Run.place(layer, head)));
  const guidesIn = (name, min, max) => (Run.data.guides[name] || []).filter((guide) => guide.at <= max && guide.at >= min);

  // ------------------------------------------------------------ the chosen layer

  let shown = "";
  function drawChart(force) {
    const { state, data } = Run, { steps } = data, name = Run.statistic(), field = data.fields[name], layer = data.layers[state.layer];
    Run.pick("layer", data.layers.map((each, i) => [i, each.short]), state.layer, (value) => Run.choose({ layer: Number(value), head: 0 }));
    Run.pick("number", Array.from({ length: layer.heads }, (_, head) => [head, head]), state.head, (value) => Run.choose({ head: Number(value) }));
    const key = `${state.layer}.${state.head} ${name}`;
    if (key === shown && !force) return place();
    shown = key;
    fill("chart-title", `${layer.short}: ${field.label}`);
    fill("chart-words", field.meaning);
    const lines = linesOf(state.layer, name), flat = lines.flat();
    let [min, max] = Draw.ends(flat, field.log);
    // A threshold that is near belongs into the picture.
    for (const guide of data.guides[name] || []) {
      if (guide.at > max && guide.at <= max * 2) max = guide.at * (field.log ? 1.3 : 1.02);
      if (guide.at < min && guide.at >= min / 2) min = field.log ? guide.at / 1.3 : guide.at * 0.98;
    }
    const marks = data.alerts.flatMap((group) => group.alerts.filter((alert) => alert.layer === state.layer).map((alert) => ({
      x: steps[Run.nearest(alert.step)], y: lines[alert.head]?.[Run.nearest(alert.step)], class: group.mark,
      title: `step ${number(alert.step)}, head ${alert.head}: ${group.verdict}. ${alert.reason}`,
    })));
    const drawn = lines.map((ys, head) => ({ xs: steps, ys, class: head === state.head ? "chosen" : "other" }));
    drawn.push(...drawn.splice(state.head, 1));
    chartScale = Draw.chart(by("chart"), {
      x: { min: steps[0], max: steps[steps.length - 1] > steps[0] ? steps[steps.length - 1] : steps[0] + 1, label: "step" },
      y: { min, max, log: field.log }, lines: drawn, guides: guidesIn(name, min, max), marks, height: innerWidth < 600 ? 300 : 380,
      label: `${field.label} of the heads of ${layer.short} over the steps`,
    });
    place();
  }
  let chartScale = null;
  function place() {
    const svg = by("chart").firstChild, x = chartScale(Run.data.steps[Run.now()]);
    svg.querySelector(".now")?.remove();
    svg.append(Draw.s("path", { class: "now", d: `M${x} 4V${svg.getAttribute("height") - 36}` }));
  }

  // ------------------------------------------------------------ every layer in small

  let seen = null, built = "", sketchIn = () => {};
  const visible = new Set(); // only what is looked at is drawn
  function drawMultiples() {
    const { data } = Run, name = Run.statistic(), field = data.fields[name], all = data.layers.map((_, layer) => layer);
    fill("multiples-words", `${field.label[0].toUpperCase()}${field.label.slice(1)} of the heads of each layer, all on the same axes${data.layers.some((layer) => layer.heads > FEW) ? "; the band reaches from the smallest to the largest" : ""}. Choose a layer to see it above.`);
    let min = Infinity, max = -Infinity;
    const ofLayer = all.map((layer) => linesOf(layer, name));
    ofLayer.forEach((lines) => lines.forEach((line) => {
      const [low, high] = Draw.ends(line, field.log);
      if (line.some(Number.isFinite)) [min, max] = [Math.min(min, low), Math.max(max, high)];
    }));
    if (min >= max) [min, max] = Draw.ends([min], field.log);
    const guides = guidesIn(name, min, max);
    const layout = data.layers.map((layer) => layer.name).join();
    if (layout !== built) {
      built = layout;
      seen?.disconnect();
      visible.clear();
      fill("multiples", all.map((layer) => el("button", { type: "button", class: "multiple", "data-layer": layer, title: data.layers[layer].name,
        onclick: () => Run.choose({ layer, head: worst(layer) }) },
      el("span", {}, data.layers[layer].short), el("span", { class: "cursor small-plot" }, el("canvas", { "aria-hidden": "true" })))));
      seen = new IntersectionObserver((entries) => entries.forEach(({ target, isIntersecting }) => {
        if (isIntersecting) visible.add(target); else visible.delete(target);
        if (isIntersecting) sketchIn(target);
      }), { rootMargin: "200px" });
      by("multiples").querySelectorAll(".multiple").forEach((node) => seen.observe(node));
    }
    sketchIn = (node) => sketch(node.querySelector("canvas"), ofLayer[node.dataset.layer], { min, max, field, guides });
    visible.forEach(sketchIn);
    moveMultiples();
  }

  function sketch(canvas, lines, { min, max, field, guides }) {
    const ratio = devicePixelRatio || 1, width = canvas.parentNode.clientWidth, height = 64, { steps } = Run.data;
    Object.assign(canvas, { width: width * ratio, height: height * ratio });
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const sx = Draw.scale(steps[0], steps[steps.length - 1] || 1, 1, width - 1), sy = Draw.scale(min, max, height - 3, 3, field.log);
    const trace = (ys) => {
      context.beginPath();
      ys.forEach((y, i) => { if (Number.isFinite(y)) context.lineTo(sx(steps[i]), sy(y)); });
      context.stroke();
      if (steps.length === 1 && Number.isFinite(ys[0])) context.strokeRect(sx(steps[0]) - 1, sy(ys[0]) - 1, 2, 2);
    };
    context.strokeStyle = LH.colour("warm");
    context.setLineDash([2, 3]);
    guides.forEach(({ at }) => { context.beginPath(); context.moveTo(0, sy(at)); context.lineTo(width, sy(at)); context.stroke(); });
    context.setLineDash([]);
    context.strokeStyle = LH.colour("accent");
    if (lines.length <= FEW) {
      context.globalAlpha = 0.75;
      lines.forEach(trace);
      return;
    }
    const side = (pick) => steps.map((_, i) => pick(...lines.map((line) => line[i]).filter(Number.isFinite)));
    const [low, high] = [side(Math.min), side(Math.max)];
    context.fillStyle = LH.colour("accent");
    context.globalAlpha = 0.25;
    context.beginPath();
    high.forEach((y, i) => Number.isFinite(y) && context.lineTo(sx(steps[i]), sy(y)));
    low.map((y, i) => [y, i]).reverse().forEach(([y, i]) => Number.isFinite(y) && context.lineTo(sx(steps[i]), sy(y)));
    context.fill();
    context.globalAlpha = 1;
    trace(field.bad === "low" ? low : high);
  }

  function worst(layer) {
    const name = Run.statistic(), low = Run.data.fields[name].bad === "low";
    const values = Array.from({ length: Run.data.layers[layer].heads }, (_, head) => Run.value(name, Run.place(layer, head), Run.now()));
    const best = values.filter(Number.isFinite).reduce((a, b) => (low ? Math.min(a, b) : Math.max(a, b)), low ? Infinity : -Infinity);
    return Math.max(0, values.indexOf(best));
  }

  function moveMultiples() {
    const { steps } = Run.data, last = steps.length - 1;
    by("multiples").style.setProperty("--at", last ? (steps[Run.now()] - steps[0]) / (steps[last] - steps[0]) : 0.5);
    by("multiples").querySelectorAll(".multiple").forEach((node) =>
      node.setAttribute("aria-pressed", String(Number(node.dataset.layer) === Run.state.layer)));
  }

  // ------------------------------------------------------------ alerts

  const FIRST = 6;
  const older = (many) => `${number(many)} older one${many === 1 ? "" : "s"}`;
  let told = "";
  function drawAlerts() {
    const { alerts } = Run.data;
    if (JSON.stringify(alerts) === told) return; // what is unfolded stays so
    told = JSON.stringify(alerts);
    fill("alerts-title", alerts.length ? "Alerts" : "No alerts");
    const item = (alert) => el("li", {}, el("button", { class: "link", type: "button", onclick: () => {
      Run.choose({ layer: alert.layer, head: alert.head, at: Run.nearest(alert.step) });
      by("heads-title").scrollIntoView();
    } }, `Step ${number(alert.step)}: ${alert.where}`), ` (${alert.level}) ${alert.reason}.`);
    fill("alerts", alerts.map((group) => el("li", {}, Run.mark(group.mark), el("div", {},
      el("h3", {}, group.title), group.hint ? el("p", { class: "advice" }, `→ ${group.hint}`) : null,
      el("ul", { class: "plain" }, group.alerts.slice(0, FIRST).map(item)),
      group.alerts.length > FIRST ? el("details", {}, el("summary", {}, older(group.alerts.length - FIRST)),
        el("ul", { class: "plain" }, group.alerts.slice(FIRST).map(item))) : null,
      group.left_out ? el("p", { class: "soft" }, `and ${older(group.left_out)}`) : null))));
  }

  Run.add({
    draw: () => { drawChart(true); drawMultiples(); drawAlerts(); },
    move: () => { drawChart(false); moveMultiples(); },
  });
})();
