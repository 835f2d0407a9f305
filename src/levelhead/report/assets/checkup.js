"use strict";
// The page: what is chosen, the address that names it, and the parts that show it. At the scale as
// trained everything is in the data; what Python has judged at other scales, and the scores, follow
// when they are unpacked.
(() => {
  const { data, el, fill, number, select } = LH;
  const { layers, texts, marks, fields } = data;
  const { percent, value } = HeadMap;
  const by = (id) => document.getElementById(id);
  const trained = {
    factor: 1, headline: data.headline, sentence: data.scales[0].sentence, list: data.list,
    heads: layers.map((layer) => layer.heads),
  };
  let judged = [trained];
  const state = { ...data.worst, text: 0, factor: 1 }; // the address names these
  const view = { colour: "verdict", shown: "weights", only: new Set() };

  // The scale at which Python judged that is nearest to the slider's.
  const nearest = () => judged.reduce((best, each) =>
    (Math.abs(Math.log(each.factor / state.factor)) < Math.abs(Math.log(best.factor / state.factor)) ? each : best));
  const headsAt = (entry) => entry.heads.map((heads) => heads.map((head, at) => ({ head: at, level: "info", ...head })));
  const movedOf = (layer, head, entry) => (state.factor === 1 ? 0
    : (Attention.isReady() ? Attention.moved(layer, head, state.factor) : null) ?? entry.heads[layer][head].weight_moved ?? null);
  const pictureOf = (text) => data.pictures[state.layer]?.[text];
  const nameOf = () => `${layers[state.layer].short}, head ${state.head}`;
  const times = () => `${number(Number(state.factor.toPrecision(3)))} × as trained`;
  const scaleName = () => marks.find((mark) => mark.factor === state.factor)?.words ?? times();

  // ------------------------------------------------------------ the slider

  const slider = by("scale");
  const [low, high] = [Math.min(0.056, ...marks.map((mark) => mark.factor)), Math.max(18, ...marks.map((mark) => mark.factor))].map(Math.log2);
  slider.min = Math.floor(low * 10) / 10;
  slider.max = Math.ceil(high * 10) / 10;
  const SNAP = 0.05; // of an octave: a hand does not hit a mark exactly

  function drawScale(entry) {
    slider.value = Math.log2(state.factor);
    const scale = layers[state.layer].scale, exact = scale == null ? "" : ` (${number(scale * state.factor)})`;
    slider.setAttribute("aria-valuetext", `${scaleName()}${exact}`);
    fill("scale-now", state.factor === 1 ? `as trained${exact}` : `${times()}${exact}`);
    fill("scale-words", entry.sentence);
    [...by("marks").children].forEach((button, i) => button.setAttribute("aria-pressed", String(marks[i].factor === state.factor)));
  }

  // Names of marks that stand close go one below the other.
  function placeMarks() {
    let end = -Infinity;
    for (const button of by("marks").children) {
      button.classList.remove("low");
      const box = button.getBoundingClientRect(), isLow = box.left < end + 4;
      button.classList.toggle("low", isLow);
      if (!isLow) end = box.right;
    }
  }

  function makeScale() {
    const share = (factor) => (100 * (Math.log2(factor) - slider.min)) / (slider.max - slider.min);
    fill("marks", marks.map(({ factor, words }) => el("button", {
      type: "button", style: `left: ${share(factor).toFixed(2)}%`, onclick: () => choose({ factor }),
    }, words)));
    placeMarks();
    let dragging = false, waiting = 0;
    slider.oninput = () => {
      const there = Number(slider.value), near = marks.find((mark) => Math.abs(Math.log2(mark.factor) - there) < SNAP);
      if (!dragging) write("pushState"); // going back leads to where the drag began
      dragging = true;
      state.factor = near ? near.factor : Number((2 ** there).toPrecision(4));
      clearTimeout(waiting);
      waiting = setTimeout(() => write("replaceState"), 100); // browsers allow few of these a second
      drawSoon();
    };
    slider.onchange = () => {
      dragging = false;
      clearTimeout(waiting);
      write("replaceState");
    };
  }

  // ------------------------------------------------------------ the map

  const COLOURS = [["verdict", "verdict"], ["attention", "attention thumbnails"], ["weight_moved", "weight moved"],
    ...Object.entries(fields).map(([name, { label }]) => [name, label])];

  function cellOf(rows, entry) {
    if (view.colour === "verdict") {
      return (head) => ({ ...HeadMap.verdictOf(head), class: `${head.verdict}${!view.only.size || view.only.has(head.verdict) ? "" : " pale"}` });
    }
    if (view.colour === "attention") {
      return (head, layer) => {
        const picture = data.pictures[layer]?.[state.text], canvas = el("canvas", { "aria-hidden": "true" });
        const weights = picture && Attention.isReady() && Attention.weights(picture, head.head, state.factor);
        if (weights) Heat.thumb(canvas, picture, weights);
        return { class: "thumb", text: weights ? canvas : "–", words: head.verdict };
      };
    }
    const moving = view.colour === "weight_moved";
    const field = moving ? { share: true, label: "weight moved" } : fields[view.colour];
    const valueOf = (head, layer) => (moving ? movedOf(layer, head.head, entry) : head[view.colour]);
    const bend = field.log ? (x) => Math.sign(x) * Math.log1p(Math.abs(x)) : (x) => x;
    const all = rows.flatMap((row, layer) => row.heads.map((head) => valueOf(head, layer))).filter((x) => x != null);
    const [least, most] = moving ? [0, 1] : [Math.min(...all), Math.max(...all)];
    fill("legend", all.length ? [moving ? "0%" : shownOf(field, least), el("span", { class: "ramp" }), moving ? "100%" : shownOf(field, most)] : "no head has it",
      el("span", { class: "soft" }, moving ? "of each head's weight goes to other keys" : field.meaning));
    return (head, layer) => {
      const x = valueOf(head, layer), share = x == null || most === least ? 0 : (bend(x) - bend(least)) / (bend(most) - bend(least));
      return { class: "tinted", style: `--share: ${share.toFixed(3)}`, words: `${head.verdict}, ${field.label} ${shownOf(field, x)}`,
        text: x == null ? "–" : field.share ? String(Math.round(100 * x)) : number(Number(x.toPrecision(2))) };
    };
  }
  const shownOf = (field, x) => (field.share ? percent(x) : number(x));

  function drawMap(entry) {
    const heads = headsAt(entry), rows = layers.map((layer, i) => ({ name: layer.short, heads: heads[i] }));
    if (view.colour === "verdict") {
      HeadMap.chips("legend", heads.flat(), view.only, (verdict) => {
        if (!view.only.delete(verdict)) view.only.add(verdict);
        draw();
      });
    } else if (view.colour === "attention") {
      fill("legend", el("span", { class: "soft" }, texts[state.text] ? `Each head's weights on: ${texts[state.text].label}` : "no text is drawn"));
    }
    HeadMap.draw("map", rows, state, (layer, head) => choose({ layer, head }), cellOf(rows, entry));
  }

  function drawList({ list }) {
    fill("list-title", list.title);
    fill("list", list.heads.map(({ layer, head, lead, reason, hint, verdict }) =>
      el("li", {}, HeadMap.mark(verdict), el("div", {},
        el("button", { class: "link", type: "button", onclick: () => choose({ layer, head }) }, lead),
        el("p", {}, `${reason}.`), hint ? el("p", { class: "soft" }, `→ ${hint}`) : null))));
  }

  // ------------------------------------------------------------ the chosen head

  function drawWords(entry) {
    const head = headsAt(entry)[state.layer][state.head], was = layers[state.layer].heads[state.head], other = entry !== trained;
    fill("head-title", HeadMap.mark(head.verdict), ` ${nameOf()}: ${other ? head.verdict : was.judged_as}`);
    const moved = movedOf(state.layer, state.head, entry);
    fill("facts", [["weight moved", percent(moved), null, "The share of each row's weight that another scale moves to other keys."],
      ...Object.entries(data.compared).map(([name, label]) =>
        [label, value(name, head[name]), other ? value(name, was[name]) : null, data.main[name].meaning])]
      .map(([label, now, before, meaning]) => el("div", { title: meaning }, el("dt", {}, label),
        el("dd", {}, now, el("small", {}, before == null ? "\u00a0" : `was ${before}`)))));
    const scale = layers[state.layer].scale;
    const code = other ? scale && `F.scaled_dot_product_attention(q, k, v, scale=${Number((scale * state.factor).toPrecision(4))})` : was.code;
    by("card").className = `card ${head.verdict}`;
    fill("card", [
      ["What", other ? `it would be ${head.verdict}` : `${head.verdict}: ${data.legend[head.verdict].meaning}`],
      ["Why", `${head.reason}.`],
      ["Is it benign?", other ? `It is not what the model learned${moved == null ? "" : `: ${percent(moved)} of the weight moves`}.` : was.is_benign],
      ["What to do", other ? "Nothing: the model does not use this scale. To try it:" : was.to_do],
    ].flatMap(([term, words]) => [el("dt", {}, term), el("dd", {}, words)]), code ? el("dd", {}, el("code", {}, code)) : null);
    fill("head-all",
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "statistic"), el("th", { scope: "col", class: "number" }, "as trained"),
        other ? el("th", { scope: "col", class: "number" }, entry.words) : null)),
      el("tbody", {}, Object.entries(fields).map(([name, { label, meaning }]) => el("tr", {},
        el("th", { scope: "row", title: meaning }, label), el("td", { class: "number" }, value(name, was[name])),
        other ? el("td", { class: "number" }, value(name, head[name])) : null))));
  }

  const tokensOf = (size, shown) => Array.from({ length: shown }, (_, i) =>
    (texts[state.text].tokens.length === size ? texts[state.text].tokens[i] : String(i)));

  // Room for the heat map: what the screen has below its place, so that the head is seen whole.
  const tall = () => (innerWidth < 1000 ? 0.5 * innerHeight + 60 : Math.max(260, innerHeight - by("heat").getBoundingClientRect().top - scrollY - 96));

  function drawHeat() {
    const picture = pictureOf(state.text);
    by("save-heat").hidden = true;
    fill("heat-words");
    if (!Attention.isReady()) return;
    if (!picture) return Heat.none("The attention of this layer was not kept: its input is too long to draw.");
    const weights = Attention.weights(picture, state.head, state.factor), scores = Attention.scores(picture, state.head, state.factor);
    if (!weights && view.shown === "weights") {
      return Heat.none("Not drawn: this layer adds a bias, a cap or a sink between scores and weights. The statistics still count it.");
    }
    const queries = tokensOf(picture.queries, picture.rows), keys = tokensOf(picture.keys, picture.columns);
    const pair = (i) => `${queries[Math.floor(i / picture.columns)]} → ${keys[i % picture.columns]}`;
    const strongest = [...(weights ?? [])].map((weight, i) => [weight, i]).filter(([weight]) => weight > 0).sort((a, b) => b[0] - a[0]).slice(0, 3);
    const usual = ["Rows: queries, columns: keys.",
      ...(strongest.length ? [`Strongest: ${strongest.map(([weight, i]) => `${pair(i)} ${percent(weight)}`).join("; ")}.`] : []),
      ...(picture.rows < picture.queries || picture.columns < picture.keys
        ? [`Shown are the first ${picture.rows} × ${picture.columns} of ${picture.queries} × ${picture.keys}.`] : [])].join(" ");
    fill("heat-words", usual);
    Heat.draw({
      picture, queries, keys, view: view.shown, values: view.shown === "weights" ? weights : scores, tall: tall(),
      key: `${state.layer},${state.text},${innerHeight}`, label: `Attention ${view.shown} of ${nameOf()}, ${scaleName()}, on: ${texts[state.text].label}`,
      tell: (i) => fill("heat-words", i == null ? usual : Number.isNaN(scores[i]) ? `${pair(i)}: hidden`
        : `${pair(i)}: ${weights ? `weight ${weights[i] < 0.1 ? number(100 * weights[i]) : Math.round(1000 * weights[i]) / 10}%, ` : ""}score ${number(scores[i])}`),
    });
    by("save-heat").hidden = false;
  }

  function drawBins() {
    const all = texts.map((_, text) => pictureOf(text)).filter(Boolean);
    const join = (make) => all.flatMap((picture) => [...(make(picture, state.head, state.factor) ?? [])]);
    const seen = Attention.isReady() ? join(Attention.scores).filter((score) => !Number.isNaN(score)) : [];
    by("distributions").hidden = !seen.length;
    if (!seen.length) return;
    // As trained it fills the width; another scale is then seen to narrow or widen it.
    const widen = Math.max(1, 1 / state.factor), [least, most] = seen.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [0, 1e-9]);
    Heat.bins("scores-bins", seen, least * widen, most * widen, Heat.ends(least * widen, most * widen), `Distribution of ${nameOf()}'s scores`);
    Heat.bins("weights-bins", join(Attention.weights).map((weight) => Math.log10(Math.max(weight, 1e-6))), -6, 0,
      [[-6, "≤10⁻⁶"], [-4, "10⁻⁴"], [-2, "1%"], [0, "100%"]], `Distribution of ${nameOf()}'s weights`);
  }

  // ------------------------------------------------------------ all of it

  let shownEntry = null, mapOf = "";
  function draw() {
    const entry = nearest();
    if (!pictureOf(state.text)) state.text = Math.max(0, texts.findIndex((_, text) => pictureOf(text)));
    drawScale(entry);
    if (entry !== shownEntry) {
      fill("headline", entry.headline);
      drawList(entry);
      shownEntry = entry;
    }
    // The map follows the hand only where its cells do.
    const map = JSON.stringify([judged.indexOf(entry), state.layer, state.head, view.colour, [...view.only], Attention.isReady(),
      ...(["attention", "weight_moved"].includes(view.colour) ? [state.factor, state.text] : [])]);
    if (map !== mapOf) drawMap(entry);
    mapOf = map;
    select("text", texts.flatMap(({ label }, text) => (pictureOf(text) ? [[text, label]] : [])), state.text, (text) => choose({ text: Number(text) }));
    drawWords(entry);
    drawHeat();
    drawBins();
  }
  let waiting = 0;
  function drawSoon() {
    cancelAnimationFrame(waiting);
    waiting = requestAnimationFrame(draw);
  }

  // ------------------------------------------------------------ the address

  function write(how) {
    const { layer, head, text, factor } = state;
    history[how](null, "", `#${new URLSearchParams({ layer, head, text, scale: Number(factor.toPrecision(4)) })}`);
  }

  // What an address names, as far as there is such a thing here.
  function read() {
    const named = new URLSearchParams(location.hash.slice(1));
    const index = (name, size) => {
      const at = Number(named.get(name) ?? NaN);
      return Number.isInteger(at) && at >= 0 && at < size ? at : null;
    };
    const layer = index("layer", layers.length) ?? data.worst.layer;
    const head = index("head", layers[layer].heads.length) ?? (layer === data.worst.layer ? data.worst.head : 0);
    const given = Number(named.get("scale") || 1), factor = given > 0 && Number.isFinite(given) ? given : 1;
    const near = marks.find((mark) => Math.abs(mark.factor / factor - 1) < 1e-3);
    Object.assign(state, {
      layer, head, text: index("text", texts.length) ?? 0,
      factor: near ? near.factor : Math.min(2 ** slider.max, Math.max(2 ** slider.min, factor)),
    });
    return named.has("head");
  }

  function choose(change) {
    const before = JSON.stringify(state);
    Object.assign(state, change);
    if (JSON.stringify(state) !== before) write("pushState");
    if ("head" in change) open(true);
    draw();
    if ("head" in change) reveal();
  }

  // ------------------------------------------------------------ the sheet of small screens

  function open(wanted) {
    by("detail").classList.toggle("open", wanted);
    by("toggle").setAttribute("aria-expanded", String(wanted));
    by("toggle").textContent = wanted ? "Close" : "Details";
  }
  // The chosen cell, where the sheet would hide it.
  const reveal = () => innerWidth < 1000 && isOpen()
    && by("map").querySelector("[aria-selected=true]").scrollIntoView({ block: "nearest", inline: "nearest" });
  const isOpen = () => by("detail").classList.contains("open");

  function makeSheet() {
    let from = null;
    by("toggle").onclick = () => { open(!isOpen()); draw(); };
    by("handle").addEventListener("pointerdown", (event) => { from = event.clientY; });
    by("handle").addEventListener("pointerup", (event) => {
      const far = from == null ? 0 : event.clientY - from;
      if (Math.abs(far) > 30) { open(far < 0); draw(); }
    });
    addEventListener("keydown", (event) => event.key === "Escape" && open(false));
  }

  // ------------------------------------------------------------ once

  function drawScales() {
    const titles = ["weight moved", "what goes wrong", "outputs changed", ...Object.values(data.compared)];
    const cells = (scale) => [percent(scale.weight_moved), scale.short, percent(scale.output_changed),
      ...Object.keys(data.compared).map((name) => value(name, scale[name]))];
    const kind = (at) => (at === 1 ? "words" : "number");
    fill("scales",
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "scale"), titles.map((title, at) => el("th", { scope: "col", class: kind(at) }, title)))),
      el("tbody", {}, data.scales.map((scale) => el("tr", {}, el("th", { scope: "row" }, scale.label),
        cells(scale).map((cell, at) => el("td", { class: kind(at) }, cell))))));
  }

  function makeFiles() {
    const file = () => `${data.model}-${layers[state.layer].short}-head-${state.head}`.replace(/[^\w.-]+/g, "-");
    Heat.savers("save-map", {
      name: () => `${data.model}-heads`.replace(/[^\w.-]+/g, "-"),
      svg: () => Heat.mapSvg(by("headline").textContent, layers.map((layer) => ({ name: layer.short, heads: layer.heads }))),
      rows: () => [["layer", "head", "scale", "verdict", "weight_moved", ...Object.keys(fields)], ...headsAt(nearest()).flatMap((heads, layer) =>
        heads.map((head) => [layers[layer].name, head.head, nearest().factor, head.verdict, head.weight_moved ?? 0,
          ...Object.keys(fields).map((name) => head[name])]))],
    });
    Heat.savers("save-heat", {
      name: file,
      svg: () => Heat.heatSvg(`${nameOf()} (${scaleName()}): ${view.shown}`),
      rows: () => {
        const picture = pictureOf(state.text), [weights, scores] = [Attention.weights, Attention.scores].map((make) => make(picture, state.head, state.factor));
        const queries = tokensOf(picture.queries, picture.rows), keys = tokensOf(picture.keys, picture.columns);
        return [["query_position", "key_position", "query", "key", "score", "weight"], ...[...scores].map((score, i) => {
          const [query, key] = [Math.floor(i / picture.columns), i % picture.columns];
          return [query, key, queries[query], keys[key], score, weights?.[i]];
        })];
      },
    });
  }

  for (const name of ["about", "missing", "inputs", "made", "scales_about"]) fill(name.replace("_", "-"), data[name]);
  fill("scale-in-use", data.scale.map((line) => el("p", {}, line)));
  select("colour", COLOURS, view.colour, (colour) => { view.colour = colour; draw(); });
  select("shown", [["weights", "weights"], ["scores", "scores"]], view.shown, (shown) => { view.shown = shown; draw(); });
  makeScale();
  makeSheet();
  makeFiles();
  drawScales();
  open(read());
  write("replaceState");
  addEventListener("popstate", () => { read(); draw(); });
  Paint.onTheme(() => { mapOf = ""; draw(); });
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; placeMarks(); drawSoon(); } });
  draw();
  Promise.all([LH.unpack("judged"), Attention.ready]).then(([others]) => {
    judged = [trained, ...JSON.parse(new TextDecoder().decode(others))];
    draw();
    reveal();
  });
})();
