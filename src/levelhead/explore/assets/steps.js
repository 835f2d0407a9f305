{
  // Part 1: the five steps on three words, one at a time.
  const { by, matrix, normals, paint, shown, math, onTheme } = X;
  const { el } = LH;
  const WORDS = ["love", "Apple", "phones"], WIDTH = 512, DK = 64;

  const times = (a, b) => { // a (n×m) times b (m×p)
    const values = new Float64Array(a.rows * b.columns);
    for (let i = 0; i < a.rows; i++) for (let k = 0; k < a.columns; k++) {
      const x = a.values[i * a.columns + k];
      for (let j = 0; j < b.columns; j++) values[i * b.columns + j] += x * b.values[k * b.columns + j];
    }
    return { rows: a.rows, columns: b.columns, values };
  };
  const flip = (a) => {
    const values = new Float64Array(a.values.length);
    for (let i = 0; i < a.rows; i++) for (let j = 0; j < a.columns; j++) values[j * a.rows + i] = a.values[i * a.columns + j];
    return { rows: a.columns, columns: a.rows, values };
  };
  const each = (a, f) => ({ ...a, values: a.values.map(f) });

  const draw = normals(3);
  const words = matrix(3, WIDTH, draw);
  const [query, key, value] = [0, 1, 2].map(() => times(words, matrix(WIDTH, DK, draw, WIDTH ** -0.5)));
  const scores = times(query, flip(key)), divided = each(scores, (x) => x / Math.sqrt(DK));
  const weights = each(divided, (x) => x), raw = each(scores, (x) => x);
  for (let i = 0; i < 3; i++) {
    X.softmax(divided.values, 1, 3 * i, 3, weights.values.subarray(3 * i, 3 * i + 3));
    X.softmax(scores.values, 1, 3 * i, 3, raw.values.subarray(3 * i, 3 * i + 3));
  }
  const output = times(weights, value);
  X.words = { WORDS, scores };

  const number = by("step-number");
  const tell = (...text) => number.replaceChildren(...text.flatMap((part) => (typeof part === "string" ? math(part) : [part])));
  const at = (a, i, j) => a.values[i * a.columns + j];

  // A wide matrix: rows of coloured cells to point at, or to walk through with the arrow keys.
  const strips = new Set();
  function strip(name, a, names, most, column = "dimension") {
    const canvas = el("canvas", {
      tabindex: 0, role: "slider", "aria-label": `${name}, ${a.rows}×${a.columns}: arrow keys move from number to number`,
      "aria-valuemin": 1, "aria-valuemax": a.columns, "aria-valuenow": 1,
      style: `height:${a.rows * 20}px`,
    });
    const cursor = el("i", { class: "cursor", hidden: true });
    let row = 0, place = 0;
    const show = () => {
      const text = `${name}, ${names[row]}, ${column} ${place + 1} of ${a.columns}: ${shown(at(a, row, place))}`;
      canvas.setAttribute("aria-valuenow", place + 1);
      canvas.setAttribute("aria-valuetext", text);
      cursor.hidden = false;
      cursor.style.cssText = `left:${(100 * (place + 0.5)) / a.columns}%;top:${20 * row}px`;
      tell(text);
    };
    const point = (event) => {
      const box = canvas.getBoundingClientRect();
      place = Math.min(a.columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * a.columns)));
      row = Math.min(a.rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * a.rows)));
      show();
    };
    canvas.addEventListener("pointermove", point);
    canvas.addEventListener("pointerdown", point);
    canvas.addEventListener("focus", show);
    canvas.addEventListener("blur", () => { cursor.hidden = true; });
    canvas.addEventListener("pointerleave", () => { cursor.hidden = document.activeElement !== canvas; });
    canvas.addEventListener("keydown", (event) => {
      const [down, right] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0], PageUp: [0, 16], PageDown: [0, -16], Home: [0, -1e4], End: [0, 1e4] }[event.key] || [];
      if (down == null) return;
      event.preventDefault();
      row = Math.min(a.rows - 1, Math.max(0, row + down));
      place = Math.min(a.columns - 1, Math.max(0, place + right));
      show();
    });
    const paintIt = () => paint(canvas, a.rows, a.columns, (i) => a.values[i], most, 0.8);
    strips.add(paintIt);
    paintIt();
    return el("div", { class: "wide-matrix" },
      el("p", { class: "small" }, math(name), el("span", { class: "soft" }, ` ${a.rows}×${a.columns}`)),
      el("div", { class: "with-names" }, el("div", { class: "names" }, names.map((one) => el("span", {}, one))),
        el("div", { class: "field-of" }, canvas, cursor)));
  }

  // A 3×3 of numbers; each is a button that says where it comes from.
  function square(name, a, most, words, from) {
    const cell = (i, j) => {
      const x = at(a, i, j);
      const tone = x < 0 ? "cool" : "warm", share = Math.min(1, Math.abs(x) / most);
      return el("td", {}, el("button", {
        type: "button", class: "cell", style: `--tone:var(--${tone});--share:${Math.round(share * 62)}%`,
        "aria-label": `${WORDS[i]} to ${WORDS[j]}: ${shown(x)}`,
        onmouseenter: () => tell(from(i, j, x)), onfocus: () => tell(from(i, j, x)), onclick: () => tell(from(i, j, x)),
      }, words(x)));
    };
    return el("div", { class: "square" },
      el("p", { class: "small" }, math(name), el("span", { class: "soft" }, " 3×3")),
      el("table", { class: "cells" },
        el("thead", {}, el("tr", {}, el("td", {}), WORDS.map((word) => el("th", { scope: "col" }, word)))),
        el("tbody", {}, WORDS.map((word, i) => el("tr", {}, el("th", { scope: "row" }, word), [0, 1, 2].map((j) => cell(i, j)))))));
  }
  const two = (x) => x.toFixed(2).replace("-", "−");
  const one = (x) => x.toFixed(1).replace("-", "−");
  const scoresSquare = () => square("scores QKᵀ", scores, 20, one,
    (i, j, x) => `${WORDS[i]} · ${WORDS[j]} = ${shown(x)}: the sum of 64 products, query of “${WORDS[i]}” times key of “${WORDS[j]}”`);
  const dividedSquare = () => square("divided by √64 = 8", divided, 20, two,
    (i, j, x) => `${shown(at(scores, i, j))} / 8 = ${shown(x)}`);
  const weightsSquare = (name = "weights", a = weights) => square(name, a, 1, two,
    (i, j, x) => `“${WORDS[i]}” gives “${WORDS[j]}” ${shown(x)} of its weight; its row sums to 1`);

  let chosen = 0; // whose products step 4 shows
  function products() {
    const a = { rows: 3, columns: DK, values: new Float64Array(3 * DK) };
    for (let j = 0; j < 3; j++) for (let d = 0; d < DK; d++) a.values[j * DK + d] = at(weights, chosen, j) * at(value, j, d);
    return strip(`weights of “${WORDS[chosen]}” times V`, a, WORDS, 3);
  }
  const choose = () => el("div", { class: "chips", role: "group", "aria-label": "Whose weights" }, WORDS.map((word, i) =>
    el("button", { type: "button", class: "chip", "aria-pressed": String(i === chosen), onclick: () => { chosen = i; show(); focusOn(".chips", i); } }, word)));
  const focusOn = (selector, i) => by("step-picture").querySelector(selector).children[i].focus();

  const STEPS = [
    ["Words in", "Three words become three vectors of width 512. One head projects them to queries, keys and values of its own width, d_k = 64: X (3×512) times W (512×64) is 3×64.",
      () => [strip("X", words, WORDS, 3), strip("Q = X W_q", query, WORDS, 3), strip("K = X W_k", key, WORDS, 3), strip("V = X W_v", value, WORDS, 3)]],
    ["Scores", "Step 1: every query meets every key. Each of the 3×3 scores is a sum of 64 products, so its standard deviation is about √64 = 8.",
      () => [strip("Q", query, WORDS, 3), strip("K", key, WORDS, 3), el("div", { class: "squares" }, scoresSquare())]],
    ["Divide", "Step 2: divide by √d_k = 8. Nine numbers before, nine after; the largest of each row is still the largest. The spread is about 1 now.",
      () => el("div", { class: "squares" }, scoresSquare(), el("span", { class: "arrow", "aria-hidden": "true" }, "→"), dividedSquare())],
    ["Softmax", "Step 3: each row becomes weights that sum to 1. On the right, what the softmax makes of the undivided scores: nearly all on one word.",
      () => el("div", { class: "squares" }, dividedSquare(), el("span", { class: "arrow", "aria-hidden": "true" }, "→"), weightsSquare(), weightsSquare("without step 2", raw))],
    ["Weigh", "Step 4: each weight multiplies its word's value, 3×3×64 numbers in all. Here those of one query; choose another.",
      () => [choose(), el("div", { class: "squares" }, weightsSquare()), strip("V", value, WORDS, 3), products()]],
    ["Sum", "Step 5: add the three weighted values. Out comes 3×64: one vector for each word, a mix of all of them.",
      () => [strip("output", output, WORDS, 3)]],
  ];

  let step = 0;
  const stairs = STEPS.map(([title], i) => el("li", {}, el("button", { type: "button", onclick: () => go(i) },
    el("span", { class: "dot" }, i ? String(i) : "0"), title)));
  by("stairs").append(...stairs);
  function show() {
    const [title, text, picture] = STEPS[step];
    strips.clear();
    by("step-title").textContent = step ? `Step ${step}: ${title.toLowerCase()}` : title;
    by("step-words").replaceChildren(...math(text.replace(/^Step \d: (.)/, (_, c) => c.toUpperCase())));
    LH.fill("step-picture", picture());
    tell("Point at a number, or go to it with the keyboard.");
    stairs.forEach((stair, i) => {
      stair.className = i === step ? "now" : i < step ? "done" : "";
      stair.firstChild.toggleAttribute("aria-current", i === step);
      if (i === step) stair.firstChild.setAttribute("aria-current", "step");
    });
    by("previous").disabled = step === 0;
    by("next").disabled = step === STEPS.length - 1;
  }
  function go(to) { step = Math.min(STEPS.length - 1, Math.max(0, to)); show(); }
  by("previous").onclick = () => go(step - 1);
  by("next").onclick = () => go(step + 1);
  onTheme(() => strips.forEach((draw) => draw()));
  go(0);
}
