"use strict";
(() => {
  const { data, el, fill, escape, number, plot, choice, select } = LH;
  const { layers, steps, scalars, alerts, fields } = data;
  fill("headline", data.headline);
  fill("about", data.about);
  fill("made", data.made);
  if (!data.worst) {
    document.getElementById("recorded").hidden = true;
    return;
  }
  const verdictOf = Object.fromEntries(Object.entries(data.legend).map(([verdict, mark]) => [mark.letter, verdict]));
  const levelOf = Object.fromEntries(Object.entries(data.levels).map(([level, mark]) => [mark, level]));
  const last = steps.length - 1;
  const state = { ...data.worst, statistic: data.statistic, span: "step", at: last, axis: data.axis };

  // ------------------------------------------------------------ the map, at a step or of the whole run

  // The latest point up to `at` where the layer took part.
  function pointOf(layer) {
    for (let at = state.at; at >= 0; at -= 1) if (layer.verdicts[0][at] !== " ") return at;
    return null;
  }

  function headsOf(layer) {
    if (state.span === "run") return layer.heads;
    if (state.at === last) return layer.last;
    const at = pointOf(layer);
    return layer.heads.map(({ head }) => ({
      head,
      level: at == null ? "info" : levelOf[layer.levels[head][at]],
      verdict: at == null ? data.unjudged : verdictOf[layer.verdicts[head][at]],
      reason: at == null ? "no call up to this step" : `at step ${number(steps[at])}`,
      ...Object.fromEntries(Object.entries(layer.series).map(([name, lines]) => [name, at == null ? null : lines[head][at]])),
    }));
  }

  function drawMap() {
    const rows = layers.map((layer) => ({ name: layer.short, heads: headsOf(layer) }));
    HeadMap.draw("map", rows, state, (layer, head) => show({ layer, head }));
    HeadMap.legend("legend", new Set(rows.flatMap((row) => row.heads.map((head) => head.verdict))));
    fill("step-words", state.span === "run" ? "All steps together" : `Step ${number(steps[state.at])}`);
    const slider = document.getElementById("step");
    Object.assign(slider, { max: last, value: state.at, disabled: state.span === "run" || last < 1 });
    slider.setAttribute("aria-valuetext", `step ${steps[state.at]}`);
  }

  // ------------------------------------------------------------ alerts

  function drawAlerts() {
    fill("findings", data.findings.map((finding) => el("li", {}, HeadMap.mark(finding.mark), el("p", {}, finding.text))));
    fill("alerts-title", alerts.length ? "Alerts, the newest first" : "No alerts");
    const left = data.alerts_left_out;
    fill("alerts", alerts.map((alert) => el("li", {}, HeadMap.mark(alert.mark), el("div", {},
      el("button", { class: "link", type: "button", onclick: () => {
        show({ layer: alert.layer, head: alert.head });
        document.getElementById("chart-title").scrollIntoView();
      } }, `Step ${number(alert.step)}: ${alert.scope === "model" ? "the model" : `${layers[alert.layer].short}, head ${alert.head}`} ${alert.verdict} (${alert.level})`),
      el("p", {}, `${alert.reason}.`), alert.hint ? el("p", { class: "soft" }, `→ ${alert.hint}`) : null))),
    left ? el("li", {}, `and ${left} older ones`) : null);
  }

  // ------------------------------------------------------------ a statistic over the steps

  const nearest = (step) => {
    const found = steps.findIndex((each) => each >= step);
    return found < 0 ? last : found;
  };

  function drawChart() {
    const layer = layers[state.layer], field = fields[state.statistic];
    const lines = layer.series[state.statistic];
    fill("chart-title", `${layer.short}: ${field.label}`);
    fill("chart-words", field.meaning);
    select("statistic", Object.keys(layer.series).map((name) => [name, fields[name].label]), state.statistic,
      (statistic) => show({ statistic }));
    select("layer", layers.map((each, i) => [i, each.short]), state.layer, (value) => show({ layer: Number(value), head: 0 }));
    select("number", layer.heads.map(({ head }) => [head, head]), state.head, (value) => show({ head: Number(value) }));
    fill("numbers", HeadMap.numbers(headsOf(layer)[state.head],
      Object.keys(fields).filter((name) => name in headsOf(layer)[state.head])));
    const here = alerts.filter((alert) => alert.layer === state.layer);
    const values = lines.flat().filter((value) => value != null);
    const [low, high] = [Math.min(...values), Math.max(...values)];
    const guides = (data.guides[state.statistic] || []).filter((at) => at <= high * 2 && at >= Math.min(low, high / 20));
    plot("chart", (width, colour) => ({
      label: [`${field.label} of the heads of ${layer.short} over the steps`, ...scalars.map(({ label }) => label)].join(", "),
      data: [
        ...guides.map((at) => ({
          type: "scatter", mode: "lines", x: [steps[0], steps[last]], y: [at, at], hoverinfo: "skip",
          line: { color: colour("warm"), width: 1, dash: "dot" },
        })),
        ...lines.map((line, head) => ({
          type: "scatter", mode: steps.length === 1 ? "markers" : "lines", x: steps, y: line, name: `head ${head}`, connectgaps: true,
          hovertemplate: `head ${head}, step %{x}: %{y:.4g}<extra></extra>`,
          line: { width: head === state.head ? 3 : 1.2, color: head === state.head ? colour("accent") : colour("soft") },
          opacity: head === state.head ? 1 : 0.55,
        })).sort((a, b) => a.line.width - b.line.width),
        {
          type: "scatter", mode: "markers", name: "alerts",
          x: here.map((alert) => steps[nearest(alert.step)]),
          y: here.map((alert) => lines[alert.head][nearest(alert.step)]),
          text: here.map((alert) => escape(`head ${alert.head}: ${alert.verdict}`) + `<br>${escape(alert.reason)}`),
          hovertemplate: "step %{x}, %{text}<extra></extra>",
          marker: {
            symbol: "diamond", size: 11, color: here.map((alert) => colour(alert.verdict)),
            line: { width: 1.5, color: colour("page") },
          },
        },
        ...scalars.map(({ name, values }, place) => ({
          type: "scatter", x: steps, y: values, yaxis: `y${place + 2}`, name: escape(name), connectgaps: true,
          mode: values.filter((value) => value != null).length < 20 ? "lines+markers" : "lines", // some come but now and then
          hovertemplate: `${escape(name)}, step %{x}: %{y:.4g}<extra></extra>`,
          line: { width: 1.6, color: colour("cool") },
        })),
      ],
      layout: stacked(field.label, width < 600 ? 320 : 420, colour),
    }));
  }

  // What was logged stands above the statistic, a panel each, on one axis of steps.
  const PANEL = 130, GAP = 34; // pixels
  function stacked(label, height, colour) {
    const layout = { showlegend: false, xaxis: { title: { text: "step" } }, yaxis: { type: state.axis }, height };
    if (!scalars.length) return layout;
    const whole = height + scalars.length * PANEL, share = (pixels) => pixels / whole;
    const panel = (at, size, text) => ({ domain: [share(at), share(at + size - GAP)], text: escape(text) });
    const panels = [
      panel(0, height, label),
      ...scalars.map((each, place) => panel(whole - (place + 1) * PANEL, PANEL, each.label)),
    ];
    panels.forEach(({ domain }, place) => {
      const axis = place ? `yaxis${place + 1}` : "yaxis";
      layout[axis] = { ...(place ? { nticks: 4, exponentformat: "e" } : layout.yaxis), domain };
    });
    return {
      ...layout, height: whole,
      xaxis: {
        ...layout.xaxis, anchor: "y", showspikes: true, spikemode: "across", spikesnap: "hovered data",
        spikethickness: 1, spikedash: "dot", spikecolor: colour("soft"),
      },
      annotations: panels.map(({ domain, text }) => ({
        text, x: 0, y: domain[1], xref: "paper", yref: "paper", xanchor: "left", yanchor: "bottom", showarrow: false,
        align: "left", font: { color: colour("ink"), size: 13 },
      })),
    };
  }

  function show(change) {
    Object.assign(state, change);
    if (!(state.statistic in layers[state.layer].series)) state.statistic = Object.keys(fields)[0];
    drawMap();
    drawChart();
  }

  document.getElementById("step").oninput = (event) => show({ at: Number(event.target.value) });
  choice("span", "Verdicts", [["step", "at a step"], ["run", "whole run"]], "step", (span) => show({ span }));
  choice("axis", "Axis", [["linear", "linear"], ["log", "log"]], data.axis, (axis) => show({ axis }));
  drawAlerts();
  show({});
})();
