{
  // Part 6: the row of "it" in 72 trained heads, at any scale.
  const { by, softmax, say, shown, plain, tell, math, scale } = X;
  const { el } = LH;
  const given = LH.data.pronoun, { dog, ball } = given.nouns;
  const MEANT = { fast: "it could be either", tired: "it must be the dog", round: "it must be the ball" };
  const state = { text: 0, layer: 5, head: 11 };
  const sentence = () => given.sentences[state.text];
  const layers = given.sentences[0].scores.length, heads = given.sentences[0].scores[0].length;
  const tokens = given.sentences[0].tokens.length;
  const usual = scale("sqrt_dk", given.d_k);
  const slider = by("pronoun-scale");
  const factor = () => usual * 2 ** Number(slider.value);

  const cells = [];
  const map = by("heads-map");
  map.append(el("div", { role: "row" }, el("span", { role: "columnheader", class: "corner" }, "head"),
    Array.from({ length: heads }, (_, i) => el("span", { role: "columnheader" }, String(i)))));
  for (let layer = 0; layer < layers; layer++) {
    const row = Array.from({ length: heads }, (_, head) => el("button", {
      type: "button", role: "gridcell", tabindex: -1,
      onclick: () => choose(layer, head), onmouseenter: () => choose(layer, head),
      onkeydown: (event) => {
        const [down, right] = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key] || [];
        if (down == null) return;
        event.preventDefault();
        choose(Math.min(layers - 1, Math.max(0, layer + down)), Math.min(heads - 1, Math.max(0, head + right)));
        cells[state.layer][state.head].focus();
      },
    }));
    cells.push(row);
    map.append(el("div", { role: "row" }, el("span", { role: "rowheader" }, `layer ${layer}`), row));
  }
  const barsNode = by("head-bars");
  const rows = Array.from({ length: tokens }, () => {
    const name = el("span", { class: "token" }), bar = el("i"), number = el("span", { class: "weight" });
    barsNode.append(el("div", {}, name, el("span", { class: "track" }, bar), number));
    return { name, bar, number };
  });

  const weights = new Float64Array(tokens);
  const attend = (layer, head) => softmax(sentence().scores[layer][head], factor(), 0, tokens, weights);
  function choose(layer, head) {
    const before = cells[state.layer][state.head];
    before.tabIndex = -1;
    before.setAttribute("aria-selected", "false");
    Object.assign(state, { layer, head });
    drawHead();
  }
  function drawHead() {
    const cell = cells[state.layer][state.head];
    cell.tabIndex = 0;
    cell.setAttribute("aria-selected", "true");
    say("head-title", `What “it” looks at: layer ${state.layer}, head ${state.head}`);
    attend(state.layer, state.head);
    rows.forEach((row, i) => {
      const name = sentence().tokens[i];
      if (row.name.textContent !== name) row.name.textContent = name;
      row.bar.style.transform = `scaleX(${weights[i].toFixed(4)})`;
      row.bar.className = i === dog ? "dog" : i === ball ? "ball" : "";
      row.number.textContent = weights[i].toFixed(2);
    });
    barsNode.setAttribute("aria-label", sentence().tokens.map((name, i) => `${name} ${weights[i].toFixed(2)}`).join(", "));
  }
  function update() {
    const c = factor(), rule = X.RULES.find((one) => Math.abs(Math.log2(scale(one, given.d_k, given.d_model) / c)) < 0.011);
    say("scale-value", `${shown(c)}${rule ? `, ${X.NAMES[rule]}` : ""}`);
    by("scale-value").replaceChildren(...math(by("scale-value").textContent));
    slider.setAttribute("aria-valuetext", `${plain(c)}${rule ? `, ${X.NAMES[rule]}` : ""}`);
    let keys = 0, looking = 0, towards = 0;
    for (let layer = 0; layer < layers; layer++) for (let head = 0; head < heads; head++) {
      attend(layer, head);
      let squares = 0;
      for (const p of weights) squares += p * p;
      keys += 1 / squares;
      const both = weights[dog] + weights[ball], lead = weights[dog] > weights[ball];
      looking += both > 2 / tokens;
      towards += lead;
      const cell = cells[layer][head];
      cell.style.setProperty("--share", `${Math.round(100 * Math.min(1, both) ** 0.6)}%`);
      cell.className = lead ? "dog" : "ball";
      cell.setAttribute("aria-label", `layer ${layer}, head ${head}: dog ${weights[dog].toFixed(2)}, ball ${weights[ball].toFixed(2)}`);
    }
    keys /= layers * heads;
    drawHead();
    document.querySelectorAll("#scale-jumps button").forEach((chip) => chip.setAttribute("aria-pressed", String(chip.value === rule)));
    tell("pronoun-said", () => `“it” attends to ${keys.toFixed(1)} of ${tokens} tokens on average; ${looking} of ${layers * heads} heads give dog and ball more than an even share, and ${towards} give the dog more than the ball. With “${sentence().ending}”, ${MEANT[sentence().ending]}.`);
  }
  function read() {
    const words = `The dog chased the ball because it was ${sentence().ending}.`.split(/\b(dog|ball|it)\b/);
    LH.fill("sentence", words.map((word, i) => (i % 2 ? el("b", { class: word }, word) : word)));
    update();
  }
  LH.choice("ending", "… because it was", given.sentences.map((one, i) => [String(i), one.ending]), "0", (value) => { state.text = Number(value); read(); });
  by("scale-jumps").append(...["dk", "sqrt_dmodel", "sqrt_dk", "none"].map((rule) => el("button", {
    type: "button", class: "chip", value: rule,
    onclick: () => { slider.value = Math.log2(scale(rule, given.d_k, given.d_model) / usual); update(); },
  }, el("span", {}, math(rule === "sqrt_dk" ? "1/√d_k, as trained" : X.NAMES[rule])))));
  slider.addEventListener("input", update);
  slider.value = 0;
  read();
}
