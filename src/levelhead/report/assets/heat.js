"use strict";
// A head's attention as a heat map with its tokens, its distributions as bars, and both the map of
// heads and the heat map as files.
const Heat = (() => {
  const { el, fill, number } = LH;
  const { s, palette, matrix, diverging } = Paint;
  const by = (id) => document.getElementById(id);

  // Weights from 0 to 1: most are small, so the first shades are spent on those.
  const STOPS = [0, 0.08, 0.35, 1];
  const sequential = (weights) => (i, write) => {
    const weight = weights[i], shades = ["heat-0", "heat-1", "heat-2", "heat-3"].map((name) => palette[name]);
    if (Number.isNaN(weight)) return; // hidden: nothing is drawn
    const stop = weight < STOPS[1] ? 0 : weight < STOPS[2] ? 1 : 2;
    write(shades[stop], shades[stop + 1], Math.min(1, (weight - STOPS[stop]) / (STOPS[stop + 1] - STOPS[stop])));
  };
  const thumb = (canvas, picture, weights) => matrix(canvas, picture.rows, picture.columns, sequential(weights));

  // ------------------------------------------------------------ the heat map

  const TOKEN = 14, LETTER = 6.3; // letters of a token on an axis; pixels of a letter
  const cut = (token) => (token.length > TOKEN ? `${token.slice(0, TOKEN - 1)}…` : token);
  let drawn = null; // what the axes are of

  function axes(place, picture, queries, keys, tall) {
    const long = (tokens) => Math.max(...tokens.map((token) => cut(token).length)) * LETTER + 8;
    const left = long(queries), top = 0.82 * long(keys) + 8, right = Math.min(0.57 * long(keys), 46);
    const room = Math.min((place.clientWidth - left - right) / picture.columns, (tall - top) / picture.rows);
    const cell = Math.min(34, Math.max((place.clientWidth - left - right) / picture.columns > 5 ? 5 : 2, room));
    const letters = Math.min(11, Math.max(9, cell - 1)), every = Math.max(1, Math.ceil((letters + 1) / cell)), size = [picture.columns * cell, picture.rows * cell];
    const svg = s("svg", { width: Math.floor(left + size[0] + right), height: Math.ceil(top + size[1] + 2), "aria-hidden": "true", style: `font-size:${letters}px` });
    queries.forEach((token, i) => i % every || svg.append(s("text", {
      x: left - 6, y: top + (i + 0.5) * cell + 4, "text-anchor": "end", class: "query" }, cut(token))));
    keys.forEach((token, i) => i % every || svg.append(s("text", {
      transform: `translate(${left + (i + 0.5) * cell + 3} ${top - 6}) rotate(-55)`, class: "key" }, cut(token))));
    const canvas = el("canvas", { role: "img", style: `left:${left}px;top:${top}px;width:${size[0]}px;height:${size[1]}px` });
    place.replaceChildren(svg, canvas);
    return { svg, canvas, left, top, cell, picture, width: place.clientWidth };
  }

  // values: weights or scores of the corner; tell(i) when a pair is pointed at, tell(null) after
  function draw({ picture, values, view, queries, keys, label, tall, key, tell }) {
    const place = by("heat");
    if (!drawn || drawn.key !== key || drawn.width !== place.clientWidth || !drawn.canvas.isConnected) {
      drawn = { ...axes(place, picture, queries, keys, tall), key };
    }
    const { canvas } = drawn;
    const most = values.reduce((top, value) => Math.max(top, Math.abs(value) || 0), 1e-9);
    matrix(canvas, picture.rows, picture.columns, view === "weights" ? sequential(values)
      : (i, write) => Number.isNaN(values[i]) || diverging((at) => values[at], most)(i, write));
    canvas.setAttribute("aria-label", label);
    canvas.onpointermove = canvas.onpointerdown = (event) => {
      const box = canvas.getBoundingClientRect();
      const at = (part, from, size) => Math.min(size - 1, Math.max(0, Math.floor(((part - from) / drawn.cell))));
      tell(at(event.clientY, box.top, picture.rows) * picture.columns + at(event.clientX, box.left, picture.columns));
    };
    canvas.onpointerleave = () => tell(null);
  }

  function none(words) {
    drawn = null;
    fill("heat", el("p", { class: "soft" }, words));
  }

  // ------------------------------------------------------------ bars

  // values in [low, high], as so many bars; ticks: [[value, name]]
  function bins(id, values, low, high, ticks, label, many = 48) {
    const width = 300, tall = 45, base = 58, counts = new Float64Array(many);
    let total = 0;
    for (const value of values) {
      if (Number.isNaN(value)) continue;
      counts[Math.min(many - 1, Math.max(0, Math.floor(((value - low) / (high - low)) * many)))] += 1;
      total += 1;
    }
    const most = Math.max(...counts, 1), step = width / many;
    let path = "";
    counts.forEach((count, i) => {
      if (count) path += `M${(i * step).toFixed(1)} ${base}v${(-Math.max(1, (tall * count) / most)).toFixed(1)}h${(step * 0.88).toFixed(1)}V${base}z`;
    });
    const share = `${Math.round((100 * most) / Math.max(total, 1))}%`;
    fill(id, s("svg", { viewBox: `0 0 ${width} 74`, role: "img", "aria-label": label },
      s("path", { class: "axis", d: `M0 ${base}H${width}` }), s("path", { d: path }),
      s("text", { x: width, y: 9, "text-anchor": "end" }, share),
      ...ticks.map(([value, name], i) => s("text", {
        x: ((value - low) / (high - low)) * width, y: 71,
        "text-anchor": i === 0 ? "start" : i === ticks.length - 1 ? "end" : "middle" }, name))));
  }
  const ends = (low, high) => [low, (low + high) / 2, high].map((value) => [value, number(Number(value.toPrecision(2)))]);

  // ------------------------------------------------------------ files

  function save(name, content, type) {
    const address = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
    el("a", { href: address, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(address), 10_000);
  }

  const csv = (rows) => rows.map((row) => row.map((cell) => {
    const text = cell == null || Number.isNaN(cell) ? "" : String(cell);
    return /[",\n\r]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
  }).join(",")).join("\n") + "\n";

  const textStyle = () => ({ fill: LH.colour("soft"), "font-family": "system-ui, sans-serif", "font-size": drawn ? parseFloat(drawn.svg.style.fontSize) : 11 });
  function framed(title, width, height, ...children) {
    return s("svg", { xmlns: "http://www.w3.org/2000/svg", width, height: height + 30, viewBox: `0 -30 ${width} ${height + 30}` },
      s("rect", { y: -30, width, height: height + 30, fill: LH.colour("page") }),
      s("text", { ...textStyle(), x: 8, y: -11, "font-size": 13, fill: LH.colour("ink") }, title), ...children);
  }
  const picture = (canvas, x, y, width, height) => {
    const large = el("canvas", { width: canvas.width * 8, height: canvas.height * 8 }), context = large.getContext("2d");
    context.imageSmoothingEnabled = false;
    context.drawImage(canvas, 0, 0, large.width, large.height);
    return s("image", { x, y, width, height, preserveAspectRatio: "none", href: large.toDataURL() });
  };

  // The heat map as it is on the screen.
  function heatSvg(title) {
    const { svg, canvas, left, top, cell, picture: shown } = drawn, copy = svg.cloneNode(true);
    copy.querySelectorAll("text").forEach((text) => Object.entries(textStyle()).forEach(([name, value]) => text.setAttribute(name, value)));
    return framed(title, Math.max(svg.clientWidth, 8 * title.length), svg.clientHeight + 8, ...copy.childNodes,
      picture(canvas, left, top, shown.columns * cell, shown.rows * cell));
  }

  // The map of heads, from the cells as they are.
  function mapSvg(title, rows) {
    const grid = [...by("map").querySelectorAll("[role=gridcell]")], size = 34;
    const left = 20 + LETTER * Math.max(...rows.map((row) => row.name.length)), most = Math.max(...rows.map((row) => row.heads.length));
    const pixel = el("canvas", { width: 1, height: 1 }).getContext("2d", { willReadFrequently: true });
    const plain = (shade) => { // a mixed colour as every program reads it
      pixel.clearRect(0, 0, 1, 1);
      pixel.fillStyle = shade;
      pixel.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = pixel.getImageData(0, 0, 1, 1).data;
      return a ? `rgb(${r},${g},${b})` : "none";
    };
    const parts = grid.flatMap((cell) => {
      const style = getComputedStyle(cell), canvas = cell.querySelector("canvas");
      const x = left + cell.dataset.head * size, y = 18 + cell.dataset.layer * size, fade = style.opacity;
      return [s("rect", { x, y, width: size - 3, height: size - 3, rx: 5, fill: plain(style.backgroundColor), opacity: fade }),
        canvas ? picture(canvas, x, y, size - 3, size - 3) : s("text", { ...textStyle(), x: x + (size - 3) / 2, y: y + 20,
          "text-anchor": "middle", fill: plain(style.color), opacity: fade }, cell.textContent)];
    });
    return framed(title, Math.max(left + most * size + 8, 8 * title.length), 26 + rows.length * size, ...parts,
      ...rows.map((row, i) => s("text", { ...textStyle(), x: 8, y: 38 + i * size }, row.name)),
      ...Array.from({ length: most }, (_, head) => s("text", { ...textStyle(), x: left + (head + 0.45) * size, y: 12, "text-anchor": "middle" }, String(head))));
  }

  async function png(svg) {
    const image = new Image(), [width, height] = ["width", "height"].map((name) => 2 * svg.getAttribute(name));
    image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;
    await image.decode();
    const canvas = el("canvas", { width, height });
    canvas.getContext("2d").drawImage(image, 0, 0, width, height);
    return new Promise((done) => { canvas.toBlob(done, "image/png"); });
  }

  // Three buttons; name, svg and rows are asked for when one is pressed.
  function savers(id, { name, svg, rows }) {
    const button = (kind, make) => el("button", { type: "button", onclick: make }, kind);
    fill(id, "Save",
      button("PNG", async () => save(`${name()}.png`, await png(svg()))),
      button("SVG", () => save(`${name()}.svg`, new XMLSerializer().serializeToString(svg()), "image/svg+xml")),
      button("CSV", () => save(`${name()}.csv`, csv(rows()), "text/csv")));
  }

  return { draw, none, thumb, bins, ends, savers, heatSvg, mapSvg };
})();
