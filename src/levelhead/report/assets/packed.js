// Numbers that _packed.py has put into little room.
const Packed = (() => {
  const bytes = async (text) => new Uint8Array(await LH.inflate(text));

  // Both give point after point, each with all heads, so that more points can follow.
  async function codes(text, points, heads) {
    const from = await bytes(text), into = new Uint8Array(points * heads);
    for (let head = 0; head < heads; head++) {
      for (let at = 0; at < points; at++) into[at * heads + head] = from[head * points + at];
    }
    return into;
  }

  async function floats(text, points, heads) {
    const from = await bytes(text), size = points * heads, bits = new Uint32Array(size);
    for (let head = 0; head < heads; head++) {
      for (let at = 0, sum = 0; at < points; at++) {
        const i = head * points + at;
        sum = (sum + ((from[i] << 16) | (from[size + i] << 8) | from[2 * size + i])) & 0xffffff;
        bits[at * heads + head] = sum << 8;
      }
    }
    return new Float32Array(bits.buffer);
  }

  return { codes, floats };
})();
