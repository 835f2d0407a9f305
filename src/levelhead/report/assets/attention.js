"use strict";
// One head's attention on the texts of the page, at any multiple of the scale in use. The scores are
// kept as their distance below the largest of their row, in few bits (report/_scores.py).
const Attention = (() => {
  const { pictures, codes } = LH.data;
  const known = pictures.flat().filter(Boolean);
  let floats = null, low = null, high = null;

  // How many numbers a head of a picture has.
  const columnsOf = (picture) => picture.columns + picture.groups;
  const floatsOf = (picture) => 1 + picture.rows * (1 + picture.groups);
  const codesOf = (picture) => picture.rows * (columnsOf(picture) + (picture.weights ? picture.columns : 0));

  const ready = LH.unpack("scores").then((buffer) => {
    const heads = (picture) => LH.data.layers[pictures.findIndex((row) => row.includes(picture))].heads.length;
    const total = known.reduce((sum, picture) => sum + heads(picture) * floatsOf(picture), 0);
    const size = (buffer.byteLength - 4 * total) / 2;
    floats = new Float32Array(buffer, 0, total);
    low = new Uint8Array(buffer, 4 * total, size);
    high = new Uint8Array(buffer, 4 * total + size, size);
  });

  // Distances below the row's largest score (NaN: hidden), those largest scores, and how many keys
  // each group beyond the corner has.
  const cache = new Map();
  function read(picture, head) {
    const key = `${picture.codes},${head}`;
    if (!cache.has(key)) {
      const { rows, columns, groups } = picture, wide = columns + groups;
      const start = picture.floats + head * floatsOf(picture), step = floats[start];
      let at = picture.codes + head * codesOf(picture);
      const code = () => low[at] | (high[at++] << 8);
      const gaps = Float32Array.from({ length: rows * wide }, () => {
        const level = code();
        return level ? codes.near * Math.expm1((level - 1) * step) : NaN;
      });
      const kept = picture.weights ? Float32Array.from({ length: rows * columns }, () => code() / codes.one) : null;
      const tops = floats.subarray(start + 1, start + 1 + rows);
      cache.set(key, { gaps, kept, tops, many: floats.subarray(start + 1 + rows, start + floatsOf(picture)) });
    }
    return cache.get(key);
  }

  // The weights of a row at a factor, groups beyond the corner last (the weight of one of their keys).
  function row(picture, { gaps, many }, at, factor, into) {
    const { columns, groups } = picture, wide = columns + groups;
    let sum = 0;
    for (let i = 0; i < wide; i++) {
      const gap = gaps[at * wide + i];
      into[i] = Number.isNaN(gap) ? 0 : Math.exp(-factor * gap);
      sum += i < columns ? into[i] : into[i] * many[at * groups + i - columns];
    }
    if (sum) for (let i = 0; i < wide; i++) into[i] /= sum;
  }

  // The weights of the corner, NaN where hidden; null where a scale's weights cannot be known.
  function weights(picture, head, factor) {
    const found = read(picture, head), { rows, columns } = picture, wide = columnsOf(picture);
    if (found.kept && factor !== 1) return null;
    const all = new Float32Array(rows * columns), line = new Float64Array(wide);
    for (let at = 0; at < rows; at++) {
      if (!found.kept) row(picture, found, at, factor, line);
      for (let i = 0; i < columns; i++) {
        const here = at * columns + i;
        all[here] = Number.isNaN(found.gaps[at * wide + i]) ? NaN : found.kept ? found.kept[here] : line[i];
      }
    }
    return all;
  }

  function scores(picture, head, factor) {
    const { gaps, tops } = read(picture, head), { rows, columns } = picture, wide = columnsOf(picture);
    return Float32Array.from({ length: rows * columns }, (_, i) => {
      const at = Math.floor(i / columns);
      return factor * (tops[at] - gaps[at * wide + (i % columns)]);
    });
  }

  // The share of a row's weight that goes to other keys, the mean over rows with a choice; null where
  // it cannot be known. The weights as trained are kept: they are the same at every factor.
  const before = new Map();
  function moved(layer, head, factor) {
    if (factor === 1) return 0;
    let rows = 0, sum = 0;
    for (const picture of (pictures[layer] ?? []).filter(Boolean)) {
      const found = read(picture, head), { columns, groups } = picture, wide = columns + groups;
      if (found.kept) return null;
      if (!before.has(found)) {
        const all = new Float32Array(picture.rows * wide);
        for (let at = 0; at < picture.rows; at++) row(picture, found, at, 1, all.subarray(at * wide, (at + 1) * wide));
        before.set(found, all);
      }
      const was = before.get(found), line = new Float64Array(wide);
      for (let at = 0; at < picture.rows; at++) {
        row(picture, found, at, factor, line);
        let seen = 0, distance = 0;
        for (let i = 0; i < wide; i++) {
          if (Number.isNaN(found.gaps[at * wide + i])) continue;
          const times = i < columns ? 1 : found.many[at * groups + i - columns];
          seen += times;
          distance += times * Math.abs(line[i] - was[at * wide + i]);
        }
        if (seen > 1) { rows += 1; sum += distance / 2; }
      }
    }
    return rows ? sum / rows : null;
  }

  return { ready, weights, scores, moved, isReady: () => floats !== null };
})();
