// What pages that draw by themselves share: elements of SVG, and matrices as pixels that follow the theme.
const Paint = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  function s(tag, attributes = {}, ...children) {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  // Colours for canvases; those of SVG follow the theme by themselves.
  const themes = [], palette = {};
  function readColours() {
    for (const name of ["card", "warm", "cool", "heat-0", "heat-1", "heat-2", "heat-3"]) {
      const hex = LH.colour(name);
      palette[name] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    }
  }
  readColours();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    readColours();
    themes.forEach((draw) => draw());
  });
  const onTheme = (draw) => themes.push(draw);

  // A matrix as coloured cells, one pixel each: shade(i, write) calls write(from, to, share).
  function matrix(canvas, rows, columns, shade) {
    if (canvas.width !== columns) canvas.width = columns;
    if (canvas.height !== rows) canvas.height = rows;
    const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
    let at = 0;
    const write = (from, to, share) => {
      for (let c = 0; c < 3; c++) image.data[at + c] = from[c] + (to[c] - from[c]) * share;
      image.data[at + 3] = 255;
    };
    for (let i = 0; i < rows * columns; i++, at += 4) shade(i, write);
    context.putImageData(image, 0, 0);
  }

  // Warm above 0, cool below; `most` has the full colour.
  const diverging = (value, most, bend = 1) => (i, write) => {
    const v = value(i);
    write(palette.card, v < 0 ? palette.cool : palette.warm, Math.min(1, Math.abs(v) / most) ** bend);
  };

  return { s, palette, onTheme, matrix, diverging };
})();
