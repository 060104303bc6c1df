/* Everything around the boxes of the tree: space, curves, programs, legend, and the table. */

const NUM_TOP_ROWS = 8;

const READING = "Each box is a run of tokens, and the boxes below it continue it. "
  + "×3: it was found in the cache three times. 12 s: the time since its last use.";
const TEXT_IS_OFF = " Shared by 2: two cached sequences go through it. This server does not show the "
  + "text of prompts. With --plugin-config tree_text=true, everyone with its API key can read it here.";

function draw() {
  const { index } = state.root;
  if (!index.has(state.zoom)) state.zoom = "root";
  if (!index.has(state.focus)) state.focus = state.zoom;
  if (state.hover !== null && !index.has(state.hover)) state.hover = null;
  drawSummary();
  drawSpace();
  drawHistory();
  drawPrograms();
  drawTree();
  drawLegend();
  drawDetails();
  drawTop();
}

function drawSummary() {
  const { engine } = state.root;
  const facts = [plural(engine.num_tokens, "token"), plural(engine.num_nodes, "node")];
  if (engine.policy) facts.push(`evicts by ${engine.policy.toUpperCase()}`);
  if (engine.block_size) facts.push(`blocks of ${plural(engine.block_size, "token")}`);
  byId("summary").textContent = facts.join(" · ");
}

/** [class, name, blocks] of everything that blocks can be, as far as the server says. */
function spaceParts(engine) {
  const { num_blocks: held = 0, num_protected_blocks: kept, total_blocks: total } = engine;
  const parts = [];
  if (kept === undefined) {
    parts.push(["cached", "cached", held]);
  } else {
    const pinned = Math.min(engine.num_pinned_blocks ?? 0, kept);
    parts.push(["used", "in use", kept - pinned], ["pinned", "pinned", pinned]);
    parts.push(["evictable", "evictable", engine.num_evictable_blocks ?? held - kept]);
  }
  if (total !== undefined && engine.free_blocks !== undefined) {
    const other = Math.max(0, total - engine.free_blocks - held);
    parts.push(["other", "in use, not in the tree yet", other]);
    parts.push(["free", "free", engine.free_blocks]);
  }
  return parts;
}

function drawSpace() {
  const { engine } = state.root;
  const parts = spaceParts(engine);
  const sum = Math.max(1, parts.reduce((total, part) => total + part[2], 0));
  const share = (blocks) => `${blocks === 0 || blocks === sum ? Math.round(100 * blocks / sum)
    : Math.min(99.9, Math.max(.1, 100 * blocks / sum)).toFixed(1)}%`;
  const bar = byId("space");
  if (bar.childElementCount !== parts.length) {
    bar.replaceChildren(...parts.map(() => document.createElement("div")));
  }
  parts.forEach(([kind, name, blocks], i) => {
    bar.children[i].className = `fill-${kind}`;
    bar.children[i].style.width = `${100 * blocks / sum}%`;
    bar.children[i].title = `${name}: ${plural(blocks, "block")}`;
  });
  bar.setAttribute("aria-label",
    parts.map(([, name, blocks]) => `${plural(blocks, "block")} ${name}`).join(", "));
  const known = engine.total_blocks !== undefined;
  byId("space-total").textContent = known
    ? `${plural(engine.total_blocks, "block")}`
      + (engine.block_size ? `, room for ${plural(engine.total_blocks * engine.block_size, "token")}` : "")
    : "the size of the cache is not known";
  const facts = parts.filter((part) => part[0] !== "other" || part[2] > 0)
    .map(([kind, name, blocks]) => fact(`fill-${kind}`, name, known
      ? `${number(blocks)} (${share(blocks)})` : number(blocks)));
  const { isolated } = engine;
  if (isolated && isolated.num_tokens > 0) {
    facts.push(fact("fill-isolated", `of isolated ${isolated.namespaces === 1 ? "tenant" : "tenants"}, `
      + "part of the above", number(isolated.num_blocks)));
  }
  byId("space-facts").replaceChildren(...facts);
}

const charts = CHARTS.map((spec) => new Chart(spec));
byId("charts").append(...charts.map((chart) => chart.element));

function drawHistory() {
  const { samples } = state.history;
  byId("over-time").hidden = !samples.length;
  if (!samples.length) return;
  const end = samples.at(-1).at;
  const begin = Math.min(samples[0].at, end - SHORTEST_AXIS_MS);
  byId("over-time-span").textContent = "totals since the server's start, curves since this page was opened"
    + (state.engines.length > 1 ? "; all engines together" : "");
  const steps = state.history.steps();
  for (const chart of charts) chart.draw(steps, begin, samples.at(-1));
}

const STATES = {
  running: "running", in_tool: "in a tool", waiting_for_person: "waiting for a person",
  unknown: "unknown", ended: "ended",
};

function drawPrograms() {
  const { programs, admission } = state.root.engine;
  byId("programs").hidden = !programs;
  if (!programs) return;
  byId("programs-facts").replaceChildren(...Object.entries(STATES).map(([key, name]) =>
    fact(null, name, number(programs[key]))));
  const tools = (programs.tools ?? []).map(({ name, num_contexts: count, longest_s: longest }) =>
    `${name} ${number(count)} (up to ${duration(longest)})`);
  for (const key of ["waiting_for_person", "unknown"]) byId(`programs-${key}`).hidden = !programs[key];
  const longest = programs.longest_in_tool_s;
  showText(byId("programs-tools"), longest == null ? null
    : `In tools: ${tools.join(", ") || `up to ${duration(longest)}`}`);
  showText(byId("programs-turns"), admission?.again_per_new ? turnsOf(admission) : null);
}

function turnsOf({ holding_s: since, held, hold_s: hold, again_per_new: again, kept_tokens: kept }) {
  const recomputed = `${decimal.format(again)} tokens recomputed per new one`;
  if (!since) return `Agents do not take turns: ${recomputed}`;
  return `Agents have taken turns for ${duration(since)}: ${plural(held, "request")} held back, `
    + `for up to ${decimal.format(hold)} s each; ${recomputed}; `
    + `${number(kept)} cached tokens read while taking turns, since start`;
}

function contextOf({ state: kind, paused_s: paused, tool }) {
  return `${STATES[kind] ?? kind}${tool == null ? "" : ` (${tool})`}, ${duration(paused)}`;
}

function drawLegend() {
  const nodes = [...state.root.index.values()];
  const hasContinuedPin = nodes.some((node) => node.isBelowPin);
  const hasText = nodes.some(({ data }) => data.text !== undefined);
  showText(byId("reading"), READING + (hasText ? "" : TEXT_IS_OFF));
  const items = [];
  if (state.colour === "use") {
    items.push(fact("fill-used", "in use by running requests"),
      fact("fill-pinned", hasContinuedPin ? "pinned; pale above what continues it" : "pinned"));
    if (hasContinuedPin) items.push(fact("fill-below-pin", "continues a pin, is not pinned itself"));
    items.push(fact("fill-evictable", "evictable"));
  } else {
    const item = document.createElement("li");
    const scale = document.createElement("span");
    scale.className = "scale";
    scale.dataset.of = state.colour;
    const [from, to] = state.colour === "hits" ? ["no hits", "most hits"] : ["just used", "oldest"];
    item.append(from, scale, to);
    items.push(item);
  }
  items.push(fact("fill-wanted", "wanted by a waiting request"));
  if (nodes.some(({ kind }) => kind === "group")) {
    items.push(fact("fill-several", "smaller prefixes as one box: click to see them apart"));
  }
  if (byId("tree").querySelector(".rest")) {
    items.push(fact("fill-rest", "prefixes too narrow for a box each: click to zoom in"));
  }
  if (nodes.some(({ kind }) => kind === "isolated")) {
    items.push(fact("fill-isolated", "requests with a cache_salt, as one total"));
  }
  items.push(...stripLegend());
  byId("legend").replaceChildren(...items);
}

function drawTop() {
  const saved = (node) => node.own * (node.data.hits ?? 0);
  const best = [...state.root.index.values()].filter((node) => node.kind === "node" && saved(node) > 0)
    .sort((a, b) => saved(b) - saved(a)).slice(0, NUM_TOP_ROWS);
  byId("top").hidden = best.length === 0;
  const body = byId("top-rows");
  while (body.childElementCount > best.length) body.lastElementChild.remove();
  while (body.childElementCount < best.length) {
    const row = body.insertRow();
    for (let i = 0; i < 6; i++) row.insertCell();
    row.cells[0].append(document.createElement("button"));
  }
  best.forEach((node, i) => {
    const { cells } = body.rows[i];
    const button = cells[0].firstElementChild;
    button.type = "button";
    button.dataset.key = node.key;
    button.textContent = textOf(node) || `tokens ${number(node.start)} to ${number(node.start + node.own)}`;
    [number(node.own), number(node.data.hits), number(saved(node)),
      node.data.age_s == null ? "?" : shortAge(node.data.age_s), useOf(node)]
      .forEach((value, column) => { cells[column + 1].textContent = value; });
  });
}
