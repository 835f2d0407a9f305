// Charts drawn by hand: SVG in the pixels of its place, and canvases for what has many cells.
const Draw = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  function s(tag, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) if (value != null) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // From numbers to pixels. A logarithmic axis has no place for what is not above 0: it goes to the end.
  function scale(min, max, from, to, log = false) {
    const f = log ? (x) => Math.log(Math.max(x, min)) : (x) => x;
    const low = f(min), width = f(max) - low || 1;
    return (x) => from + ((to - from) * (f(x) - low)) / width;
  }

  // The ends of an axis that holds all numbers; a logarithmic one only those above 0.
  function ends(numbers, log = false) {
    let min = Infinity, max = -Infinity;
    for (const x of numbers) {
      if (!Number.isFinite(x) || (log && x <= 0)) continue;
      if (x < min) min = x;
      if (x > max) max = x;
    }
    if (min > max) return log ? [0.1, 1] : [0, 1];
    if (min === max) return log ? [min / 2, max * 2] : [min - (Math.abs(min) / 10 || 1), max + (Math.abs(max) / 10 || 1)];
    return [min, max];
  }

  function ticks(min, max, most, log = false) {
    const found = [];
    if (log && max / min >= 10) {
      const first = Math.ceil(Math.log10(min) - 1e-9), last = Math.floor(Math.log10(max) + 1e-9);
      const by = Math.max(1, Math.ceil((last - first + 1) / most));
      for (let power = first; power <= last; power += by) found.push(10 ** power);
      return found;
    }
    const rough = (max - min) / most, size = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((each) => each * size).find((each) => each >= rough * 0.999);
    for (let at = Math.ceil(min / step - 1e-9); at * step <= max + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
    return found;
  }

  function path(points) {
    let d = "";
    for (const [x, y] of points) if (Number.isFinite(y)) d += `${d ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    return d;
  }

  // A chart that fills its node. x: {min, max, label}; y: {min, max, log}; lines: [{xs, ys, class, dots}], the
  // last on top; guides: [{at, label}]; marks: [{x, y, class, title}]. Gives the scale of x.
  function chart(node, { x, y, lines, guides = [], marks = [], height, left = 46, right = 10, label }) {
    const width = node.clientWidth, top = 8, bottom = x.label ? 36 : 6;
    const sx = scale(x.min, x.max, left, width - right), sy = scale(y.min, y.max, height - bottom, top, y.log);
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
    for (const tick of ticks(y.min, y.max, Math.max(2, Math.floor(height / 38)), y.log)) {
      svg.append(s("path", { class: "grid", d: `M${left} ${sy(tick)}H${width - right}` }));
      if (left) svg.append(s("text", { x: left - 6, y: sy(tick) + 4, "text-anchor": "end" }, short(tick)));
    }
    if (x.label) {
      for (const tick of ticks(x.min, x.max, Math.max(2, Math.floor(width / 110)))) {
        svg.append(s("text", { x: sx(tick), y: height - 20, "text-anchor": "middle" }, LH.number(tick)));
      }
      svg.append(s("text", { x: width - right, y: height - 4, "text-anchor": "end" }, x.label));
    }
    for (const { xs, ys, class: kind, dots } of lines) {
      const points = Array.from(xs, (at, i) => [sx(at), Number.isFinite(ys[i]) ? sy(ys[i]) : NaN]).filter(([, at]) => !Number.isNaN(at));
      if (points.length > 1) svg.append(s("path", { class: `line ${kind}`, d: path(points) }));
      if (dots || points.length === 1) points.forEach(([cx, cy]) => svg.append(s("circle", { class: `dot ${kind}`, cx, cy, r: 3 })));
    }
    let taken = [];
    for (const { at, label: words } of guides) {
      const line = sy(at);
      svg.append(s("path", { class: "guide", d: `M${left} ${line}H${width - right}` }));
      const below = line - top < 14 ? 13 : -4;
      if (taken.some((other) => Math.abs(other - line - below) < 13)) continue; // two would be unreadable
      taken.push(line + below);
      svg.append(s("text", { class: "guide-label", x: width - right, y: line + below, "text-anchor": "end" }, words));
    }
    for (const { x: at, y: value, class: kind, title } of marks) {
      if (!Number.isFinite(value)) continue;
      const cx = sx(at), cy = sy(value);
      svg.append(s("path", { class: `diamond ${kind}`, d: `M${cx} ${cy - 7}l7 7l-7 7l-7 -7z` }, s("title", {}, title)));
    }
    node.replaceChildren(svg);
    return sx;
  }

  const short = (x) => (x && (Math.abs(x) >= 1e4 || Math.abs(x) < 1e-3) ? x.toExponential(0).replace("e+", "e").replace("-", "−") : LH.number(x));

  // ------------------------------------------------------------ colours of a canvas

  const rgb = (name) => {
    const hex = LH.colour(name);
    return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
  };
  // 256 colours through those named, as the pixels of a canvas are kept.
  function ramp(names) {
    const stops = names.map(rgb), pixels = new Uint32Array(256);
    for (let i = 0; i < 256; i++) {
      const at = (i / 255) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
      pixels[i] = pixel(stops[low].map((part, c) => part + (stops[low + 1][c] - part) * (at - low)));
    }
    return pixels;
  }
  const pixel = ([r, g, b]) => ((255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r)) >>> 0;
  const css = (value) => `rgb(${value & 255} ${(value >> 8) & 255} ${(value >> 16) & 255})`;

  // Rows of cells: colourOf(row, column) is a pixel; column: for every pixel across the one that stands there.
  function cells(canvas, rows, height, columnAt, colourOf) {
    const ratio = Math.min(2, devicePixelRatio || 1), width = Math.round(canvas.parentNode.clientWidth * ratio);
    const tall = Math.max(1, Math.round(height * ratio));
    Object.assign(canvas, { width, height: rows * tall });
    canvas.style.height = `${rows * height}px`;
    const context = canvas.getContext("2d"), image = context.createImageData(width, rows * tall);
    const pixels = new Uint32Array(image.data.buffer), columns = new Uint16Array(width);
    for (let x = 0; x < width; x++) columns[x] = columnAt((x + 0.5) / width);
    for (let row = 0; row < rows; row++) {
      const start = row * tall * width;
      let last = -1, colour = 0;
      for (let x = 0; x < width; x++) {
        if (columns[x] !== last) colour = colourOf(row, (last = columns[x]));
        pixels[start + x] = colour;
      }
      for (let line = 1; line < tall; line++) pixels.copyWithin(start + line * width, start, start + width);
    }
    context.putImageData(image, 0, 0);
  }

  // Draws again when the theme or the width changes.
  function onChange(draw) {
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    let width = innerWidth, waiting = 0;
    addEventListener("resize", () => {
      if (innerWidth === width) return; // a phone hides its address bar: nothing to draw
      width = innerWidth;
      clearTimeout(waiting);
      waiting = setTimeout(draw, 120);
    });
  }

  return { s, scale, ends, ticks, path, chart, short, ramp, rgb, pixel, css, cells, onChange };
})();
