/* What is shown in which case: the tree, a form for the key, or why there is nothing. */

function setStatus(kind, text) {
  const status = byId("status");
  status.dataset.state = kind;
  if (status.textContent !== text) status.textContent = text;
}

function showNotice(title, text) {
  byId("notice-title").textContent = title;
  byId("notice-text").textContent = text;
  byId("key-form").hidden = true;
  byId("notice").hidden = false;
  byId("view").hidden = true;
  byId("summary").textContent = "";
  setStatus("waiting", state.paused ? "Paused" : "Waiting");
}

function showKeyForm() {
  const wasThere = !byId("key-form").hidden;
  showNotice("API key needed", "This server was started with --api-key. The key stays in this tab, "
    + "and is gone when the tab is closed.");
  byId("key-refused").hidden = !state.keyWasTried;
  byId("key-form").hidden = false;
  setStatus("waiting", "Locked");
  storeKey(null);
  if (!wasThere || state.keyWasTried) {
    byId("key").value = "";
    byId("key").focus();
  }
  state.keyWasTried = false;
}

function showGone(error) {
  const since = state.answeredAt
    ? ` since ${new Date(state.answeredAt).toLocaleTimeString()}` : "";
  const reached = error instanceof Error && error.message.startsWith("the server answered");
  const what = reached ? error.message : "no answer";
  if (state.root && !byId("view").hidden) byId("view").classList.add("stale");
  else showNotice("No answer from the server",
    reached ? `The server answers, but not with the tree (${error.message}). Trying again.`
      : "It may be starting, busy or gone. Trying again.");
  setStatus("gone", `${what[0].toUpperCase()}${what.slice(1)}${since}`);
}

function show() {
  byId("key-form").hidden = true;
  showEngineChoice();
  const engine = state.engines[state.engine];
  if (!engine || engine.nodes === undefined) {
    state.root = null;
    showNotice("The tree is off", whyOff());
    return setLive();
  }
  state.root = buildModel(engine, state.root);
  const isolated = engine.isolated || {};
  if (!engine.nodes.length && !isolated.num_tokens && !engine.num_tokens) {
    showNotice("Nothing is cached yet", "Prefixes of requests appear here as soon as they are "
      + "computed. This page looks again every few seconds.");
    state.zoom = state.focus = "root";
  } else {
    byId("notice").hidden = true;
    byId("view").hidden = false;
    byId("view").classList.remove("stale");
    draw();
  }
  setLive();
}

function setLive() {
  if (state.paused) setStatus("waiting", "Paused");
  else setStatus("live", `Live, ${new Date(state.answeredAt).toLocaleTimeString()}`);
}

function whyOff() {
  const reason = state.stats?.parts?.radix;
  return "The part “radix” is off in this engine"
    + (reason && reason !== "on" ? `: ${reason}.` : ". /v1/sgl/stats may say why.");
}

function showEngineChoice() {
  const select = byId("engine");
  byId("engine-choice").hidden = state.engines.length < 2;
  if (select.options.length === state.engines.length) return;
  select.replaceChildren(...state.engines.map((_, i) => new Option(String(i), String(i))));
  state.engine = Math.max(0, Math.min(state.engine, state.engines.length - 1));
  select.value = String(state.engine);
}
