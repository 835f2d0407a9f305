// Draws the charts one after another, so that the page can be read and scrolled meanwhile.
const touch = matchMedia("(pointer: coarse)").matches;

const NEUTRAL = "#e5e7eb"; // the middle of a scale, which follows the theme

function colourscale(scale, colour) {
  if (Array.isArray(scale)) return scale.map(([at, stop]) => [at, stop === NEUTRAL ? colour("line") : stop]);
  const stops = scale === "heat" ? ["heat-0", "heat-1", "heat-2", "heat-3"] : ["cool", "card", "warm"];
  return stops.map((stop, i) => [i / (stops.length - 1), colour(stop)]);
}

// Ticks of a logarithmic axis: 1, 2, 5, 10 if it is short, else powers of ten, at most so many.
function logarithmic(axis, values, most) {
  if (!axis || axis.type !== "log" || axis.tickvals) return axis;
  const positive = values.filter((x) => x > 0);
  const [low, high] = axis.range || [Math.min(...positive), Math.max(...positive)].map(Math.log10);
  if (high - low >= 1.7) { // Plotly writes powers a quarter larger than other labels
    return { dtick: Math.max(1, Math.ceil((high - low) / most)), tickfont: { size: 9.6 }, ...axis };
  }
  const powers = Array.from({ length: 5 }, (_, i) => 10 ** (Math.floor(low) + i - 1));
  const tickvals = powers.flatMap((power) => [1, 2, 5].map((digit) => digit * power));
  return { ...axis, tickvals, ticktext: tickvals.map((tick) => LH.number(tick)) };
}

const named = (trace) => trace.name && trace.showlegend !== false;
const family = (trace) => trace.legendgroup || trace.name;

function figure({ data, layout }, hidden, width, colour) {
  const { title, ...rest } = layout;
  const shown = data.filter((trace) => !hidden.has(family(trace)));
  const traces = shown.map((trace) => ({
    ...trace,
    ...(trace.type === "heatmap" && { // its cells show their numbers
      colorscale: colourscale(trace.colorscale, colour), showscale: false,
    }),
    ...(trace.error_y && { error_y: { color: colour("ink"), thickness: 1.5, width: 4, ...trace.error_y } }),
  }));
  return {
    label: title.text,
    data: traces,
    layout: {
      width,
      height: 300,
      margin: { l: 8, r: 12, t: 8, b: 8 },
      showlegend: false,
      // A finger on a picture scrolls the page; a mouse zooms, and a double click goes back.
      dragmode: touch ? false : "zoom",
      ...rest,
      xaxis: logarithmic(rest.xaxis, data.flatMap((trace) => trace.x), width < 420 ? 4 : 7),
      yaxis: logarithmic(rest.yaxis, data.flatMap((trace) => trace.y), 7),
    },
  };
}

function draw(id, spec) {
  const node = document.getElementById(id), hidden = new Set();
  const again = () => LH.plot(id, (width, colour) => figure(structuredClone(spec), hidden, width, colour));
  const families = spec.data.filter(named).map(family);
  node.previousElementSibling.querySelectorAll("button").forEach((button, i) => {
    button.addEventListener("click", () => {
      if (!hidden.delete(families[i])) hidden.add(families[i]);
      button.setAttribute("aria-pressed", !hidden.has(families[i]));
      again();
    });
  });
  again();
}

const waiting = Object.entries(LH.data);
function next() {
  const [id, spec] = waiting.shift() || [];
  if (!id) return document.body.setAttribute("data-drawn", "all");
  draw(id, spec);
  setTimeout(next);
}
next();
