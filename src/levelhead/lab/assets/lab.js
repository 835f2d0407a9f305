// Draws the charts one after another, so that the page can be read and scrolled meanwhile; keeps
// the contents up to date; and brings the explorer's parts beside the claims they belong to.
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

const tall = (layout, width) => (width < 420 ? 226 : layout.height || 300); // lower if several share a row

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
      margin: { l: 8, r: 12, t: 8, b: 8 },
      showlegend: false,
      // A finger on a picture scrolls the page; a mouse zooms, and a double click goes back.
      dragmode: touch ? false : "zoom",
      ...rest,
      height: tall(layout, width),
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

// plotly.js is packed, a third of its size; this page can be read before it is there.
async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(LH.el("script", {}, await new Response(stream).text()));
}

const waiting = Object.entries(LH.data.charts);
function next() {
  const [id, spec] = waiting.shift() || [];
  if (!id) return document.body.setAttribute("data-drawn", "all");
  document.getElementById(id).style.minHeight = "";
  draw(id, spec);
  setTimeout(next);
}
for (const [id, spec] of waiting) { // their room is kept, so that nothing moves under the reader
  const node = document.getElementById(id);
  node.style.minHeight = `${tall(spec.layout, node.clientWidth)}px`;
}
if (waiting.length) unpack().then(next);
else next();

// ---------------------------------------------------------------- contents

const claims = [...document.querySelectorAll(".claim")], go = document.getElementById("go");
const links = new Map([...document.querySelectorAll(".contents li a")].map((link) => [link.hash.slice(1), link]));

// The claim that is being read: the last one that begins in the upper third of the window.
function mark() {
  const begun = claims.filter((claim) => claim.getBoundingClientRect().top < innerHeight / 3);
  const now = begun.at(-1)?.id;
  links.forEach((link, name) => (name === now ? link.setAttribute("aria-current", "true") : link.removeAttribute("aria-current")));
  go.value = now || claims[0]?.id;
}
let asked = false;
addEventListener("scroll", () => {
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => { asked = false; mark(); });
}, { passive: true });
mark();
go.addEventListener("change", () => { location.hash = go.value; });

// A link to a claim unfolds its text.
function unfold() {
  const words = document.getElementById(location.hash.slice(1))?.querySelector(".words");
  if (words) words.open = true;
}
addEventListener("hashchange", unfold);
document.addEventListener("click", (event) => {
  const link = event.target.closest?.('a[href^="#"]');
  if (link && link.hash === location.hash) unfold(); // no change of the address, but the same wish
});
unfold();

// ---------------------------------------------------------------- parts to play with

// The explorer's own parts and script, made when the first of them is opened. There is one of each:
// it moves to the claim that asks for it, and is folded where it was.
const parts = new Map();
function make() {
  const stock = LH.el("div", { class: "play", hidden: true });
  stock.append(document.getElementById("explore").content);
  document.body.append(stock);
  explorer();
  for (const section of stock.querySelectorAll("section")) {
    parts.set(section.id, section);
    section.setAttribute("aria-label", section.querySelector("h2").textContent);
    section.removeAttribute("aria-labelledby");
    section.querySelector("h2").remove();
    section.removeAttribute("id"); // a claim may have it
  }
}
document.querySelectorAll("[data-try]").forEach((fold) => fold.addEventListener("toggle", () => {
  if (!fold.open) return;
  if (!parts.size) make();
  const part = parts.get(fold.dataset.try), before = part.closest("[data-try]");
  if (before && before !== fold) before.open = false;
  fold.querySelector(".play").append(part);
}));
