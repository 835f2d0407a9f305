"use strict";
// What every page shares: its data, elements, numbers, and plots that follow the theme.
const LH = (() => {
  const data = JSON.parse(document.getElementById("data").textContent);

  // What stands in the page compressed, as text: bytes.
  async function inflate(packed) {
    const text = atob(packed), bytes = new Uint8Array(text.length);
    for (let i = 0; i < bytes.length; i++) bytes[i] = text.charCodeAt(i);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    return new Response(stream).arrayBuffer();
  }
  const unpack = (name) => inflate(document.getElementById(name).textContent);

  // An element; children are nodes or text, and text is never read as HTML.
  function el(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (value === true) node.setAttribute(name, "");
      else if (value !== false && value != null) node.setAttribute(name, value);
    }
    node.append(...children.flat().filter((child) => child != null));
    return node;
  }

  function fill(id, ...children) {
    document.getElementById(id).replaceChildren(...children.flat().filter((child) => child != null));
  }

  // Plotly reads some tags in its labels; this shows them instead.
  const escape = (text) =>
    String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function number(x) {
    if (x == null || Number.isNaN(x)) return "–";
    if (Number.isInteger(x) && Math.abs(x) < 1e9) return x.toLocaleString("en").replace("-", "−");
    const size = Math.abs(x);
    if (size >= 1e6 || size < 1e-4) return x.toExponential(2).replace("e+", "e").replace("-", "−");
    return x
      .toLocaleString("en", size >= 1000 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 })
      .replace("-", "−");
  }

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function themed(layout) {
    const [ink, soft, line, card] = ["ink", "soft", "line", "card"].map(colour);
    const axis = (given = {}) => ({
      automargin: true, gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, ...given,
    });
    const axes = Object.fromEntries(
      Object.entries({ xaxis: {}, yaxis: {}, ...layout })
        .filter(([name]) => /^[xy]axis\d*$/.test(name))
        .map(([name, given]) => [name, axis(given)]),
    );
    return {
      margin: { l: 8, r: 8, t: layout.title ? 40 : 8, b: 8 },
      hovermode: "closest",
      ...layout,
      ...axes,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: "system-ui, sans-serif", size: 12, color: soft, ...layout.font },
      hoverlabel: { bgcolor: card, bordercolor: line, font: { color: ink }, align: "left", ...layout.hoverlabel },
    };
  }

  // Draws, and draws again when the theme or the width changes. `make` gives {data, layout}
  // anew each time, for colours and sizes may hang on both.
  const plots = new Map();
  function plot(id, make) {
    const node = typeof id === "string" ? document.getElementById(id) : id;
    plots.set(node, make);
    const figure = make(node.clientWidth, colour);
    node.setAttribute("role", "img");
    if (figure.label) node.setAttribute("aria-label", figure.label);
    return Plotly.react(node, figure.data, themed(figure.layout || {}), {
      displayModeBar: false, responsive: false, ...figure.config,
    });
  }
  const redraw = () => plots.forEach((make, node) => node.isConnected && plot(node, make));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  let width = innerWidth, waiting = 0;
  addEventListener("resize", () => {
    if (innerWidth === width) return; // a phone hides its address bar: nothing to draw
    width = innerWidth;
    clearTimeout(waiting);
    waiting = setTimeout(redraw, 120);
  });

  // Radio buttons in a row; options are [value, label, disabled]. Gives a function that sets them.
  function choice(id, legend, options, chosen, onChange) {
    const radios = options.map(([value, label, disabled]) =>
      el("label", {}, el("input", {
        type: "radio", name: id, value, checked: value === chosen, disabled: !!disabled,
        onchange: () => onChange(value),
      }), label));
    fill(id, el("fieldset", { class: "choice" }, el("legend", {}, legend), el("div", {}, radios)));
    return (value) => radios.forEach((label) => { label.firstChild.checked = label.firstChild.value === value; });
  }

  function select(id, options, chosen, onChange) {
    const node = document.getElementById(id);
    node.replaceChildren(...options.map(([value, label]) =>
      el("option", { value, selected: String(value) === String(chosen) }, label)));
    node.onchange = () => onChange(node.value);
  }

  return { data, inflate, unpack, el, fill, escape, number, colour, plot, choice, select };
})();
