// What the parts of the page share: random numbers, scores and their softmax, numbers and words,
// and charts drawn by hand. Everything random has a fixed seed, so every reader sees the same.
const X = (() => {
  const RULES = ["sqrt_dk", "none", "dk", "sqrt_dmodel"];
  const NAMES = { sqrt_dk: "1/√d_k", none: "no scale", dk: "1/d_k", sqrt_dmodel: "1/√d_model" };
  const scale = (rule, dk, dmodel) =>
    rule === "none" ? 1 : rule === "dk" ? 1 / dk : 1 / Math.sqrt(rule === "sqrt_dk" ? dk : dmodel);

  // ---------------------------------------------------------------- numbers by chance

  // Uniform by mulberry32, normal by Box and Muller: two of them at a time.
  function normals(seed) {
    let state = seed >>> 0, spare = 0, held = false;
    const uniform = () => {
      state = (state + 0x6d2b79f5) | 0;
      let t = Math.imul(state ^ (state >>> 15), 1 | state);
      t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
      return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
    };
    return () => {
      if (held) { held = false; return spare; }
      const length = Math.sqrt(-2 * Math.log(1 - uniform())), angle = 2 * Math.PI * uniform();
      spare = length * Math.sin(angle);
      held = true;
      return length * Math.cos(angle);
    };
  }

  function matrix(rows, columns, draw, factor = 1) {
    const values = new Float64Array(rows * columns);
    for (let i = 0; i < values.length; i++) values[i] = factor * draw();
    return { rows, columns, values };
  }

  // In place: mean 0 and variance 1, exactly, so that few numbers stand for many.
  function standardise(values) {
    let sum = 0, squares = 0;
    for (const x of values) { sum += x; squares += x * x; }
    const mean = sum / values.length, factor = 1 / Math.sqrt(squares / values.length - mean * mean);
    for (let i = 0; i < values.length; i++) values[i] = (values[i] - mean) * factor;
  }

  // 128 queries with 32 of 1,024 keys each: 4,096 pairs. sums[d − 1] has q·k over the first d
  // dimensions, for every pair, so that any d_k is looked up and nothing is summed while dragging.
  const ROWS = 128, KEYS = 32, MOST = 512, PAIRS = ROWS * KEYS;
  const pairs = (() => {
    const draw = normals(0), sum = new Float64Array(PAIRS), sums = [];
    const query = new Float64Array(ROWS), key = new Float64Array(PAIRS / 4);
    const mean = new Float64Array(MOST + 1), variance = new Float64Array(MOST + 1);
    for (let d = 1; d <= MOST; d++) {
      const kept = new Float32Array(PAIRS);
      for (const entries of [query, key]) {
        for (let i = 0; i < entries.length; i++) entries[i] = draw();
        standardise(entries);
      }
      let total = 0, squares = 0;
      for (let pair = 0; pair < PAIRS; pair++) {
        const score = (sum[pair] += query[pair >> 5] * key[pair & 1023]);
        kept[pair] = score;
        total += score;
        squares += score * score;
      }
      sums.push(kept);
      mean[d] = total / PAIRS;
      variance[d] = squares / PAIRS - mean[d] ** 2;
    }
    return { sums, mean, variance };
  })();

  // ---------------------------------------------------------------- softmax

  // The weights of `count` scores from `start`, times `factor`.
  function softmax(scores, factor = 1, start = 0, count = scores.length, into = new Float64Array(count)) {
    let most = -Infinity, sum = 0;
    for (let i = 0; i < count; i++) most = Math.max(most, factor * scores[start + i]);
    for (let i = 0; i < count; i++) sum += into[i] = Math.exp(factor * scores[start + i] - most);
    for (let i = 0; i < count; i++) into[i] /= sum;
    return into;
  }

  const room = new Float64Array(KEYS), gains = new Float64Array(ROWS);
  // Of all rows at a d_k, with so many keys: the mean top weight, keys attended to (1/Σp²) and
  // signal (the trace of the Jacobian); and the share of a random gradient that gets through the
  // softmax, ‖J‖/√keys, in the median row and over all rows.
  function sharpness(dk, factor, keys) {
    const scores = pairs.sums[dk - 1];
    let top = 0, effective = 0, signal = 0, squares = 0;
    const weights = room.length === keys ? room : room.subarray(0, keys);
    for (let row = 0; row < ROWS; row++) {
      softmax(scores, factor, row * KEYS, keys, weights);
      let most = 0, two = 0, three = 0;
      for (let i = 0; i < keys; i++) {
        const p = weights[i];
        if (p > most) most = p;
        two += p * p;
        three += p * p * p;
      }
      top += most;
      effective += 1 / two;
      signal += 1 - two;
      const through = Math.max(0, two - 2 * three + two * two) / keys;
      squares += through;
      gains[row] = through;
    }
    const sorted = gains.slice().sort();
    return {
      top: top / ROWS, effective: effective / ROWS, signal: signal / ROWS,
      median: Math.sqrt((sorted[ROWS / 2 - 1] + sorted[ROWS / 2]) / 2),
      all: Math.sqrt(squares / ROWS),
    };
  }

  // ---------------------------------------------------------------- words

  const { el } = LH;
  const by = (id) => document.getElementById(id);

  // A number that a machine can read, too: no thousands, no special minus.
  function plain(x, digits = 3) {
    if (x === 0) return "0";
    const size = Math.abs(x);
    if (size >= 1e5 || size < 1e-3) return x.toExponential(1).replace("e+", "e");
    return String(Number(x.toPrecision(digits)).toFixed(Math.max(0, digits - 1 - Math.floor(Math.log10(size)))));
  }
  // The same for people; with two digits, a whole number is written as one.
  const shown = (x, digits) => (digits === 2 ? plain(x, 2).replace(/\.0(?=e|$)/, "") : plain(x, digits)).replace(/-/g, "−").replace(/e−?(\d+)/, (all, n) =>
    `·10${all.includes("−") ? "⁻" : ""}${[...n].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c]).join("")}`);
  const percent = (x) => `${Math.round(100 * x)}\u00a0%`;

  // Text with real subscripts: d_k, d_model, W_q. Lines do not break at an equals sign.
  function math(text) {
    return String(text).replace(/ = /g, "\u00a0=\u00a0").split(/(?<![A-Za-z])([dW]_(?:model|[a-z]))(?![a-z])/).flatMap((part, i) =>
      i % 2 ? [part[0], el("sub", {}, part.slice(2))] : part ? [part] : []);
  }

  function say(id, text) {
    const node = by(id);
    if (node.textContent !== text) node.textContent = text;
  }

  // A sentence for those who read and those who listen; only once the control rests.
  const waiting = new Map();
  function tell(id, make) {
    clearTimeout(waiting.get(id));
    const write = () => by(id).replaceChildren(...math(make()));
    if (!by(id).textContent) write();
    else waiting.set(id, setTimeout(write, 220));
  }

  // ---------------------------------------------------------------- pictures

  const { s, onTheme } = Paint;

  const CLEAR = 1e-9;
  function scaled({ min, max, log }, from, to) {
    const f = log ? (v) => Math.log(Math.max(v, CLEAR)) : (v) => v;
    const low = f(min), high = f(max);
    return (v) => from + ((to - from) * (Math.min(Math.max(f(v), low), high) - low)) / (high - low);
  }

  // A chart in its element: axes once, lines as often as wished. Sizes are in its own units, 360
  // wide, and the picture is as wide as its place. Axes: { min, max, log, ticks, names, label }.
  function chart(id, { x, y, label, height = 210, left = 40 }) {
    const right = 12, top = 22, bottom = 34, width = 360;
    const sx = scaled(x, left, width - right), sy = scaled(y, height - bottom, top);
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    const names = (axis) => axis.names || axis.ticks.map((tick) => shown(tick, 2));
    const xs = x.ticks.map((tick, i) => s("text", {
      x: sx(tick), y: height - bottom + 14, "text-anchor": "middle" }, names(x)[i]));
    y.ticks.forEach((tick, i) => svg.append(
      s("path", { class: "grid", d: `M${left} ${sy(tick)}H${width - right}` }),
      s("text", { x: left - 6, y: sy(tick) + 3.5, "text-anchor": "end" }, names(y)[i])));
    svg.append(...xs,
      s("text", { class: "axis", x: width - right, y: height - 5, "text-anchor": "end" }, ...subscripts(x.label)),
      s("text", { class: "axis", x: 2, y: 11 }, ...subscripts(y.label)));
    const lines = new Map();
    function mark(name, tag, attributes, style = {}) {
      let node = lines.get(name);
      if (!node) {
        lines.set(name, (node = s(tag, style)));
        svg.append(node);
      }
      for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
      return node;
    }
    function line(name, xs, ys, style) {
      let d = "";
      for (let i = 0; i < xs.length; i++) {
        if (ys[i] != null) d += `${d ? "L" : "M"}${sx(xs[i]).toFixed(1)} ${sy(ys[i]).toFixed(1)}`;
      }
      return mark(name, "path", { d }, { class: "line", ...style });
    }
    by(id).replaceChildren(svg);
    // Where a finger or a mouse is, in the units of the x axis.
    function drag(onMove) {
      const back = (px) => {
        const share = Math.min(1, Math.max(0, (px - left) / (width - right - left)));
        return x.log ? x.min * (x.max / x.min) ** share : x.min + share * (x.max - x.min);
      };
      const move = (event) => {
        const box = svg.getBoundingClientRect();
        onMove(back(((event.clientX - box.left) * width) / box.width));
      };
      svg.classList.add("draggable");
      svg.addEventListener("pointerdown", (event) => { svg.setPointerCapture(event.pointerId); move(event); });
      svg.addEventListener("pointermove", (event) => { if (event.buttons) move(event); });
    }
    return { svg, sx, sy, line, mark, drag, xticks: xs, top, bottom: height - bottom, left, right: width - right };
  }
  const subscripts = (text) => math(text).map((part) =>
    typeof part === "string" ? part : s("tspan", { class: "sub", dy: 3 }, part.textContent))
    .flatMap((part, i, all) => (i && typeof all[i - 1] !== "string" ? [s("tspan", { dy: -3 }, part)] : [part]));

  // Bars side by side, from the bottom; the top line is `most`.
  function bars(id, label, most = 1) {
    const width = 360, height = 130, base = 118;
    const svg = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    svg.append(s("path", { class: "grid", d: `M0 8H${width}M0 ${(base + 8) / 2}H${width}M0 ${base}H${width}` }),
      s("text", { x: width, y: 19, "text-anchor": "end" }, most === 1 ? "1" : "½"),
      s("text", { x: width, y: (base + 8) / 2 + 11, "text-anchor": "end" }, most === 1 ? "½" : "¼"));
    const path = s("path", { class: "bars" });
    svg.append(path);
    by(id).replaceChildren(svg);
    return (weights, colour) => {
      const step = (width - 16) / weights.length, wide = Math.min(26, step * 0.76);
      let d = "";
      for (let i = 0; i < weights.length; i++) {
        const x = step * (i + 0.5) - wide / 2, tall = Math.max(0.8, (Math.min(weights[i], most) / most) * (base - 8));
        d += `M${x.toFixed(1)} ${base}v${(-tall).toFixed(2)}h${wide.toFixed(1)}v${tall.toFixed(2)}z`;
      }
      path.setAttribute("d", d);
      if (colour) path.style.fill = colour;
    };
  }

  // A matrix as coloured cells: warm above 0, cool below. `most` has the full colour.
  const paint = (canvas, rows, columns, value, most, bend) =>
    Paint.matrix(canvas, rows, columns, Paint.diverging(value, most, bend));

  return {
    RULES, NAMES, ROWS, KEYS, MOST, PAIRS, scale, normals, matrix, pairs, softmax, sharpness,
    by, plain, shown, percent, math, say, tell, s, chart, bars, paint, onTheme,
  };
})();
