{
  // Part 4: dot product, additive and cosine on the same vectors, as these grow.
  const { by, bars, chart, matrix, normals, softmax, say, shown, tell, percent } = X;
  const WIDTH = 64, KEYS = 16, ROWS = 16;
  const draw = normals(11);
  const rows = (count, factor) => matrix(count, WIDTH, draw, factor);
  const query = rows(ROWS, 1), key = rows(KEYS, 1);
  const product = (a, b) => { // a (n×64) times b (64×64)
    const out = new Float64Array(a.rows * WIDTH);
    for (let i = 0; i < a.rows; i++) for (let k = 0; k < WIDTH; k++) for (let j = 0; j < WIDTH; j++) {
      out[i * WIDTH + j] += a.values[i * WIDTH + k] * b.values[k * WIDTH + j];
    }
    return out;
  };
  // So that the hidden layer and the score have about unit variance, as in the lab.
  const hiddenQuery = product(query, rows(WIDTH, (2 * WIDTH) ** -0.5));
  const hiddenKey = product(key, rows(WIDTH, (2 * WIDTH) ** -0.5));
  const v = Float64Array.from({ length: WIDTH }, () => draw() * WIDTH ** -0.5);
  const bound = v.reduce((sum, x) => sum + Math.abs(x), 0);
  const dots = new Float64Array(ROWS * KEYS), cosines = new Float64Array(ROWS * KEYS);
  for (let i = 0; i < ROWS; i++) for (let j = 0; j < KEYS; j++) {
    let dot = 0, a = 0, b = 0;
    for (let d = 0; d < WIDTH; d++) {
      const x = query.values[i * WIDTH + d], y = key.values[j * WIDTH + d];
      dot += x * y; a += x * x; b += y * y;
    }
    dots[i * KEYS + j] = dot / Math.sqrt(WIDTH);
    cosines[i * KEYS + j] = (dot / Math.sqrt(a * b)) * Math.sqrt(WIDTH);
  }
  const additive = new Float64Array(ROWS * KEYS);
  // Fills `additive`; gives the mean slope of tanh, which is what W_q and W_k get of the gradient.
  function bend(growth) {
    let slope = 0;
    for (let i = 0; i < ROWS; i++) for (let j = 0; j < KEYS; j++) {
      let score = 0;
      for (let h = 0; h < WIDTH; h++) {
        const t = Math.tanh(growth * (hiddenQuery[i * WIDTH + h] + hiddenKey[j * WIDTH + h]));
        score += v[h] * t;
        slope += 1 - t * t;
      }
      additive[i * KEYS + j] = score;
    }
    return slope / (ROWS * KEYS * WIDTH);
  }
  const room = new Float64Array(KEYS);
  function measure(scores, factor) {
    let most = 0, top = 0;
    for (const score of scores) most = Math.max(most, Math.abs(score * factor));
    for (let row = 0; row < ROWS; row++) {
      let best = 0;
      for (const p of softmax(scores, factor, row * KEYS, KEYS, room)) best = Math.max(best, p);
      top += best / ROWS;
    }
    return { most, top };
  }
  const at = (growth) => {
    const slope = bend(growth);
    return { slope, dot: measure(dots, growth * growth), additive: measure(additive, 1), cosine: measure(cosines, 1) };
  };

  const KINDS = ["dot", "additive", "cosine"];
  const GROWN = Array.from({ length: 13 }, (_, i) => 2 ** (i / 2));
  const course = GROWN.map(at);
  const LONG = { min: 1, max: 64, log: true, ticks: [1, 4, 16, 64], names: ["1", "4", "16", "64"], label: "times as long" };
  const charts = {
    most: chart("rival-scores", { x: LONG, y: { min: 1, max: 20000, log: true, ticks: [1, 10, 100, 1000, 10000], names: ["1", "10", "100", "1,000", "10,000"], label: "|score|" }, label: "The largest score, as vectors grow", left: 48 }),
    top: chart("rival-tops", { x: LONG, y: { min: 0, max: 1, ticks: [0, 0.5, 1], names: ["0", "0.5", "1"], label: "weight" }, label: "The top weight, as vectors grow" }),
  };
  charts.most.line("bound", [1, 64], [bound, bound], { class: "line reference" });
  charts.most.svg.append(X.s("text", { x: charts.most.right, y: charts.most.sy(bound) - 5, "text-anchor": "end" }, `additive bound |v|₁ = ${shown(bound)}`));
  const dotsOf = {};
  for (const [name, one] of Object.entries(charts)) {
    for (const kind of KINDS) one.line(kind, GROWN, course.map((each) => each[kind][name]), { style: `stroke:var(--${kind})` });
    dotsOf[name] = KINDS.map((kind) => one.mark(`${kind} here`, "circle", { r: 4.5 }, { class: "here", style: `fill:var(--${kind})` }));
    one.drag((growth) => { slider.value = Math.log2(growth); update(); });
  }
  const draws = Object.fromEntries(KINDS.map((kind) => [kind, bars(`${kind}-bars`, `Weights of one query: ${kind}`)]));

  const slider = by("longer");
  function update() {
    const growth = 2 ** Number(slider.value), found = at(growth);
    say("growth-value", shown(growth, 2));
    slider.setAttribute("aria-valuetext", `${shown(growth, 2)} times as long`);
    draws.dot(softmax(dots, growth * growth, 0, KEYS, room), "var(--dot)");
    draws.additive(softmax(additive, 1, 0, KEYS, room), "var(--additive)");
    draws.cosine(softmax(cosines, 1, 0, KEYS, room), "var(--cosine)");
    for (const kind of KINDS) say(`${kind}-words`, `largest |score| ${Number(found[kind].most.toPrecision(3)).toLocaleString("en")} · top weight ${found[kind].top.toFixed(2)}`);
    for (const [name, one] of Object.entries(charts)) dotsOf[name].forEach((dot, i) => {
      dot.setAttribute("cx", one.sx(growth));
      dot.setAttribute("cy", one.sy(found[KINDS[i]][name]));
    });
    tell("rivals-said", () => `Vectors ${shown(growth, 2)} times as long: the top weight is ${found.dot.top.toFixed(2)} for the dot product, ${found.additive.top.toFixed(2)} for additive, ${found.cosine.top.toFixed(2)} for cosine; tanh passes ${percent(found.slope)} of the gradient.`);
  }
  slider.addEventListener("input", update);
  slider.value = 0;
  update();
}
