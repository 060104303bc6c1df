/* What windows and recurrent layers keep of a node, as strips in its box and in words. */

const NUM_PLACES = 4;        // of ranges and positions of a node in words, the last ones

/** The kinds of groups beside full attention that the nodes have, and what else strips show. */
function stripKinds() {
  const nodes = state.root.engine.nodes;
  return {
    windows: nodes.some(({ windows }) => windows),
    states: nodes.some(({ states }) => states),
    useless: nodes.some((data) =>
      data.windows && data.states?.positions.some((at) => !mayEnd(data, at))),
    unlisted: nodes.some(({ windows, states, hit_ends: ends }) =>
      [windows, states, ends].some((listed) => listed?.left_out > 0)),
  };
}

function stripLegend() {
  const kinds = stripKinds();
  if (!kinds.windows && !kinds.states) return [];
  const item = (sign, text) => {
    const entry = document.createElement("li");
    const picture = document.createElement("span");
    picture.className = `strip-sign ${sign}`;
    entry.append(picture, text);
    return entry;
  };
  const items = [];
  if (kinds.windows) items.push(item("kept", "kept by all windows"), item("hole", "hole"));
  if (kinds.windows && !kinds.states) items.push(item("end", "a hit may end here"));
  if (kinds.states) items.push(item("tick", "state: a hit may end here"));
  if (kinds.useless) items.push(item("tick useless", "state whose window has a hole"));
  if (kinds.unlisted) items.push(item("unlisted", "not listed"));
  return items;
}

// Strips: a node's own tokens from left to right, whatever follows it. `windows.kept` are ranges
// of tokens; `states.positions` and `hit_ends.ranges` are numbers of tokens, both ends included.

/** Does nothing if the strips are right already: the pointer may be on one. */
function paintStrips(strips, node) {
  const { windows, states, hit_ends: ends } = node.data;
  const picture = JSON.stringify([node.start, node.own, windows, states, ends]);
  if (strips.picture === picture) return;
  strips.picture = picture;
  const rows = [];
  const row = (kind, marks) => {
    const strip = document.createElement("div");
    strip.className = `strip ${kind}`;
    strip.append(...marks.filter(Boolean));
    rows.push(strip);
  };
  if (windows) row("windows", windowMarks(node, windows));
  if (states) {
    const first = states.left_out ? unlisted(node, states.positions[0] - 1) : null;
    row("states", [first, ...states.positions.map((at) => tick(node, at))]);
  } else {
    const first = ends.left_out ? unlisted(node, ends.ranges[0][0] - 1) : null;
    row("ends", [first, ...ends.ranges.map(([from, to]) => mark(node, "end", from - 1, to,
      `A hit may end after ${places(node, [[from, to]])} tokens`))]);
  }
  strips.replaceChildren(...rows);
}

function windowMarks(node, { kept, left_out: leftOut }) {
  const marks = [];
  let at = 0;
  for (const [from, to] of [...kept, [node.own, node.own]]) {
    if (at === 0 && leftOut) marks.push(unlisted(node, from));
    else if (from > at) marks.push(mark(node, "hole", at, from, `Hole: ${tokensAt(node, at, from)}`));
    if (to > from) {
      marks.push(mark(node, "kept", from, to, `Kept by all windows: ${tokensAt(node, from, to)}`));
    }
    at = to;
  }
  return marks;
}

function tick(node, at) {
  const useful = mayEnd(node.data, at);
  const element = mark(node, useful ? "tick" : "tick useless", at, at,
    `State after ${number(node.start + at)} tokens: ${useful ? "a hit may end here" : "a window before it has a hole"}`);
  element.style.width = "";
  return element;
}

function unlisted(node, to) {
  return mark(node, "unlisted", 0, to, `${tokensAt(node, 0, to)}: not listed`);
}

function mark(node, kind, from, to, title) {
  const element = document.createElement("div");
  element.className = kind;
  element.title = title;
  element.style.left = `${100 * from / node.own}%`;
  element.style.width = `${100 * (to - from) / node.own}%`;
  return element;
}

function mayEnd(data, position) {
  return data.hit_ends.ranges.some(([first, last]) => first <= position && position <= last);
}

function tokensAt(node, from, to) {
  return `tokens ${number(node.start + from)} to ${number(node.start + to)}`;
}

/** The last of some ranges or positions of a node in words, counted from the prompt's start. */
function places(node, ranges, leftOut = 0) {
  const words = ranges.slice(-NUM_PLACES).map(([from, to]) => from === to
    ? number(node.start + from) : `${number(node.start + from)} to ${number(node.start + to)}`);
  if (leftOut || ranges.length > NUM_PLACES) words.unshift("…");
  return words.join(", ");
}

/** [name, value] pairs of what windows and states keep, and of where a hit may end. */
function keptFacts(node) {
  const { windows, states, hit_ends: ends } = node.data;
  const facts = [];
  const isAll = ([first, ...others], from) =>
    first !== undefined && !others.length && first[0] === from && first[1] === node.own;
  if (windows) {
    facts.push(["Blocks of windows", number(windows.num_blocks)]);
    facts.push(["Kept by windows", isAll(windows.kept, 0) ? "all"
      : places(node, windows.kept, windows.left_out) || "nothing"]);
  }
  if (states) {
    facts.push(["Blocks of states", number(states.num_blocks)]);
    facts.push(["States at", places(node, states.positions.map((at) => [at, at]), states.left_out)
      || "none"]);
  }
  if (ends) {
    const isAtAllStates = states
      && ends.ranges.length + ends.left_out === states.positions.length + states.left_out;
    facts.push(["A hit may end", !ends.ranges.length ? "nowhere" : isAll(ends.ranges, 1) ? "anywhere"
      : isAtAllStates ? "at these states" : `at ${places(node, ends.ranges, ends.left_out)}`]);
  }
  return facts;
}
