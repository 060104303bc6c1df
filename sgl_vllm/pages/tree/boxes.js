/* The boxes of the tree. */

const ROW_PX = 34;
const STRIPS_PX = 13;        // rows are so much higher if nodes keep states
const STRIPS_FROM_PX = 24;   // narrower nodes have no strips
const THINNEST_PX = 2;       // narrower nodes are drawn together

const drawn = new Map();   // key -> element, kept from one drawing to the next

/** The zoomed node and its ancestors are as wide as the picture; what is below shares its width. */
function drawTree() {
  const tree = byId("tree");
  const rowPx = ROW_PX + (hasStates() ? STRIPS_PX : 0);
  byId("view").classList.toggle("with-strips", rowPx > ROW_PX);
  tree.style.setProperty("--row", `${rowPx}px`);
  const width = tree.clientWidth;
  const zoomed = state.root.index.get(state.zoom);
  const boxes = [];
  const path = pathTo(zoomed);
  path.forEach((node, depth) => boxes.push({ node, depth, left: 0, width, above: node !== zoomed }));
  const waiting = [boxes.at(-1)];
  let numRows = path.length;
  while (waiting.length) {
    const box = waiting.pop();
    const scale = box.width / Math.max(1, box.node.subtree);
    let left = box.left;
    let rest = null;
    const depth = box.depth + 1;
    for (const child of box.node.children) {
      const childWidth = child.subtree * scale;
      if (childWidth >= THINNEST_PX) {
        const childBox = { node: child, depth, left, width: childWidth, above: false };
        boxes.push(childBox);
        waiting.push(childBox);
        rest = null;
      } else if (rest) {
        rest.width += childWidth;
        rest.count += 1;
      } else {
        rest = { node: box.node, depth, left, width: childWidth, above: false, count: 1,
          key: `${box.node.key} rest ${left.toFixed(0)}` };
        boxes.push(rest);
      }
      left += childWidth;
      numRows = Math.max(numRows, depth + 1);
    }
  }
  const stays = new Set();
  let hottest = 1, oldest = 1;
  for (const data of state.root.engine.nodes) {
    hottest = Math.max(hottest, data.hits ?? 0);
    oldest = Math.max(oldest, data.age_s ?? 0);
  }
  for (const box of boxes) {
    const key = box.key ?? box.node.key;
    stays.add(key);
    let element = drawn.get(key);
    if (!element) {
      element = nodeElement();
      drawn.set(key, element);
      tree.append(element);
    }
    paint(element, box, key, rowPx, hottest, oldest);
  }
  for (const [key, element] of drawn) {
    if (stays.has(key)) continue;
    if (element === document.activeElement) state.focus = state.zoom;
    element.remove();
    drawn.delete(key);
  }
  if (!stays.has(state.focus)) state.focus = state.zoom;
  for (const [key, element] of drawn) element.tabIndex = key === state.focus ? 0 : -1;
  tree.style.height = `${numRows * rowPx}px`;
  byId("zoom-out").hidden = state.zoom === "root";

  const { engine } = state.root;
  const leftOut = engine.nodes_left_out ?? Math.max(0, engine.num_nodes - engine.nodes.length);
  byId("left-out").hidden = leftOut === 0;
  byId("left-out-text").textContent = `${plural(leftOut, "node")} further from the root `
    + `${leftOut === 1 ? "is" : "are"} left out, so widths are too small there.`;
}

function nodeElement() {
  const element = document.createElement("div");
  element.className = "node";
  const label = document.createElement("span");
  label.className = "label";
  const meta = document.createElement("span");
  meta.className = "meta";
  const strips = document.createElement("div");
  strips.className = "strips";
  strips.setAttribute("aria-hidden", "true");   // the label says it in words
  element.append(label, meta, strips);
  return element;
}

function paint(element, box, key, rowPx, hottest, oldest) {
  const { node } = box;
  const isRest = box.count !== undefined;
  element.dataset.key = key;
  element.dataset.kind = node.kind;
  element.dataset.use = node.use;
  element.classList.toggle("thin", box.width < 12);
  element.classList.toggle("above", box.above);
  element.classList.toggle("rest", isRest);
  element.classList.toggle("chosen", key === state.hover);
  const showsUse = state.colour === "use" && !isRest;
  element.toggleAttribute("data-below-pin", showsUse && node.isBelowPin);
  const below = box.above ? 1 : 1 - node.own / Math.max(1, node.subtree);
  element.style.setProperty("--below", showsUse ? `${100 * below}%` : "0%");
  element.toggleAttribute("data-wanted", Boolean(node.data.wanted) && !isRest);
  element.style.left = `${box.left}px`;
  element.style.width = `${Math.max(1, box.width - (box.width > 8 ? 2 : 0.5))}px`;
  element.style.top = `${box.depth * rowPx}px`;
  const [label, meta, strips] = element.children;
  const hasStrips = node.data.states && !isRest && box.width >= STRIPS_FROM_PX;
  element.toggleAttribute("data-strips", Boolean(hasStrips));
  if (hasStrips) paintStrips(strips, node);
  if (isRest) {
    element.setAttribute("aria-hidden", "true");
    element.title = `${plural(box.count, "small prefix").replace("prefixs", "prefixes")}: zoom in`;
    label.textContent = meta.textContent = "";
    return;
  }
  element.setAttribute("role", "treeitem");
  element.setAttribute("aria-level", String(box.depth + 1));
  element.setAttribute("aria-selected", String(key === state.zoom));
  element.setAttribute("aria-label", describe(node));
  paintColour(element, node, hottest, oldest);
  label.textContent = labelIn(node, box.width);
  meta.textContent = box.width < META_PX ? "" : metaOf(node);
}

function paintColour(element, node, hottest, oldest) {
  let hue = "", share = "";
  if (node.kind === "node" && state.colour === "hits") {
    hue = "var(--hot)";
    share = `${6 + 60 * Math.log1p(node.data.hits ?? 0) / Math.log1p(hottest)}%`;
  } else if (node.kind === "node" && state.colour === "age") {
    hue = "var(--recent)";
    share = `${66 - 60 * Math.log1p(node.data.age_s ?? oldest) / Math.log1p(oldest)}%`;
  }
  element.style.setProperty("--hue", hue);
  element.style.setProperty("--share", share);
  if (!hue) { element.style.removeProperty("--hue"); element.style.removeProperty("--share"); }
}
