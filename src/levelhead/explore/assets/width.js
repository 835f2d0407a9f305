{
  // Part 3: the same width in more heads; √d_k against √d.
  const { by, bars, pairs, sharpness, softmax, say, shown, tell, percent, math } = X;
  const { el } = LH;
  // Widths, and into how many heads they are divided: no head wider than the pairs drawn, 512.
  const MODELS = {
    512: { heads: [1, 2, 4, 8, 16, 32, 64], now: 8, name: "512 (2017)" },
    768: { heads: [2, 3, 4, 6, 8, 12, 16, 24, 48], now: 12, name: "768 (GPT-2)" },
    4096: { heads: [8, 16, 32, 64, 128], now: 32, name: "4096 (LLaMA 7B)" },
    12288: { heads: [24, 32, 48, 64, 96, 128, 192], now: 96, name: "12,288 (GPT-3)" },
  };
  const KEYS = 16;
  const heads = by("heads");
  let width = 512;
  const right = bars("right-bars", "Weights with 1/√d_k", 0.5), wrong = bars("wrong-bars", "Weights with 1/√d", 0.5);
  const number = () => MODELS[width].heads[Number(heads.value)];
  const buffer = new Float64Array(KEYS);

  function update() {
    const count = number(), dk = width / count;
    say("heads-value", `${count}, so d_k = ${width.toLocaleString("en")}/${count} = ${dk}`);
    by("heads-value").replaceChildren(...math(by("heads-value").textContent));
    heads.setAttribute("aria-valuetext", `${count} heads of width ${dk}`);
    const strip = by("strip");
    strip.style.setProperty("--share", `${100 / count}%`);
    strip.setAttribute("aria-label", `Width ${width}, divided into ${count} heads of ${dk}`);
    const spread = Math.sqrt(pairs.variance[dk]), factors = [dk ** -0.5, width ** -0.5];
    const found = factors.map((factor) => sharpness(dk, factor, KEYS));
    say("right-std", shown(spread * factors[0]));
    say("wrong-std", shown(spread * factors[1]));
    right(softmax(pairs.sums[dk - 1], factors[0], 0, KEYS, buffer), "var(--sqrt_dk)");
    wrong(softmax(pairs.sums[dk - 1], factors[1], 0, KEYS, buffer), "var(--sqrt_dmodel)");
    tell("width-said", () => count === 1
      ? "One head: d_k is d, and the two rules are the same."
      : `√d is too large by √${count} = ${shown(Math.sqrt(count))}: a row spreads its weight over ${percent(found[1].effective / KEYS)} of its keys instead of ${percent(found[0].effective / KEYS)}, and hardly chooses.`);
  }
  function choose(value) {
    width = Number(value);
    heads.max = MODELS[width].heads.length - 1;
    heads.value = MODELS[width].heads.indexOf(MODELS[width].now);
    update();
  }
  LH.choice("model", "Width of the model, d", Object.entries(MODELS).map(([value, one]) => [value, one.name]), "512", choose);
  heads.addEventListener("input", update);
  choose(512);
}
