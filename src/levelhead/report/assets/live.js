// Follows a run: asks its server every second for what is new.
(() => {
  const PACE = 1000; // milliseconds
  const known = { generation: "", have: 0, stamp: "" };
  const note = LH.el("p", { class: "note", role: "status", id: "note", hidden: true });
  document.querySelector("header").append(note);
  const say = (words) => { if (note.textContent !== words) { note.textContent = words; note.hidden = !words; } };

  async function look() {
    try {
      const answer = await fetch(`data?${new URLSearchParams(known)}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const { note: words, data, generation, stamp } = await answer.json();
      say(words);
      if (data) {
        const same = known.run === undefined || known.run === data.run;
        await Run.show(data, same);
        Object.assign(known, { generation, stamp, have: data.steps.length, run: data.run });
        document.title = data.title ? `Live: ${data.title}` : document.title;
      }
    } catch {
      say("levelhead live does not answer: it was ended, or this machine is busy. This is what was last seen.");
    }
    setTimeout(look, PACE);
  }
  LH.fill("headline", "No run is recorded yet.");
  say("Reading …");
  look();
})();
