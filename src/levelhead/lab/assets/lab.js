// Draws the pictures one after another, so that the page can be read and scrolled meanwhile.
const touch = matchMedia("(pointer: coarse)").matches;

function figure({ data, layout }) {
  const { title, ...rest } = layout;
  const legend = { orientation: "h", y: -0.22, yanchor: "top", x: 0, font: { size: 11 } };
  const shown = data.filter((trace) => trace.showlegend !== false && trace.type !== "heatmap");
  return {
    label: title.text,
    data,
    layout: {
      height: 340 + 9 * Math.max(0, shown.length - 3),
      margin: { l: 8, r: 12, t: 8, b: 8 },
      legend,
      showlegend: shown.length > 1,
      // A finger on a picture scrolls the page; a mouse zooms, and a double click goes back.
      dragmode: touch ? false : "zoom",
      ...rest,
    },
  };
}

const waiting = Object.entries(LH.data);
function next() {
  const [id, spec] = waiting.shift() || [];
  if (!id) return document.body.setAttribute("data-drawn", "all");
  LH.plot(id, () => figure(structuredClone(spec)));
  setTimeout(next);
}
next();
