// Draws the pictures one after another, so that the page can be read and scrolled meanwhile.
const touch = matchMedia("(pointer: coarse)").matches;

function colourscale(name, colour) {
  const stops = name === "heat" ? ["heat-0", "heat-1", "heat-2", "heat-3"] : ["cool", "card", "warm"];
  return stops.map((stop, i) => [i / (stops.length - 1), colour(stop)]);
}

// One label a power of ten, or every other one where there are many.
function powersOfTen(axis, values) {
  if (!axis || axis.type !== "log" || axis.tickvals) return axis;
  const positive = values.filter((x) => x > 0);
  const decades = axis.range ? axis.range[1] - axis.range[0]
    : Math.log10(Math.max(...positive) / Math.min(...positive));
  return { dtick: Math.max(1, Math.ceil(decades / 7)), ...axis };
}

function figure({ data, layout }, width, colour) {
  const { title, ...rest } = layout;
  const named = data.filter((trace) => trace.showlegend !== false && trace.type !== "heatmap");
  const traces = data.map((trace) =>
    trace.type === "heatmap" && typeof trace.colorscale === "string"
      ? { ...trace, colorscale: colourscale(trace.colorscale, colour) } : trace);
  return {
    label: title.text,
    data: traces,
    layout: {
      width,
      height: 330 + 10 * Math.max(0, named.length - 3),
      margin: { l: 8, r: 12, t: 8, b: 8 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 11 } },
      showlegend: named.length > 1,
      // A finger on a picture scrolls the page; a mouse zooms, and a double click goes back.
      dragmode: touch ? false : "zoom",
      ...rest,
      xaxis: powersOfTen(rest.xaxis, data.flatMap((trace) => trace.x)),
      yaxis: powersOfTen(rest.yaxis, data.flatMap((trace) => trace.y)),
    },
  };
}

const waiting = Object.entries(LH.data);
function next() {
  const [id, spec] = waiting.shift() || [];
  if (!id) return document.body.setAttribute("data-drawn", "all");
  LH.plot(id, (width, colour) => figure(structuredClone(spec), width, colour));
  setTimeout(next);
}
next();
