{
  // Part 2: d_k, keys and scale; the variance, the softmax, its Jacobian and the gradient, at once.
  const { by, chart, bars, pairs, scale, sharpness, softmax, plain, shown, say, tell, math, paint, s } = X;
  const { el } = LH;
  const DMODEL = 512;
  const state = { dk: 64, rule: "none", keys: 16, row: 0 };
  const colourOf = (rule) => `var(--${rule})`;
  const factorOf = (rule, dk) => scale(rule, dk, DMODEL);

  // ---- the derivation: what each line says, what it lights, what is measured
  const LINES = [
    ["q·k = Σ qᵢkᵢ, with d_k terms", "dk", () => `${state.dk} terms`],
    ["E[qᵢkᵢ] = E[qᵢ] E[kᵢ] = 0", "histogram", () => `mean: ${(pairs.mean[state.dk] / Math.sqrt(pairs.variance[state.dk])).toFixed(2).replace("-", "−")} of the spread`],
    ["Var(qᵢkᵢ) = E[qᵢ²] E[kᵢ²] = 1", "lines", () => `one term: ${shown(pairs.variance[1])}`],
    ["Var(q·k) = Σ Var(qᵢkᵢ) = d_k", "lines dk", () => `unscaled: ${shown(pairs.variance[state.dk])}`],
    ["so scores spread by √d_k", "histogram weights", () => `unscaled: ±${shown(Math.sqrt(pairs.variance[state.dk]))}`],
    ["Var(c·q·k) = c² d_k", "rule variance", () => `c = ${shown(factorOf(state.rule, state.dk))}`],
    ["c = 1/√d_k  ⟹  Var = d_k/d_k = 1", "variance histogram weights jacobian gradient median", () =>
      `now: ${shown(variance())}`],
  ];
  const variance = () => pairs.variance[state.dk] * factorOf(state.rule, state.dk) ** 2;
  const parts = [...document.querySelectorAll("[data-part]")];
  let pinned = null;
  function light(names) {
    const lit = new Set((names || "").split(" "));
    parts.forEach((part) => part.classList.toggle("lit", lit.has(part.dataset.part)));
  }
  const measures = LINES.map(() => el("span", { class: "now" }));
  const lines = LINES.map(([text, names], i) => el("li", {}, el("button", {
    type: "button", "aria-pressed": "false",
    onmouseenter: () => light(names), onmouseleave: () => light(pinned),
    onfocus: () => light(names), onblur: () => light(pinned),
    onclick: () => {
      pinned = pinned === names && lines[i].firstChild.getAttribute("aria-pressed") === "true" ? null : names;
      lines.forEach((line, j) => line.firstChild.setAttribute("aria-pressed", String(j === i && pinned !== null)));
      light(pinned);
    },
  }, el("span", { class: "formula" }, math(text)), measures[i])));
  by("derivation").append(...lines);

  // ---- the pictures
  const BINS = 48;
  const histogram = chart("histogram", {
    x: { min: -1, max: 1, ticks: [-1, -0.5, 0, 0.5, 1], label: "score" },
    y: { min: 0, max: 1, ticks: [], label: "" }, label: "Histogram of the scores", left: 12, height: 190,
  });
  const bar = histogram.mark("bars", "path", {}, { class: "bars" });
  const spread = histogram.mark("spread", "path", {}, { class: "spread" });
  const counts = new Float64Array(BINS);
  function drawHistogram(factor, deviation) {
    const scores = pairs.sums[state.dk - 1];
    const edge = 2 ** Math.ceil(Math.log2(3.2 * deviation)); // the axis jumps by powers of two
    counts.fill(0);
    const slope = (factor * BINS) / (2 * edge);
    for (let i = 0; i < scores.length; i++) {
      const bin = Math.floor(scores[i] * slope + BINS / 2);
      if (bin >= 0 && bin < BINS) counts[bin]++;
    }
    let most = 0;
    for (const count of counts) most = Math.max(most, count);
    const { left, right, top, bottom } = histogram, wide = (right - left) / BINS;
    let d = "";
    for (let i = 0; i < BINS; i++) {
      if (counts[i]) d += `M${(left + i * wide + 0.4).toFixed(1)} ${bottom}v${((-counts[i] / most) * (bottom - top)).toFixed(1)}h${(wide - 0.8).toFixed(1)}V${bottom}z`;
    }
    bar.setAttribute("d", d);
    bar.style.fill = colourOf(state.rule);
    const middle = (left + right) / 2, reach = ((right - left) / 2) * (deviation / edge);
    spread.setAttribute("d", `M${middle - reach} ${top - 8}V${bottom}M${middle + reach} ${top - 8}V${bottom}M${middle - reach} ${top - 5}H${middle + reach}`);
    [-1, -0.5, 0, 0.5, 1].forEach((share, i) => { histogram.xticks[i].textContent = String(Number((share * edge).toPrecision(3))).replace("-", "−"); });
  }

  const every = [...new Set(Array.from({ length: 60 }, (_, i) => Math.round(512 ** (i / 59))))];
  const WIDTHS = { min: 1, max: 512, log: true, ticks: [1, 2, 8, 64, 512], names: ["1", "2", "8", "64", "512"], label: "d_k" };
  const varianceLines = chart("variance-lines", {
    x: WIDTHS, y: { min: 1 / 600, max: 600, log: true, ticks: [0.01, 0.1, 1, 10, 100], names: ["0.01", "0.1", "1", "10", "100"], label: "variance" },
    label: "The variance of the scores by d_k, a line for each scale", height: 190,
  });
  const ENDS = { none: "none", sqrt_dk: "1/√d_k", dk: "1/d_k", sqrt_dmodel: "1/√d_model" };
  const ruleLines = Object.fromEntries(X.RULES.map((rule) => [rule, varianceLines.line(rule, every,
    every.map((d) => pairs.variance[d] * factorOf(rule, d) ** 2), { style: `stroke:${colourOf(rule)}` })]));
  const labelAt = { none: [22, 60], sqrt_dk: [5, 1.9], dk: [330, 0.014], sqrt_dmodel: [1.25, 0.022] };
  for (const [rule, [x, y]] of Object.entries(labelAt)) {
    const anchor = rule === "none" ? "end" : "start";
    const text = s("text", { x: varianceLines.sx(x), y: varianceLines.sy(y), class: "name", style: `fill:${colourOf(rule)}`, "text-anchor": rule === "dk" ? "end" : anchor });
    math(ENDS[rule]).forEach((part) => text.append(typeof part === "string" ? part : s("tspan", { class: "sub", dy: 3 }, part.textContent)));
    varianceLines.svg.append(text);
  }
  const here = varianceLines.mark("here", "circle", { r: 5 }, { class: "here" });
  varianceLines.drag((d) => setDk(Math.round(d)));

  const drawWeights = bars("weights", "The softmax weights of one query");

  const gradientLines = chart("gradient-lines", {
    x: WIDTHS, y: { min: 1e-5, max: 1, log: true, ticks: [1e-4, 1e-2, 1], names: ["0.0001", "0.01", "1"], label: "share" },
    label: "The share of a gradient that gets through the softmax, by d_k", height: 190, left: 46,
  });
  const grid = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512];
  const kept = new Map(); // by rule and keys
  function gradients(rule, keys) {
    const name = `${rule} ${keys}`;
    if (!kept.has(name)) kept.set(name, grid.map((d) => sharpness(d, factorOf(rule, d), keys)));
    return kept.get(name);
  }
  let drawn = "";
  const passing = gradientLines.mark("passing", "circle", { r: 5 }, { class: "here" });
  function drawGradients(found) {
    const name = `${state.rule} ${state.keys}`;
    if (name !== drawn) {
      drawn = name;
      const colour = colourOf(state.rule), mine = gradients(state.rule, state.keys);
      gradientLines.line("reference", grid, gradients("sqrt_dk", state.keys).map((one) => one.median), { class: "line reference" });
      gradientLines.line("all", grid, mine.map((one) => one.all), { class: "line dashed" }).style.stroke = colour;
      gradientLines.line("median", grid, mine.map((one) => one.median)).style.stroke = colour;
      gradientLines.svg.append(passing);
    }
    passing.setAttribute("cx", gradientLines.sx(state.dk));
    passing.setAttribute("cy", gradientLines.sy(found.median));
    passing.style.fill = colourOf(state.rule);
  }
  gradientLines.drag((d) => setDk(Math.round(d)));

  const canvas = by("jacobian-cells");
  let weights = new Float64Array(state.keys);
  function drawJacobian() {
    const n = weights.length;
    paint(canvas, n, n, (i) => {
      const row = Math.floor(i / n), column = i - row * n;
      return row === column ? weights[row] * (1 - weights[row]) : -weights[row] * weights[column];
    }, 0.25, 0.5);
    let trace = 0;
    for (const p of weights) trace += p * (1 - p);
    canvas.setAttribute("aria-label", `The Jacobian of the softmax, ${n} by ${n}; its trace is ${plain(trace)}`);
    say("jacobian-words", `Its trace, for this query: ${shown(trace)}.`);
  }
  X.onTheme(drawJacobian);

  // ---- all of it
  function update() {
    const factor = factorOf(state.rule, state.dk), found = sharpness(state.dk, factor, state.keys), v = variance();
    say("dk-value", String(state.dk));
    say("keys-value", String(state.keys));
    say("score-variance", plain(v));
    say("top-weight", plain(found.top));
    say("effective", `${found.effective.toFixed(1)} of ${state.keys}`);
    say("signal", shown(found.signal));
    say("survival", shown(found.median));
    measures.forEach((node, i) => { node.textContent = LINES[i][2](); });
    drawHistogram(factor, Math.sqrt(v));
    here.setAttribute("cx", varianceLines.sx(state.dk));
    here.setAttribute("cy", varianceLines.sy(v));
    here.style.fill = colourOf(state.rule);
    for (const rule of X.RULES) ruleLines[rule].classList.toggle("bold", rule === state.rule);
    if (weights.length !== state.keys) weights = new Float64Array(state.keys);
    softmax(pairs.sums[state.dk - 1], factor, state.row * X.KEYS, state.keys, weights);
    drawWeights(weights, colourOf(state.rule));
    drawGradients(found);
    drawJacobian();
    document.querySelectorAll("#jumps button").forEach((chip) => chip.setAttribute("aria-pressed", String(Number(chip.value) === state.dk)));
    tell("scores-said", () => `d_k = ${state.dk}, ${state.rule === "none" ? "no scale" : X.NAMES[state.rule]}: the variance of the scores is ${shown(v)}, the top key gets ${shown(found.top)} of the weight, and a row looks at ${found.effective.toFixed(1)} of its ${state.keys} keys.`);
  }
  const dk = by("dk"), rule = by("rule"), keys = by("keys");
  function setDk(value) {
    state.dk = Math.min(512, Math.max(1, value));
    dk.value = state.dk;
    update();
  }
  dk.addEventListener("input", () => { state.dk = Number(dk.value); update(); });
  keys.addEventListener("input", () => { state.keys = Number(keys.value); update(); });
  rule.addEventListener("change", () => { state.rule = rule.value; update(); });
  by("another").onclick = () => { state.row = (state.row + 1) % X.ROWS; update(); };
  by("jumps").append(...[1, 2, 4, 8, 64, 128, 512].map((d) =>
    el("button", { type: "button", class: "chip", value: d, onclick: () => setDk(d) }, String(d))));
  rule.value = state.rule;
  dk.value = state.dk;
  keys.value = state.keys;
  update();
}
