{
  // Part 5: the lab's training runs, to scrub through.
  const { by, chart, say, shown, tell, percent, NAMES, math } = X;
  const { el } = LH;
  const given = LH.data.training;
  const steps = given.runs[0].answers.map((_, i) => i * given.every);
  const state = { dk: 64, rate: 0.005, rule: "none", at: steps.length - 1 };
  const run = (rule) => given.runs.find((one) => one.rule === rule && one.d_k === state.dk && one.rate === state.rate);
  const HEADS = ["layer 1, head 1", "layer 1, head 2", "layer 2, head 1", "layer 2, head 2"];

  const STEPS = { min: 0, max: given.steps, ticks: [0, 100, 200, 300, 400], names: ["0", "100", "200", "300", "400"], label: "step" };
  const charts = {
    answers: chart("run-loss", { x: STEPS, y: { min: 0, max: 4, ticks: [0, 1, 2, 3, 4], names: ["0", "1", "2", "3", "4"], label: "loss" }, label: "Loss on answers by step, a line for each scale" }),
    saturated: chart("run-saturated", { x: STEPS, y: { min: 0, max: 1, ticks: [0, 0.5, 1], names: ["0", "50 %", "100 %"], label: "share of rows" }, label: "Saturated rows by step, a line for each head" }),
    survival: chart("run-survival", { x: STEPS, y: { min: 1e-5, max: 1, log: true, ticks: [1e-4, 1e-2, 1], names: ["0.0001", "0.01", "1"], label: "share of the gradient" }, label: "Gradient survival by step, a line for each head", left: 46 }),
    score_std: chart("run-std", { x: STEPS, y: { min: 0.05, max: 5000, log: true, ticks: [0.1, 1, 10, 100, 1000], names: ["0.1", "1", "10", "100", "1,000"], label: "standard deviation" }, label: "Standard deviation of the scores by step, a line for each head" }),
  };
  charts.answers.line("guessing", [0, given.steps], [given.guessing, given.guessing], { class: "line reference" });
  charts.answers.svg.append(X.s("text", { x: charts.answers.right, y: charts.answers.sy(given.guessing) + 12, "text-anchor": "end" }, "guessing"));

  const cursors = Object.values(charts).map((one) => one.mark("cursor", "path", {}, { class: "rule" }));
  const body = by("run-table").tBodies[0];
  const cells = HEADS.map((name) => {
    const row = [1, 2, 3].map(() => el("td", { class: "number" }));
    body.append(el("tr", {}, el("th", { scope: "row" }, name), row));
    return row;
  });

  function course() { // the lines: after a choice of run
    for (const rule of X.RULES) {
      const node = charts.answers.line(rule, steps, run(rule).answers, { style: `stroke:var(--${rule})` });
      node.classList.toggle("bold", rule === state.rule);
      node.classList.toggle("faint", rule !== state.rule);
      if (rule === state.rule) charts.answers.svg.append(node);
    }
    for (const name of ["saturated", "survival", "score_std"]) {
      run(state.rule)[name].forEach((values, i) => {
        const node = charts[name].line(`head ${i}`, steps, values, { class: `line${i % 2 ? " dashed" : ""}` });
        node.style.stroke = i < 2 ? "var(--first)" : "var(--second)";
      });
    }
  }
  function update() { // the step: while dragging
    const mine = run(state.rule), at = state.at, x = charts.answers.sx(steps[at]);
    say("step-value", `${steps[at]} of ${given.steps}`);
    slider.setAttribute("aria-valuetext", `step ${steps[at]}`);
    cursors.forEach((cursor, i) => {
      const one = Object.values(charts)[i];
      cursor.setAttribute("d", `M${one.sx(steps[at]).toFixed(1)} ${one.top - 4}V${one.bottom}`);
    });
    cells.forEach((row, i) => {
      row[0].textContent = shown(mine.score_std[i][at]);
      row[1].textContent = percent(mine.saturated[i][at]);
      row[2].textContent = shown(mine.survival[i][at], 2);
    });
    const mean = mine.saturated.reduce((sum, one) => sum + one[at], 0) / HEADS.length;
    tell("run-caption", () => `At step ${steps[at]}: d_k = ${state.dk}, rate ${state.rate}, ${NAMES[state.rule]}`);
    tell("training-said", () => `Step ${steps[at]}, ${NAMES[state.rule]}: the loss is ${shown(mine.answers[at])} (guessing costs ${given.guessing}), and ${percent(mean)} of the rows are saturated. On stories it has not read, the model ends at ${shown(mine.unseen)}; ${state.rule === "none" ? `with 1/√d_k, at ${shown(run("sqrt_dk").unseen)}` : `without a scale, at ${shown(run("none").unseen)}`}.`);
  }
  const pick = (name, parse) => (value) => { state[name] = parse(value); course(); update(); };
  LH.choice("run-dk", "d_k", given.d_k.map((d) => [String(d), String(d)]), String(state.dk), pick("dk", Number));
  LH.choice("run-rate", "Learning rate", given.rates.map((rate) => [String(rate), String(rate)]), String(state.rate), pick("rate", Number));
  LH.choice("run-rule", "Health of", given.rules.map((rule) => [rule, el("span", {}, math(NAMES[rule]))]), state.rule, pick("rule", String));
  by("run-dk").querySelector("legend").replaceChildren(...math("d_k"));
  by("run-key").append(...X.RULES.map((rule) => el("span", { class: `swatch ${rule}` }, math(NAMES[rule]))));
  by("head-key").append(...HEADS.map((name, i) => el("span", { class: `swatch ${i < 2 ? "first" : "second"}${i % 2 ? " broken" : ""}` }, name)));

  const slider = by("run-step"), play = by("play");
  slider.max = steps.length - 1;
  slider.value = state.at;
  const go = (at) => { state.at = at; slider.value = at; update(); };
  slider.addEventListener("input", () => { stop(); state.at = Number(slider.value); update(); });
  Object.values(charts).forEach((one) => one.drag((step) => { stop(); go(Math.min(steps.length - 1, Math.max(0, Math.round(step / given.every)))); }));
  let playing = 0;
  function stop() { clearInterval(playing); playing = 0; play.textContent = "Play"; }
  play.onclick = () => {
    if (playing) return stop();
    if (state.at === steps.length - 1) go(0);
    play.textContent = "Stop";
    playing = setInterval(() => (state.at < steps.length - 1 ? go(state.at + 1) : stop()), 90);
  };
  course();
  update();
}
