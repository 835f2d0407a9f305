// The run that is shown, what of it is chosen, and who has to draw when either changes.
const Run = (() => {
  const state = { layer: 0, head: 0, by: null, at: null }; // at: null is the newest step, whichever that is
  const parts = []; // {draw, move}: draw everything anew; only the step or the head has changed
  let data = LH.data, heads = 0, starts = [], codes = null, numbers = new Map();

  // ------------------------------------------------------------ numbers

  async function take(given) {
    const fresh = given.start === 0, points = given.steps.length - given.start;
    const before = fresh ? 0 : given.start * heads;
    heads = given.layers.reduce((sum, layer) => sum + layer.heads, 0);
    const grown = (old, more) => {
      const all = new more.constructor(before + more.length);
      if (before && old) all.set(old.subarray(0, before));
      else if (before && all.fill) all.fill(NaN, 0, before);
      all.set(more, before);
      return all;
    };
    const { codes: letters, ...packed } = given.packed, found = new Map();
    codes = grown(codes, await Packed.codes(letters, points, heads));
    for (const [name, text] of Object.entries(packed)) {
      found.set(name, grown(numbers.get(name), await Packed.floats(text, points, heads)));
    }
    numbers = found;
    data = given;
    starts = [];
    given.layers.reduce((sum, layer) => (starts.push(sum), sum + layer.heads), 0);
  }

  const place = (layer, head) => starts[layer] + head;
  const value = (name, at, step) => numbers.get(name)[step * heads + at];
  const line = (name, at) => data.steps.map((_, step) => value(name, at, step));
  const code = (at, step) => codes[step * heads + at];
  const order = () => Object.keys(data.legend);
  const judged = (number) => ({
    verdict: order()[Math.floor(number / data.levels.length)], level: data.levels[number % data.levels.length],
  });
  // The verdict of a head at the latest step up to now at which its layer took part.
  function head(at, step = now()) {
    for (let i = step; i >= 0; i--) if (code(at, i) !== data.not_there) return { at: i, ...judged(code(at, i)) };
    return null;
  }

  // ------------------------------------------------------------ what is chosen

  const last = () => data.steps.length - 1;
  const now = () => Math.min(state.at ?? last(), last());
  const nearest = (step) => {
    const found = data.steps.findIndex((each) => each >= step);
    if (found < 0) return last();
    return found > 0 && step - data.steps[found - 1] < data.steps[found] - step ? found - 1 : found;
  };
  const statistics = () => Object.keys(data.fields).filter((name) => numbers.has(name));
  const statistic = () => (numbers.has(state.by) ? state.by : numbers.has(data.statistic) ? data.statistic : statistics()[0]);

  // The address has it, so that a reader can go back, and send what is seen.
  const address = () => {
    const parts = [`head=${state.layer}.${state.head}`, state.by && `by=${state.by}`, state.at != null && `step=${data.steps[now()]}`];
    return `#${parts.filter(Boolean).join("&")}`;
  };
  function readAddress() {
    const given = new URLSearchParams(location.hash.slice(1));
    const [layer, number] = (given.get("head") || "").split(".").map(Number);
    const there = layer in data.layers && number < data.layers[layer].heads;
    Object.assign(state, there ? { layer, head: number } : data.worst);
    const by = given.get("by");
    state.by = by === "verdict" || numbers.has(by) ? by : null;
    state.at = given.has("step") && data.steps.length ? nearest(Number(given.get("step"))) : null;
    if (state.at === last()) state.at = null;
  }

  function choose(change) {
    const step = "at" in change;
    Object.assign(state, change);
    if (state.at === last()) state.at = null;
    // A step is passed through; a head or a statistic is somewhere that one can go back to.
    if (address() !== location.hash) history[step ? "replaceState" : "pushState"](null, "", address());
    parts.forEach((part) => ("by" in change ? part.draw() : part.move()));
  }

  const draw = () => parts.forEach((part) => part.draw());
  // keep: false turns to another run, of which nothing is chosen yet.
  async function show(given, keep = true) {
    const step = state.at == null ? null : data.steps[now()];
    await take(given);
    state.at = keep && step != null ? nearest(step) : null;
    document.getElementById("recorded").hidden = !data.worst;
    words();
    if (!data.worst) return;
    if (!show.begun) {
      show.begun = true;
      readAddress();
      addEventListener("popstate", () => { readAddress(); draw(); });
      Draw.onChange(draw);
    }
    if (!keep || !(state.layer in data.layers) || state.head >= data.layers[state.layer].heads) Object.assign(state, data.worst);
    draw();
  }

  // ------------------------------------------------------------ the words on top

  const { el, fill } = LH;
  function words() {
    fill("about", data.about);
    fill("made", data.made);
    fill("following", data.following ? ` · ${data.following}` : "");
    fill("last", data.steps.length ? String(data.steps[last()]) : "none yet");
    fill("thinned", data.thinned ? `· ${data.thinned}` : "");
    if (!data.worst) fill("headline", data.headline);
  }
  function move() {
    fill("headline", data.headlines[now()]);
    fill("findings", data.said[now()].map((which) => data.told[which]).map((finding) =>
      el("li", {}, mark(finding.mark), el("p", {}, finding.text))));
  }
  // As tall as the longest headline, so that nothing below it jumps while the steps go by.
  function reserve() {
    const node = document.getElementById("headline");
    node.style.minHeight = "";
    node.textContent = data.headlines.reduce((a, b) => (b.length > a.length ? b : a), "");
    node.style.minHeight = `${node.offsetHeight}px`;
    move();
  }
  parts.push({ draw: reserve, move });

  // Options that have not changed stay: a list that is open would close.
  function pick(id, options, chosen, onChange) {
    const key = JSON.stringify(options), node = document.getElementById(id);
    if (node.kept !== key) LH.select(id, options, chosen, onChange);
    node.kept = key;
    node.value = chosen;
  }

  const mark = (verdict) => el("span", { class: `mark ${verdict}`, "aria-hidden": "true" }, data.legend[verdict].letter);
  const loud = (level) => !["info", "ok"].includes(level);
  const named = ({ verdict, level }) => (loud(level) ? `${verdict} (${level})` : verdict);

  return {
    state, choose, show, pick, add: (part) => parts.push(part), mark, named, nearest, now, last, statistic, statistics,
    place, value, line, code, head, judged, order, has: (name) => numbers.has(name),
    get data() { return data; }, get heads() { return heads; },
  };
})();
