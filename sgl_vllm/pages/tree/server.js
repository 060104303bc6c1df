/* What the page knows, and how it asks the server for it. */

const REFRESH_MS = 3000;
const SLOWEST_RETRY_MS = 15000;
const ANSWER_TIMEOUT_MS = 20000;
const KEY_ITEM = "sgl-vllm-api-key";

/** What the page shows. `root` is the model of the chosen engine's last answer. */
const state = {
  apiKey: storedKey(),
  keyWasTried: false,
  engines: [],
  engine: 0,
  root: null,
  zoom: "root",
  focus: "root",   // the node that Tab reaches
  hover: null,
  colour: "use",
  paused: false,
  maxNodes: Number(new URLSearchParams(location.search).get("max_nodes")) || null,
  timer: null,
  running: null,   // the AbortController of the request on its way
  failures: 0,
  answeredAt: null,
  stats: null,     // of the last answer
  history: new StatsHistory(),
};

function storedKey() {
  try { return sessionStorage.getItem(KEY_ITEM); } catch { return null; }
}

function storeKey(key) {
  state.apiKey = key;
  try {
    if (key === null) sessionStorage.removeItem(KEY_ITEM);
    else sessionStorage.setItem(KEY_ITEM, key);
  } catch { /* storage is off: the key lives as long as the page */ }
}

async function ask(route, signal) {
  const headers = { Accept: "application/json" };
  if (state.apiKey) headers.Authorization = `Bearer ${state.apiKey}`;
  return fetch(new URL(`../v1/sgl/${route}`, location.href), { headers, signal, cache: "no-store" });
}

/** The server's counters; null if they cannot be had: the tree can be shown without them. */
async function askStats(signal) {
  try {
    const answer = await ask("stats", signal);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}

/** One round: ask, show, and plan the next. At most one is under way. */
async function refresh() {
  clearTimeout(state.timer);
  if (state.running) return;
  const controller = state.running = new AbortController();
  const deadline = setTimeout(() => controller.abort(), ANSWER_TIMEOUT_MS);
  try {
    const query = state.maxNodes ? `?max_nodes=${state.maxNodes}` : "";
    const [answer, stats] = await Promise.all(
      [ask(`tree${query}`, controller.signal), askStats(controller.signal)]);
    if (answer.status === 401) {
      state.failures = 0;
      return showKeyForm();
    }
    if (answer.status === 404) {
      state.failures += 1;
      return showNotice("No prefix tree here",
        "This server answers, but it has no /v1/sgl/tree: was it started with --plugin sgl_vllm?");
    }
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    const engines = (await answer.json()).engines;
    state.failures = 0;
    state.keyWasTried = false;
    state.answeredAt = Date.now();
    state.engines = engines;
    state.stats = stats;
    state.history.add(stats);
    show();
  } catch (error) {
    state.failures += 1;
    showGone(error);
  } finally {
    clearTimeout(deadline);
    state.running = null;
    plan();
  }
}

function plan() {
  clearTimeout(state.timer);
  const needsKey = !byId("key-form").hidden;
  if (state.paused || document.hidden || needsKey) return;
  const wait = Math.min(REFRESH_MS * 2 ** Math.min(state.failures, 4), SLOWEST_RETRY_MS);
  state.timer = setTimeout(refresh, state.failures ? wait : REFRESH_MS);
}
