/* Where recurrent layers keep a state of a node, as a strip in its box and in words. */

const NUM_PLACES = 4;        // of states of a node in words, the last ones

function hasStates() {
  return state.root.engine.nodes.some(({ states }) => states);
}

function stripLegend() {
  const item = (sign, text) => {
    const entry = document.createElement("li");
    const picture = document.createElement("span");
    picture.className = `strip-sign ${sign}`;
    entry.append(picture, text);
    return entry;
  };
  const items = [];
  if (hasStates()) items.push(item("tick", "state: a hit may end here"));
  if (state.root.engine.nodes.some(({ states }) => states?.left_out > 0)) {
    items.push(item("unlisted", "not listed"));
  }
  return items;
}

/** A node's own tokens from left to right, whatever follows it. Does nothing if the strip is right
    already: the pointer may be on it. */
function paintStrips(strips, node) {
  const { positions, left_out: leftOut } = node.data.states;
  const picture = JSON.stringify([node.start, node.own, positions, leftOut]);
  if (strips.picture === picture) return;
  strips.picture = picture;
  const strip = document.createElement("div");
  strip.className = "strip states";
  if (leftOut) {
    strip.append(mark(node, "unlisted", 0, positions[0] - 1,
      `tokens ${number(node.start)} to ${number(node.start + positions[0] - 1)}: not listed`));
  }
  for (const at of positions) {
    const tick = mark(node, "tick", at, at, `State after ${number(node.start + at)} tokens`);
    tick.style.width = "";
    strip.append(tick);
  }
  strips.replaceChildren(strip);
}

function mark(node, kind, from, to, title) {
  const element = document.createElement("div");
  element.className = kind;
  element.title = title;
  element.style.left = `${100 * from / node.own}%`;
  element.style.width = `${100 * (to - from) / node.own}%`;
  return element;
}

/** [name, value] pairs of where a state is kept, counted from the prompt's start. */
function stateFacts(node) {
  const { states } = node.data;
  if (!states) return [];
  const words = states.positions.slice(-NUM_PLACES).map((at) => number(node.start + at));
  if (states.left_out || states.positions.length > NUM_PLACES) words.unshift("…");
  return [["States at", words.join(", ") || "none"]];
}
