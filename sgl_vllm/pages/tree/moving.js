/* Pointer, keyboard and controls. The last script: it asks the server for the first time. */

function zoomTo(key) {
  const node = state.root.index.get(key);
  if (!node || node.kind === "isolated") return;
  state.zoom = state.focus = key;
  draw();
}

function zoomOut() {
  const { parent } = state.root.index.get(state.zoom);
  if (parent) zoomTo(parent.key);
}

function focusOn(node) {
  if (!node || !drawn.has(node.key)) return;
  state.focus = node.key;
  state.hover = null;
  for (const [key, element] of drawn) element.tabIndex = key === node.key ? 0 : -1;
  drawn.get(node.key).focus();
  drawDetails();
}

function keyed(event) {
  return event.target instanceof Element ? event.target.closest("[data-key]") : null;
}

function hover(key) {
  if (key === state.hover || !state.root) return;
  drawn.get(state.hover)?.classList.remove("chosen");
  state.hover = key !== null && state.root.index.has(key) ? key : null;
  drawn.get(state.hover)?.classList.add("chosen");
  drawDetails();
}

byId("tree").addEventListener("click", (event) => {
  const element = keyed(event);
  if (!element) return;
  const key = element.classList.contains("rest")
    ? element.dataset.key.split(" ")[0] : element.dataset.key;
  zoomTo(key);
});
byId("tree").addEventListener("pointerover", (event) => hover(keyed(event)?.dataset.key ?? null));
byId("tree").addEventListener("pointerleave", () => hover(null));
byId("tree").addEventListener("focusin", (event) => {
  const node = state.root?.index.get(keyed(event)?.dataset.key);
  if (node && node.key !== state.focus) focusOn(node);
});
byId("tree").addEventListener("keydown", (event) => {
  const node = state.root?.index.get(keyed(event)?.dataset.key);
  if (!node) return;
  const siblings = (node.parent?.children ?? [node]).filter((other) => drawn.has(other.key));
  const at = siblings.indexOf(node);
  const moves = {
    ArrowDown: () => focusOn(node.children.find((child) => drawn.has(child.key))),
    ArrowUp: () => focusOn(node.parent),
    ArrowRight: () => focusOn(siblings[at + 1]),
    ArrowLeft: () => focusOn(siblings[at - 1]),
    Home: () => focusOn(siblings[0]),
    End: () => focusOn(siblings.at(-1)),
    Enter: () => { zoomTo(node.key); focusOn(node); },
    " ": () => { zoomTo(node.key); focusOn(node); },
  };
  if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  moves[event.key]();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !state.root || byId("view").hidden) return;
  const inTree = byId("tree").contains(document.activeElement);
  zoomOut();
  if (inTree) focusOn(state.root.index.get(state.zoom));
});
byId("zoom-out").addEventListener("click", zoomOut);
byId("top-rows").addEventListener("click", (event) => {
  const button = keyed(event);
  if (button) zoomTo(button.dataset.key);
});
byId("top-rows").addEventListener("pointerover", (event) => hover(keyed(event)?.dataset.key ?? null));
byId("top-rows").addEventListener("pointerleave", () => hover(null));
byId("colour").addEventListener("change", (event) => {
  state.colour = event.target.value;
  if (state.root) draw();
});
byId("engine").addEventListener("change", (event) => {
  state.engine = Number(event.target.value);
  state.root = null;
  state.zoom = state.focus = "root";
  show();
});
byId("more").addEventListener("click", () => {
  state.maxNodes = 4 * Math.max(1, state.root.engine.nodes.length);
  refresh();
});
byId("pause").addEventListener("click", () => {
  state.paused = !state.paused;
  byId("pause").textContent = state.paused ? "Resume" : "Pause";
  byId("pause").setAttribute("aria-pressed", String(state.paused));
  if (state.paused) {
    plan();
    setStatus("waiting", "Paused");
  } else {
    refresh();
  }
});
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  storeKey(byId("key").value.trim());
  state.keyWasTried = true;
  refresh();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) plan();
  else if (!state.paused && byId("key-form").hidden) refresh();
});

let lastWidth = 0;
new ResizeObserver(([{ contentRect }]) => {
  if (contentRect.width === lastWidth || !contentRect.width) return;
  lastWidth = contentRect.width;
  if (state.root) drawTree();
}).observe(byId("tree"));

refresh();
