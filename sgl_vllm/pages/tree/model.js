/* The answer's list as a tree whose nodes keep their keys. */

const MOST_SIBLINGS = 60;    // beyond, the smallest are one group that can be zoomed into

let lastKey = 0;

function modelNode(kind, parent, data) {
  return {
    kind, parent, data, key: null, children: [],
    own: data.num_tokens ?? 0,     // its own tokens
    start: 0,                      // tokens before it
    subtree: 0,                    // its own and all below
    numBelow: 0,                   // nodes of the answer below it
    numSequences: 0,               // that begin with it: the leaves below
    isBelowPin: false,             // continues a pinned node, and is not pinned
    usedAt: data.age_s == null ? null : Date.now() - data.age_s * 1000,
    use: "evictable",
  };
}

/** Parents come before children in `engine.nodes`; nodes that were there in `before` keep keys. */
function buildModel(engine, before) {
  const root = modelNode("root", null, {});
  root.engine = engine;
  const several = engine.nodes.some((data) => data.namespace > 0);
  const spaces = new Map();
  const nodes = [];
  for (const data of engine.nodes) {
    let parent = nodes[data.parent];
    if (data.parent == null) {
      parent = root;
      if (several) {
        if (!spaces.has(data.namespace)) {
          const space = modelNode("space", root, {});
          space.number = data.namespace;
          spaces.set(data.namespace, space);
          root.children.push(space);
        }
        parent = spaces.get(data.namespace);
      }
    }
    const node = modelNode("node", parent, data);
    node.start = parent.start + parent.own;
    parent.children.push(node);
    nodes.push(node);
  }
  for (const node of nodes.toReversed()) finish(node);
  for (const node of nodes) markBelowPin(node);
  for (const space of spaces.values()) finish(space);
  if (engine.isolated && engine.isolated.num_tokens > 0) {
    const isolated = modelNode("isolated", root, engine.isolated);
    root.children.push(isolated);
    finish(isolated);
  }
  finish(root);
  keepKeys(root, before);
  return root;
}

/** What follows from the children. Many of them: the smallest become one group. */
function finish(node) {
  for (const child of node.children) {
    node.subtree += child.subtree;
    node.numBelow += child.numBelow + (child.kind === "node" ? 1 : 0);
    node.numSequences += child.numSequences;
  }
  node.numSequences ||= 1;
  node.subtree += node.own;
  const { num_pinned_blocks: pinned = 0, num_locked_blocks: locked = 0, num_blocks } = node.data;
  const uses = node.children.map((child) => child.use);
  const below = (use) => num_blocks === 0 && uses.includes(use);
  if (pinned > 0 || below("pinned")) node.use = "pinned";
  else if (locked > 0 || below("used")) node.use = "used";
  if (node.children.length > MOST_SIBLINGS) {
    const ordered = [...node.children].sort((a, b) => b.subtree - a.subtree);
    const small = new Set(ordered.slice(MOST_SIBLINGS * 0.75));
    const group = modelNode("group", node, {});
    group.start = node.start + node.own;
    group.children = node.children.filter((child) => small.has(child));
    group.numMembers = group.children.length;
    for (const child of group.children) child.parent = group;
    node.children = [...node.children.filter((child) => !small.has(child)), group];
    finish(group);
  }
}

/** Call it for parents before their children. */
function markBelowPin(node) {
  let { parent } = node;
  while (parent.kind === "group") parent = parent.parent;
  node.isBelowPin = node.use !== "pinned" && (parent.use === "pinned" || parent.isBelowPin);
}

/**
 * The answer has no names for nodes, so a node is the one of before that it looks most like among
 * the children of the same parent: the same tokens and the same last use, or else the same tokens
 * and no fewer hits. What is not found is new. Linear in nodes.
 */
function keepKeys(root, before) {
  root.key = "root";
  root.index = new Map();
  const waiting = [[root, before]];
  while (waiting.length) {
    const [node, old] = waiting.pop();
    root.index.set(node.key, node);
    const free = new Map();
    for (const child of old ? old.children : []) {
      const alike = lookOf(child);
      if (!free.has(alike)) free.set(alike, []);
      free.get(alike).push(child);
    }
    const open = [];
    const take = (child, fits) => {
      const candidates = free.get(lookOf(child)) || [];
      const at = candidates.findIndex((candidate) => fits(candidate));
      if (at < 0) return false;
      const [found] = candidates.splice(at, 1);
      child.key = found.key;
      waiting.push([child, found]);
      return true;
    };
    for (const child of node.children) {
      const same = (old) => child.usedAt === null || Math.abs(child.usedAt - old.usedAt) < 1000;
      if (!take(child, same)) open.push(child);
    }
    for (const child of open) {
      if (take(child, (old) => (child.data.hits ?? 0) >= (old.data.hits ?? 0))) continue;
      child.key = child.kind === "node" ? `n${++lastKey}` : `${child.kind}-${child.number ?? node.key}`;
      waiting.push([child, null]);
    }
  }
}

function lookOf(node) {
  if (node.kind === "node") return node.data.id ?? `${node.own} ${node.data.namespace}`;
  return `${node.kind} ${node.number ?? ""}`;
}

function pathTo(node) {
  const path = [];
  for (let at = node; at; at = at.parent) path.unshift(at);
  return path;
}
