"use strict";
(() => {
  const { data, el, fill, escape, number, plot, choice, select } = LH;
  const { layers, pictures, scales } = data; // scales: [{rule, label, level, ...}], "used" first
  const rules = scales.map((scale) => scale.rule);
  const scaleOf = (rule) => scales.find((scale) => scale.rule === rule);
  const share = (part) => (part == null ? "–" : `${Math.round(100 * part)}%`);
  const state = { ...data.worst, text: 0, rule: "used", view: "weights" };

  // At another scale a verdict only describes: what counts is how far the head has moved.
  const headsOf = (layer, rule) => (rule === "used" ? layer.heads
    : layer.scales[rule].heads.map((head) => ({ ...head, level: "info" })));
  const current = (rule = state.rule) => headsOf(layers[state.layer], rule)[state.head];
  const levelOf = (head) => (["info", "ok"].includes(head.level) ? "" : ` (${head.level})`);

  // ------------------------------------------------------------ the map

  function drawMap() {
    const rows = layers.map((layer) => ({ name: layer.short, heads: headsOf(layer, state.rule) }));
    const { headline, sentence } = scaleOf(state.rule), other = state.rule !== "used";
    HeadMap.draw("map", rows, state, (layer, head) => show({ layer, head }), other ? movedOf : undefined);
    fill("headline", other ? headline : data.headline);
    fill("scale-words", other ? `${sentence} In the map: the percentage of each head's weight that moves.` : sentence);
    HeadMap.legend("legend", new Set(other ? [] : rows.flatMap(({ heads }) => heads.map((head) => head.verdict))));
  }

  const movedOf = ({ weight_moved: moved }) => ({
    class: "moved", style: `--share: ${share(moved ?? 0)}`, words: `${share(moved)} of its weight moves`,
    text: moved == null ? "–" : String(Math.round(100 * moved)),
  });

  function drawList() {
    fill("list-title", data.list.title);
    fill("list", data.list.heads.map(({ layer, head, lead, reason, hint, verdict }) =>
      el("li", {}, HeadMap.mark(verdict), el("div", {},
        el("button", { class: "link", type: "button", onclick: () => {
          show({ layer, head });
          document.getElementById("head").scrollIntoView();
        } }, lead),
        el("p", {}, `${reason}.`), el("p", { class: "soft" }, `→ ${hint}`)))));
  }

  // ------------------------------------------------------------ one head's attention

  const pictureOf = (text) => pictures?.layers[state.layer]?.[text];
  const drawnTexts = () => (pictures?.inputs || []).map((_, text) => text).filter(pictureOf);

  // The weights at a scale: exp(f·score − lse), with the lse of the whole row; null where hidden.
  function weightsOf(picture, rule) {
    const head = picture.heads[state.head];
    if (!head.lse) return rule === "used" ? head.weights : null;
    const place = ["used", ...Object.keys(layers[state.layer].scales)].indexOf(rule);
    const factor = factorOf(rule), lse = head.lse[place];
    return head.scores.map((score, i) => {
      const row = lse[Math.floor(i / picture.columns)];
      return score == null || row == null ? null : Math.min(1, Math.exp(factor * score - row)); // rounding
    });
  }
  const factorOf = (rule) => (rule === "used" ? 1 : layers[state.layer].scales[rule].factor);
  const scoresOf = (picture, rule) =>
    picture.heads[state.head].scores.map((score) => (score == null ? null : score * factorOf(rule)));

  function rowsOf(flat, picture) {
    return Array.from({ length: picture.rows }, (_, row) =>
      flat.slice(row * picture.columns, (row + 1) * picture.columns));
  }
  const names = (tokens, size, shown) =>
    Array.from({ length: shown }, (_, i) => (tokens.length === size ? tokens[i] : String(i)));

  const TOKEN = 14; // letters of a token on an axis
  const cut = (token) => (token.length > TOKEN ? `${token.slice(0, TOKEN - 1)}…` : token);

  function drawHeat() {
    const picture = pictureOf(state.text);
    const empty = document.getElementById("heat");
    if (!picture) {
      Plotly.purge(empty);
      fill("heat", el("p", { class: "soft" }, data.nopicture));
      fill("heat-words");
      return;
    }
    const { label, tokens } = pictures.inputs[state.text];
    const queries = names(tokens, picture.queries, picture.rows);
    const keys = names(tokens, picture.keys, picture.columns);
    const weights = weightsOf(picture, state.rule), scores = scoresOf(picture, state.rule);
    const shown = state.view === "weights" ? weights : scores;
    if (!shown) {
      Plotly.purge(empty);
      fill("heat", el("p", { class: "soft" },
        "Not drawn: this layer adds a bias, a cap or a sink between scores and weights. The table below still counts it."));
      fill("heat-words");
      return;
    }
    if (!empty.classList.contains("js-plotly-plot")) empty.replaceChildren();
    const z = rowsOf(shown, picture);
    const hover = rowsOf(shown.map((_, i) => {
      const [query, key] = [queries[Math.floor(i / picture.columns)], keys[i % picture.columns]];
      const value = weights ? `weight ${number(weights[i])}, ` : "";
      return `<b>${escape(query)}</b> looks at <b>${escape(key)}</b><br>${value}score ${number(scores[i])}`;
    }), picture);
    plot("heat", (width, colour) => {
      const cell = Math.min(40, Math.max(5, (width - 80) / keys.length));
      const every = Math.max(1, Math.ceil(13 / cell));
      const ticks = (list) => {
        const at = list.map((_, i) => i).filter((i) => i % every === 0);
        return { tickvals: at, ticktext: at.map((i) => escape(cut(list[i]))), ticks: "", showgrid: false, zeroline: false };
      };
      const heat = ["heat-0", "heat-1", "heat-2", "heat-3"].map(colour);
      const size = Math.max(...scores.map((score) => Math.abs(score ?? 0)), 1e-9);
      const shades = state.view === "weights"
        ? { zmin: 0, zmax: 1, colorscale: heat.map((shade, i) => [[0, 0.08, 0.35, 1][i], shade]) }
        : { zmin: -size, zmax: size, colorscale: [[0, colour("cool")], [0.5, heat[0]], [1, colour("warm")]] };
      return {
        label: `Attention ${state.view} of ${layers[state.layer].short}, head ${state.head}, on: ${label}`,
        data: [{
          type: "heatmap", z, text: hover, hovertemplate: "%{text}<extra></extra>", xgap: 1, ygap: 1, ...shades,
          showscale: width > 420, colorbar: { thickness: 10, len: 1, y: 0.5, outlinewidth: 0, tickfont: { size: 10 }, nticks: 5 },
        }],
        layout: {
          height: Math.max(150, cell * queries.length + 90),
          margin: { l: 8, r: width > 420 ? 8 : 32, t: 8, b: 8 }, // room for the last, leaning label
          xaxis: { side: "top", tickangle: -55, fixedrange: true, ...ticks(keys) },
          yaxis: { autorange: "reversed", fixedrange: true, ...ticks(queries) },
        },
      };
    });
    fill("heat-words", heatWords(weights, picture, queries, keys));
  }

  function heatWords(weights, picture, queries, keys) {
    const parts = ["Rows: queries. Columns: keys."];
    if (weights) {
      const strongest = weights.map((weight, i) => [weight ?? 0, i]).sort((a, b) => b[0] - a[0]).slice(0, 3);
      const links = strongest.map(([weight, i]) =>
        `${queries[Math.floor(i / picture.columns)]} → ${keys[i % picture.columns]} ${number(weight)}`);
      parts.push(`Strongest: ${links.join("; ")}.`);
    }
    if (picture.rows < picture.queries || picture.columns < picture.keys) {
      parts.push(`Shown are the first ${picture.rows} × ${picture.columns} of ${picture.queries} × ${picture.keys}.`);
    }
    return parts.join(" ");
  }

  // ------------------------------------------------------------ its distributions

  function drawDistributions() {
    const all = drawnTexts().map(pictureOf);
    document.getElementById("distributions").hidden = !all.length;
    if (!all.length) return;
    const scores = all.flatMap((picture) => scoresOf(picture, state.rule)).filter((score) => score != null);
    const weights = all.flatMap((picture) => weightsOf(picture, state.rule) || []).filter((weight) => weight != null);
    fill("scores-words", `Each visible pair's score. Standard deviation ${number(current().score_std)}; `
      + "1/√d_k is meant to give about 1.");
    const bars = (id, x, bins, axis, label) => plot(id, (width, colour) => ({
      label,
      data: [{
        type: "histogram", x, histnorm: "percent", marker: { color: colour("accent"), line: { width: 0 } },
        ...bins, hovertemplate: "%{x}: %{y:.1f} %<extra></extra>",
      }],
      layout: {
        height: 170, bargap: 0.06,
        xaxis: { fixedrange: true, showgrid: false, ...axis },
        yaxis: { fixedrange: true, ticksuffix: " %", nticks: 4, rangemode: "tozero" },
      },
    }));
    bars("scores", scores, { nbinsx: 48 }, {}, "Distribution of the scores");
    bars("weights", weights.map((weight) => Math.log10(Math.max(weight, 1e-6))),
      { xbins: { start: -6, end: 0.0001, size: 0.125 } },
      { range: [-6.05, 0.05], tickvals: [-6, -5, -4, -3, -2, -1, 0],
        ticktext: ["≤ 10⁻⁶", "10⁻⁵", "10⁻⁴", "0.001", "0.01", "0.1", "1"] },
      "Distribution of the weights");
  }

  // ------------------------------------------------------------ one head in numbers

  function table(id, fields) {
    const line = (title, cell, meaning) => el("tr", {},
      el("th", { scope: "row", title: meaning }, title),
      rules.map((rule) => el("td", { class: "number" }, cell(current(rule)))));
    fill(id,
      el("thead", {}, el("tr", {}, el("td", {}), scales.map((scale) =>
        el("th", { scope: "col", class: "number" }, scale.label)))),
      el("tbody", {}, line("weight moved", (head) => share(head.weight_moved ?? 0), data.moved_meaning),
        line("verdict", (head) => `${head.verdict}${levelOf(head)}`),
        Object.entries(fields).map(([name, { label, meaning }]) => line(label, (head) => number(head[name]), meaning))));
  }

  function drawHead() {
    const layer = layers[state.layer], head = current();
    const other = state.rule !== "used" && scaleOf(state.rule).with;
    fill("head-title", HeadMap.mark(head.verdict), ` ${layer.short}, head ${state.head}`, other
      ? ` ${other}: ${share(head.weight_moved)} of its weight moves` : `: ${head.verdict}${levelOf(head)}`);
    fill("head-words", other ? `It would be ${head.verdict}: ${head.reason}.` : `${head.reason}. `,
      other ? null : el("span", { class: "soft" }, `→ ${head.hint}`));
    select("layer", layers.map((each, i) => [i, each.short]), state.layer, (value) => show({ layer: Number(value), head: 0 }));
    select("number", layer.heads.map((each) => [each.head, `${each.head} (${headsOf(layer, state.rule)[each.head].verdict})`]),
      state.head, (value) => show({ head: Number(value) }));
    const texts = drawnTexts();
    if (!texts.includes(state.text)) state.text = texts[0] ?? 0;
    select("text", texts.map((text) => [text, pictures.inputs[text].label]), state.text, (value) => show({ text: Number(value) }));
    drawHeat();
    drawDistributions();
    table("head-scales", data.main);
    table("head-all", data.fields);
  }

  function drawScales() {
    const titles = ["weight moved", "what goes wrong", "outputs changed", ...Object.values(data.compared)];
    const cells = (scale) => [share(scale.weight_moved), scale.short, share(scale.output_changed),
      ...Object.keys(data.compared).map((name) => number(scale[name]))];
    const kind = (at) => (at === 1 ? "words" : "number");
    fill("scales",
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "scale"),
        titles.map((title, at) => el("th", { scope: "col", class: kind(at) }, title)))),
      el("tbody", {}, scales.map((scale) => el("tr", {}, el("th", { scope: "row" }, scale.label),
        cells(scale).map((cell, at) => el("td", { class: kind(at) }, cell))))));
    fill("scales-about", data.scales_about);
  }

  function show(change) {
    Object.assign(state, change);
    setScale.forEach((set) => set(state.rule));
    drawMap();
    drawHead();
  }

  fill("about", data.about);
  fill("missing", data.missing);
  fill("scale-in-use", data.scale.map((line) => el("p", { class: "soft" }, line)));
  fill("inputs", data.inputs);
  fill("made", data.made);
  const setScale = ["scale", "head-scale"].map((id) => choice(id, "Scores multiplied by",
    scales.map((scale) => [scale.rule, scale.label]), "used", (rule) => show({ rule })));
  choice("view", "Shown", [["weights", "weights"], ["scores", "scores"]], "weights", (view) => show({ view }));
  drawList();
  drawScales();
  show({});
})();
