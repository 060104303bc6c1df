/* What is said of a node: in its box, to a screen reader, and in the details. */

const LABEL_PX = 40;         // narrower nodes have no label
const SIZE_PX = 92;          // narrower nodes without text have only the number of their tokens
const META_PX = 190;         // narrower nodes have a label only

const HINTS = {
  root: "Point at a prefix for its numbers. Click to zoom in.",
  isolated: "Requests with a cache_salt share only with the same salt. Only their totals are shown.",
  space: "Namespaces share nothing with each other: a LoRA adapter has its own.",
};

function labelOf(node) {
  if (node.kind === "root") return "all prefixes";
  if (node.kind === "space") return `namespace ${node.number}`;
  if (node.kind === "group") return `${number(node.numMembers)} smaller`;
  if (node.kind === "isolated") return `isolated: ${plural(node.data.namespaces, "tenant")}`;
  return textOf(node) || (node.numSequences > 1
    ? `${plural(node.own, "token")} shared by ${number(node.numSequences)}`
    : plural(node.own, "token"));
}

function textOf(node) {
  return (node.data.text ?? "").replace(/\s+/g, " ").trim();
}

/** What a box of so many pixels has room for. */
function labelIn(node, width) {
  if (width < LABEL_PX) return "";
  if (node.kind !== "node" || textOf(node)) return labelOf(node);
  if (width < SIZE_PX) return number(node.own);
  return width < META_PX ? plural(node.own, "token") : labelOf(node);
}

function metaOf(node) {
  if (node.kind !== "node") return plural(node.subtree, "token");
  const facts = [];
  if (textOf(node)) facts.push(number(node.own));
  if (node.use === "pinned") facts.push("pinned");
  if (node.data.hits) facts.push(`×${number(node.data.hits)}`);
  if (node.data.age_s != null) facts.push(shortAge(node.data.age_s));
  return facts.join(" · ");
}

function useOf(node) {
  const { num_pinned_blocks: pinned, num_locked_blocks: locked, wanted } = node.data;
  const uses = [];
  if (node.use === "pinned") uses.push("pinned");
  if (node.use === "used" || (pinned > 0 && locked > pinned)) uses.push("in use");
  if (locked !== undefined && !uses.length) uses.push("evictable");
  if (wanted) uses.push("wanted");
  if (node.isBelowPin) uses.push("below a pin");
  return uses.join(", ");
}

/** [name, value] pairs for the details. */
function factsOf(node) {
  const { data } = node;
  if (node.kind === "isolated") {
    return [["Tenants", number(data.namespaces)], ["Tokens", number(data.num_tokens)],
      ["Nodes", number(data.num_nodes)], ["Blocks", number(data.num_blocks)]];
  }
  if (node.kind !== "node") {
    return [["Tokens", number(node.subtree)], ["Nodes", number(node.numBelow)]];
  }
  const facts = [
    ["Tokens", number(node.own)],
    ["Positions", `${number(node.start)} to ${number(node.start + node.own)}`],
    ["Hits", number(data.hits)],
    ["Last used", data.age_s == null ? "?" : ago(data.age_s)],
    ["Blocks", number(data.num_blocks)],
    ["Sequences", number(node.numSequences)],
  ];
  if (data.num_locked_blocks !== undefined) facts.push(["Locked blocks", number(data.num_locked_blocks)]);
  if (data.num_pinned_blocks !== undefined) facts.push(["Pinned blocks", number(data.num_pinned_blocks)]);
  facts.push(...stateFacts(node));
  if (data.context) facts.push(["Its program", contextOf(data.context)]);
  if (useOf(node)) facts.push(["Use", useOf(node)]);
  if (node.children.length) {
    facts.push(["Below it", `${plural(node.numBelow, "node")}, ${plural(node.subtree - node.own, "token")}`]);
  }
  return facts;
}

function describe(node) {
  const facts = factsOf(node).map(([name, value]) => `${name} ${value}`);
  return `${labelOf(node).slice(0, 80)}. ${facts.join(", ")}`;
}

function drawDetails() {
  const node = state.root.index.get(state.hover ?? state.focus);
  const title = { node: "Prefix", root: "All prefixes", group: "Smaller prefixes",
    isolated: "Isolated tenants" }[node.kind] ?? labelOf(node);
  byId("details-title").textContent = title;
  const facts = factsOf(node);
  const list = byId("details-facts");
  if (list.childElementCount !== 2 * facts.length) {
    list.replaceChildren(...facts.flatMap(() =>
      [document.createElement("dt"), document.createElement("dd")]));
  }
  facts.forEach(([name, value], i) => {
    list.children[2 * i].textContent = name;
    list.children[2 * i + 1].textContent = value;
  });
  showText(byId("details-hint"), HINTS[node.kind] ?? null);
  const { text, tokens } = node.data;
  const isCut = tokens !== undefined && tokens.length < node.own;
  showText(byId("details-text"), text === undefined ? null : text + (isCut ? " …" : ""));
}
