{
  // Part 7: four confusions, each with a control that settles it.
  const { by, bars, pairs, sharpness, softmax, say, shown, tell, percent, math } = X;
  const { el } = LH;
  const onInput = (ids, update) => { ids.forEach((id) => by(id).addEventListener("input", update)); update(); };
  const number = (id) => Number(by(id).value);

  // ---- the number of words
  // Of the scores in sentences of so many words, as many as the pairs are enough for.
  function variance(dk, words) {
    const scores = pairs.sums[dk - 1], used = words * Math.floor(X.KEYS / words);
    let sum = 0, squares = 0;
    for (let row = 0; row < X.ROWS; row++) for (let key = 0; key < used; key++) {
      const x = scores[row * X.KEYS + key];
      sum += x;
      squares += x * x;
    }
    const n = X.ROWS * used;
    return squares / n - (sum / n) ** 2;
  }
  // Q and the scores as rectangles, true to scale: 512 dimensions are 236 wide, 32 words 84 tall.
  const boxes = ["Q", "QKᵀ"].map((name, i) => ({
    box: X.s("rect", { x: i ? 272 : 0, y: 0, rx: 2, class: i ? "box scores" : "box" }),
    name: X.s("text", { x: i ? 272 : 0 }, name),
  }));
  by("words-picture").append(X.s("svg", { viewBox: "0 0 360 104", role: "img", "aria-label": "Q and the scores as rectangles: d_k widens Q alone, more words make both taller" },
    ...boxes.flatMap(({ box, name }) => [box, name])));
  onInput(["words", "words-dk"], () => {
    const words = number("words"), dk = number("words-dk"), found = variance(dk, words);
    const tall = (84 * words) / 32;
    boxes.forEach(({ box, name }, i) => {
      box.setAttribute("width", Math.max(1, i ? tall : (236 * dk) / 512));
      box.setAttribute("height", tall);
      name.setAttribute("y", tall + 14);
    });
    say("words-value", String(words));
    say("words-dk-value", String(dk));
    LH.fill("words-shapes", ["Q", "K"].map((name) => el("span", {}, `${name} `, el("b", {}, `${words}×${dk}`))), el("span", {}, "QKᵀ ", el("b", {}, `${words}×${words}`)));
    tell("words-said", () => `The words set the shape of the scores, ${words}×${words}. The variance of q·k, ${shown(found)}, is about d_k = ${dk} for any number of words: d_k is how many numbers the query of one word has.`);
  });

  // ---- the shape
  const { WORDS, scores } = X.words;
  const cellsOf = (id) => {
    const cells = WORDS.map(() => WORDS.map(() => el("td", {})));
    by(id).append(el("tbody", {}, cells.map((row) => el("tr", {}, row))));
    return cells.flat();
  };
  const before = cellsOf("shape-scores"), after = cellsOf("shape-weights"), three = new Float64Array(3);
  onInput(["shape"], () => {
    const divisor = 2 ** number("shape");
    say("shape-value", shown(divisor, 2));
    let top = 0;
    for (let i = 0; i < 3; i++) {
      softmax(scores.values, 1 / divisor, 3 * i, 3, three);
      const best = three.indexOf(Math.max(...three));
      top += three[best] / 3;
      for (let j = 0; j < 3; j++) {
        before[3 * i + j].textContent = (scores.values[3 * i + j] / divisor).toFixed(1).replace("-", "−");
        after[3 * i + j].textContent = three[j].toFixed(2);
        after[3 * i + j].className = before[3 * i + j].className = j === best ? "best" : "";
        after[3 * i + j].style.setProperty("--share", `${Math.round(55 * three[j])}%`);
      }
    }
    tell("shape-said", () => `Divided by ${shown(divisor, 2)}: still 3×3, and the largest of each row is still the largest (bold). Only the weights move: the top one is ${top.toFixed(2)} on average.`);
  });

  // ---- softmax normalises
  const drawNormal = bars("normal-bars", "Weights of four scores"), four = new Float64Array(4);
  onInput(["normal"], () => {
    const factor = 2 ** number("normal");
    say("normal-value", shown(factor, 2));
    softmax([3, 2, 0, -1], factor, 0, 4, four);
    drawNormal(four, "var(--accent)");
    const [sum, squares] = four.reduce(([a, b], p) => [a + p, b + p * p], [0, 0]);
    const top = four[0], signal = 1 - squares;
    tell("normal-said", () => `The weights sum to ${sum.toFixed(2)} wherever you stand; the top one is ${top.toFixed(3)}, and what gets through to the scores, 1 − Σp², is ${shown(Math.max(0, signal), 2)}. Normalised is not the same as soft.`);
  });

  // ---- dividing by d_k
  const root = bars("divisor-root", "Weights with 1/√d_k", 0.5), whole = bars("divisor-dk", "Weights with 1/d_k", 0.5);
  const buffer = new Float64Array(16);
  onInput(["divisor-by"], () => {
    const dk = number("divisor-by"), factors = [dk ** -0.5, 1 / dk];
    say("divisor-value", String(dk));
    root(softmax(pairs.sums[dk - 1], factors[0], 0, 16, buffer), "var(--sqrt_dk)");
    whole(softmax(pairs.sums[dk - 1], factors[1], 0, 16, buffer), "var(--dk)");
    const [soft, flat] = factors.map((factor) => sharpness(dk, factor, 16));
    tell("divisor-said", () => `With 1/d_k the variance is ${shown(pairs.variance[dk] / dk ** 2)}, about 1/d_k, and a row looks at ${flat.effective.toFixed(1)} of 16 keys: ${percent(flat.effective / 16)}. With 1/√d_k it is ${shown(pairs.variance[dk] / dk)}, and ${soft.effective.toFixed(1)} keys.`);
  });
}
