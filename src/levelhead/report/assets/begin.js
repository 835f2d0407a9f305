// A page of its own has all its numbers; a live one asks for them (live.js).
Run.show(LH.data);
